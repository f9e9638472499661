"""AdamW over lists of tensors: against torch.optim, in halves, in 16 bits, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.core.nn.kernels.interpreter import implementation, run_interpreted
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import TorchDispatchMode

from mt_core.errors import ConfigError
from mt_core.nn.kernels.reference.adamw import (
    AdamWOptions,
    AdamWTensors,
    TorchAdamW,
    hash32,
    join_halves,
    round_moment,
    split_halves,
)
from mt_core.nn.kernels.triton_kernels.adamw import TableCache
from mt_core.nn.layout import initialize, normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.optim.fused_adamw import FusedAdamW
from mt_core.optim.master_weights import Fp32MasterWeights
from mt_core.optim.optimizers import model_copies
from mt_core.optim.param_and_grad_buffer import BufferOptions, ParamAndGradBuffer
from mt_core.parallel.context import ParallelContext

OPTIONS = AdamWOptions(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
SHAPES = ((7, 5), (3000,), (0,), (1,), (16, 8))
IMPLEMENTATIONS = ("torch", "triton")


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def lists(
    weight_dtype: torch.dtype,
    moment_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    copies: bool = False,
) -> AdamWTensors:
    main = [numbers(shape, 1) for shape in shapes]
    halves = [split_halves(x) for x in main]
    in_halves = weight_dtype == torch.bfloat16
    return AdamWTensors(
        [high for high, _ in halves] if in_halves else main,
        [numbers(shape, 2).to(gradient_dtype) for shape in shapes],
        [torch.zeros(shape, dtype=moment_dtype) for shape in shapes],
        [torch.zeros(shape, dtype=moment_dtype) for shape in shapes],
        [torch.zeros(()) for _ in shapes],
        [low for _, low in halves] if in_halves else [],
        [x.to(torch.bfloat16) for x in main] if copies else [],
    )


def moved(tensors: AdamWTensors, device: str) -> AdamWTensors:
    return AdamWTensors(**{kind: [x.to(device) for x in held] for kind, held in vars(tensors).items()})


def main_weights(tensors: AdamWTensors) -> list[Tensor]:
    if not tensors.remainders:
        return list(tensors.weights)
    return [join_halves(high, low) for high, low in zip(tensors.weights, tensors.remainders, strict=True)]


def exact_steps(shapes: tuple[tuple[int, ...], ...], gradients: list[list[Tensor]], scale: float) -> list[Tensor]:
    """torch's own AdamW in fp64 over the same start. (Its class would import torch's compiler, for seconds.)"""
    weights = [numbers(shape, 1).double() for shape in shapes]
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    steps = [torch.zeros(()) for _ in weights]
    for step in gradients:
        scaled = [gradient.double() * scale for gradient in step]
        adamw(
            weights, scaled, first, second, [], steps, foreach=False, amsgrad=False, beta1=0.9, beta2=0.95, lr=1e-2,
            weight_decay=0.1, eps=1e-8, maximize=False,
        )  # fmt: skip
    return weights


def check_against_torch(rank: int, world: int, name: str) -> None:
    scale = 0.5
    for weight_dtype, gradient_dtype in (
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ):
        tensors, engine, gradients = (
            lists(weight_dtype, torch.float32, gradient_dtype),
            implementation("adamw", name)(),
            [],
        )
        for step in range(3):
            tensors.gradients = [numbers(shape, 10 + step).to(gradient_dtype) for shape in SHAPES]
            gradients.append(list(tensors.gradients))
            engine.step(tensors, OPTIONS, torch.tensor(scale))
        wanted = exact_steps(SHAPES, gradients, scale)
        for got, want in zip(main_weights(tensors), wanted, strict=True):
            assert torch.allclose(got.double(), want, rtol=2e-6, atol=2e-7)
        assert [step.item() for step in tensors.steps] == [3.0] * len(SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_same_weights_as_torch(name: str) -> None:
    """In halves too: a bf16 weight and its remainder lose nothing against fp32."""
    run_interpreted(check_against_torch, name)


def check_triton_bits(rank: int, world: int) -> None:
    for weight_dtype, moment_dtype, gradient_dtype in (
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ):
        one, other = (lists(weight_dtype, moment_dtype, gradient_dtype) for _ in range(2))
        for engine, tensors in ((TorchAdamW(), one), (implementation("adamw", "triton")(), other)):
            for _ in range(3):
                engine.step(tensors, OPTIONS, torch.tensor(0.5))
        for kind in ("moments1", "moments2"):
            assert all(torch.equal(a, b) for a, b in zip(getattr(one, kind), getattr(other, kind), strict=True))
        for a, b in zip(main_weights(one), main_weights(other), strict=True):
            # roots and quotients may differ in the last place
            assert torch.allclose(a, b, rtol=3e-7, atol=3e-8)


@pytest.mark.slow
def test_triton_and_torch_keep_the_same_moments_to_the_last_bit() -> None:
    """Stochastic rounding included, as its bits are a hash of index and step."""
    run_interpreted(check_triton_bits)


def check_skipped(rank: int, world: int, name: str) -> None:
    for moment_dtype in (torch.float32, torch.bfloat16):
        tensors = lists(torch.bfloat16, moment_dtype, torch.bfloat16, copies=False)
        tensors.gradients[0].fill_(float("inf"))
        before = [x.clone() for kind in vars(tensors).values() for x in kind]
        for scale in (float("nan"), float("inf")):
            implementation("adamw", name)().step(tensors, OPTIONS, torch.tensor(scale))
        after = [x for kind in vars(tensors).values() for x in kind]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_scale_that_is_not_finite_changes_nothing(name: str) -> None:
    run_interpreted(check_skipped, name)


def check_forms(rank: int, world: int, name: str, device: str = "cpu") -> None:
    """From weights half way between two bf16 numbers. The first step leaves them there; then each weight moves. Aligned
    and odd sizes take different paths."""
    for shapes, gradient, moment in (
        (SHAPES, torch.float32, torch.float32),
        (((16, 8), (24,)), torch.float32, torch.float32),
        (((16, 8), (24,)), torch.bfloat16, torch.bfloat16),
    ):
        copies = moved(lists(torch.float32, moment, gradient, shapes, copies=True), device)
        halves = moved(lists(torch.bfloat16, moment, gradient, shapes), device)
        engine, scale = implementation("adamw", name)(), torch.tensor(0.5, device=device)
        for i, weight in enumerate(copies.weights):
            weight.copy_(join_halves(weight.bfloat16(), torch.full_like(weight, -0x8000, dtype=torch.int16)))
            halves.weights[i], halves.remainders[i] = split_halves(weight)
        for lr in (0.0, 1e-2, 1e-2, 1e-2):
            for tensors in (copies, halves):
                engine.step(tensors, replace(OPTIONS, lr=lr), scale)
            require_equal(copies.weights, main_weights(halves))
            require_equal(copies.copies, halves.weights)
        nan_of_a_gpu = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
        copies.weights[0].fill_(nan_of_a_gpu)
        engine.step(copies, OPTIONS, scale)
        assert copies.copies[0].isnan().all()


def require_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_copies_and_remainders_train_the_same_bits(name: str) -> None:
    """Of the model's bf16 weights too: a cast to bf16 would round ties to even, where 16 bits of remainder cannot."""
    run_interpreted(check_forms, name)


def check_moved_tensors(rank: int, world: int) -> None:
    """Gradients that stand elsewhere at the next step are found there."""
    engine, one, other = implementation("adamw", "triton")(), *(lists(*[torch.float32] * 3) for _ in range(2))
    kept = []
    for step in range(3):
        one.gradients = [numbers(shape, 20 + step) for shape in SHAPES]
        other.gradients = [x.clone() for x in one.gradients]
        kept.append(one.gradients)
        engine.step(one, OPTIONS, torch.tensor(1.0))
        TorchAdamW().step(other, OPTIONS, torch.tensor(1.0))
    assert all(torch.allclose(a, b, rtol=3e-7, atol=3e-8) for a, b in zip(one.weights, other.weights, strict=True))


def test_tables_of_addresses_follow_the_tensors() -> None:
    run_interpreted(check_moved_tensors)


def test_blocks_are_cut_once_for_tensors_of_the_same_sizes() -> None:
    cache = TableCache()
    one, other = (cache([[torch.zeros(5000), torch.zeros(104)]]) for _ in range(2))
    assert one.wide is other.wide
    assert one.wide.owner.tolist() == [0, 0, 0, 1]
    assert one.wide.first.tolist() == [0, 2048, 4096, 0]


def test_only_tensors_that_wide_accesses_do_not_fit_are_accessed_by_element() -> None:
    """Sizes 2 and 100 are no multiples of 8, and the slice at 1 begins within 16 bytes."""
    memory = torch.zeros(33)
    weights = [torch.zeros(5000), torch.zeros(2), memory[1:33], torch.zeros(100), torch.zeros(768)]
    table = TableCache()(
        [weights, [torch.zeros_like(weight) for weight in weights], [torch.zeros(()) for _ in weights]]
    )
    assert (table.wide.owner.tolist(), table.narrow.owner.tolist()) == ([0, 0, 0, 4], [1, 2, 3])
    assert table.sizes.tolist() == [5000, 2, 32, 100, 768]


def check_strided(rank: int, world: int) -> str:
    tensors = lists(*[torch.float32] * 3, shapes=((4, 4),))
    tensors.gradients = [tensors.gradients[0].T]
    with pytest.raises(ValueError, match="contiguous") as caught:
        implementation("adamw", "triton")().step(tensors, OPTIONS, torch.tensor(1.0))
    return str(caught.value)


def test_strided_tensors_are_refused() -> None:
    run_interpreted(check_strided)


# -- the parts -------------------------------------------------------------------------------------


def test_halves_hold_every_fp32_number_and_round_to_nearest() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (20000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    numbers_ = bits.view(torch.float32)
    numbers_ = numbers_[numbers_.isfinite() & (numbers_.abs() < 3.38e38)]
    high, low = split_halves(numbers_)
    assert torch.equal(join_halves(high, low).view(torch.int32), numbers_.view(torch.int32))
    nan, inf = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000]).to(torch.int32).view(torch.float32), torch.tensor([math.inf])
    assert all(half.isnan().all() for half in (split_halves(nan)[0], join_halves(*split_halves(nan))))
    assert torch.equal(split_halves(inf)[0].float(), inf)
    ties = (numbers_.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(high[~ties], numbers_[~ties].to(torch.bfloat16))


def test_stochastic_rounding_is_unbiased_and_exact_where_it_can_be() -> None:
    value = torch.full((40000,), 1.0 + 2**-9)  # a quarter of the way from 1 to the next bf16, 1 + 2^-7
    noise = hash32(torch.arange(40000), torch.tensor(3.0)) & 0xFFFF
    rounded = round_moment(value, noise).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.mean().item() == pytest.approx(1.0 + 2**-9, abs=2e-4)  # four standard deviations: 7e-5
    assert torch.equal(round_moment(torch.full((9,), -1.5), noise[:9]).float(), torch.full((9,), -1.5))


def test_second_moment_in_bf16_does_not_stand_still() -> None:
    """With beta2 0.999 each change is below half a bf16 step; round to nearest would stay at 0 change."""
    options = AdamWOptions(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    tensors = lists(torch.float32, torch.bfloat16, torch.float32, shapes=((4096,),))
    tensors.moments2[0].fill_(1.0)
    tensors.gradients = [torch.zeros(4096)]
    for _ in range(200):
        TorchAdamW().step(tensors, options, torch.tensor(1.0))
    assert tensors.moments2[0].float().mean().item() == pytest.approx(0.999**200, rel=5e-3)


# -- the optimizer ---------------------------------------------------------------------------------


def optimizer_over(parameter: nn.Parameter, moment_dtype: torch.dtype) -> FusedAdamW:
    group = {"params": [parameter], "names": ["w"], "weight_decay": 0.1}
    return FusedAdamW([group], 1e-2, 0.9, 0.95, 1e-8, TorchAdamW(), moment_dtype)


def test_ten_bytes_a_parameter() -> None:
    parameter = nn.Parameter(numbers((64, 32), 1).to(torch.bfloat16))
    optimizer = optimizer_over(parameter, torch.bfloat16)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [parameter, parameter.grad, *(x for x in optimizer.state[parameter].values() if x.ndim)]
    assert sum(x.numel() * x.element_size() for x in held) == 10 * parameter.numel()


def test_halves_train_as_fp32_does() -> None:
    start = numbers((8, 4), 1)
    half, single = nn.Parameter(start.to(torch.bfloat16)), nn.Parameter(start.clone())
    optimizers = [optimizer_over(p, torch.float32) for p in (half, single)]
    for optimizer, parameter in zip(optimizers, (half, single), strict=True):
        optimizer.set_main(parameter, start)
        for step in range(5):
            parameter.grad = numbers((8, 4), 30 + step).to(parameter.dtype).to(parameter.dtype)
            if parameter is single:
                parameter.grad = numbers((8, 4), 30 + step).to(torch.bfloat16).float()
            optimizer.step()
    main = join_halves(half.detach(), optimizers[0].state[half]["remainder"])
    assert torch.equal(main, single.detach())


def test_scale_of_the_next_step() -> None:
    one, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    for parameter, gradient, scale in ((one, 4.0, 0.25), (other, 1.0, None)):
        optimizer = optimizer_over(parameter, torch.float32)
        parameter.grad = torch.full((3,), gradient)
        optimizer.gradient_scale = None if scale is None else torch.tensor(scale)
        optimizer.step()
    assert torch.equal(one, other)


def test_fp16_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"float16.*precision\.dtype=bf16"):
        optimizer_over(nn.Parameter(torch.ones(2, dtype=torch.float16)), torch.float32)


def in_buckets(model: nn.Module, *, sharded: bool) -> ParamAndGradBuffer:
    return ParamAndGradBuffer(model, ParallelContext(), BufferOptions(sharded=sharded))


@pytest.mark.parametrize(
    "build", [Fp32MasterWeights, partial(in_buckets, sharded=False), partial(in_buckets, sharded=True)]
)
def test_model_weights_are_written_by_the_update(build) -> None:
    """As a copy after it does, which nothing is left for; a step that is skipped changes none."""

    def stepped(takes: bool) -> tuple[Tensor, int]:
        ctx = ParallelContext(params_dtype=torch.bfloat16)
        model = ColumnParallelLinear(32, 8, ctx, bias=False, init=normal(0.1))
        initialize(model, 0, ctx)
        weights = build(model)
        (name, master), *_ = weights.named_parameters()
        group = {"params": [master], "names": [name], "weight_decay": 0.1}
        copies = model_copies([group], weights) if takes else {}
        optimizer = FusedAdamW([group], 1e-2, 0.9, 0.95, 1e-8, TorchAdamW(), torch.bfloat16, copies)
        for scale in (1.0, math.nan):
            master.grad = numbers((8, 32), 5).view_as(master)
            optimizer.gradient_scale = torch.tensor(scale)
            optimizer.step()
            with Operators() as operators:
                weights.copy_to_model()
        assert torch.equal(model.weight, master.bfloat16().view_as(model.weight))
        return model.weight.detach(), operators.count

    (written, after), (copied, before) = stepped(True), stepped(False)
    assert torch.equal(written, copied)
    assert (after, before) == (0, 1)


class Operators(TorchDispatchMode):
    """Counts operators that launch something."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))
