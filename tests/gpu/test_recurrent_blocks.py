"""On a GPU: kernels of recurrent layers and of indexers, mt's and those of flash-linear-attention, against torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mt_core.nn.kernels.catalogue import KERNELS
from mt_core.nn.kernels.reference import causal_conv as reference
from mt_models.blocks.delta_backends import GATED, KIMI, RWKV7, Recurrence
from mt_models.blocks.fla_delta_rule import can_run_fla
from mt_models.blocks.fla_rwkv7_rule import fla_rwkv7_rule, fla_rwkv7_step
from mt_models.blocks.gated_delta_rule import DeltaInputs
from mt_models.blocks.indexer import index_scores, torch_index_scores
from mt_models.blocks.rwkv7_rule import LOWEST_DECAY, Rwkv7Inputs, recurrent_rwkv7_rule
from mt_models.blocks.selective_scan import selective_scan
from mt_models.blocks.state_space import chunked_scan, recurrent_scan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RECURRENCES = {"gated": GATED, "kimi": KIMI}


CONVOLUTION = {kernel.name: kernel for kernel in KERNELS["causal_conv"]}["triton"]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape)))


def delta_inputs(name: str, length: int, dtype: torch.dtype) -> DeltaInputs:
    heads = (2, length, 8)
    keys = (2, length, 4 if name == "gated" else 8, 64)
    g = -draw(*heads, 64).exp() if name == "kimi" else -draw(*heads).exp()
    q, k, v = draw(*keys), draw(*keys).flip(0), draw(*heads, 64)
    return DeltaInputs(q.to(dtype), k.to(dtype), v.to(dtype), g, draw(*heads).sigmoid().to(dtype))


def assert_near(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], share: float) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.float(), y.float(), atol=share * y.abs().max().item(), rtol=0.0)


@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_a_step_of_the_kernel(name: str, dtype: torch.dtype, share: float) -> None:
    from mt_models.blocks.triton_kernels.delta_step import triton_delta_step

    inputs, state = delta_inputs(name, 3, dtype), draw(2, 8, 64, 64)
    expected = RECURRENCES[name].recurrent(inputs, state=state)
    assert_near(triton_delta_step(inputs, state=state), expected, share)


def with_gradients(
    rule: Callable[..., tuple[Tensor, Tensor]], inputs: DeltaInputs | Rwkv7Inputs, **options: Tensor
) -> list[Tensor]:
    """Outputs, the last state, and the gradients of the inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, last = rule(type(inputs)(*leaves), **options)
    return [o, last, *torch.autograd.grad((o, last), leaves, (draw(*o.shape).to(o.dtype), draw(*last.shape)))]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", RECURRENCES)
def test_kernels_of_whole_sequences(name: str, is_packed: bool) -> None:
    recurrence, inputs = RECURRENCES[name], delta_inputs(name, 200, torch.bfloat16)
    segments = {"segment_ids": (torch.arange(200, device="cuda") // 70).expand(2, -1)}
    options = segments if is_packed else {"state": draw(2, 8, 64, 64)}
    found = with_gradients(partial(recurrence.triton, chunk_size=64), inputs, **options)
    exact = DeltaInputs(*(x.float() for x in inputs))
    assert_near(tuple(found), tuple(with_gradients(recurrence.recurrent, exact, **options)), 3e-2)


def rwkv7_inputs(length: int, dim: int = 64) -> Rwkv7Inputs:
    shape = (2, length, 8, dim)
    z = torch.nn.functional.normalize(draw(*shape).flip(0), dim=-1)
    values = (draw(*shape), draw(*shape).flip(1), draw(*shape).flip(2), z, draw(*shape).sigmoid())
    r, k, v, z, a = (x.bfloat16() for x in values)
    return Rwkv7Inputs(r, LOWEST_DECAY * draw(*shape).sigmoid(), k, v, z, a)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_of_rwkv7(dim: int, is_packed: bool) -> None:
    inputs = rwkv7_inputs(200, dim)
    segments = {"segment_ids": (torch.arange(200, device="cuda") // 70).expand(2, -1)}
    options = segments if is_packed else {"state": draw(2, 8, dim, dim)}
    exact = Rwkv7Inputs(*(x.float() for x in inputs))
    expected = with_gradients(recurrent_rwkv7_rule, exact, **options)
    found = with_gradients(partial(RWKV7.triton, chunk_size=32), inputs, **options)
    assert_near(tuple(found), tuple(expected), 1e-2)
    assert_near(RWKV7.triton_step(inputs, **options), tuple(expected[:2]), 1e-2)


@pytest.mark.parametrize("is_packed", [False, True])
def test_kernels_of_the_scan_of_mamba(is_packed: bool) -> None:
    from mt_models.blocks.triton_kernels.state_space import triton_scan

    inputs = [draw(2, 200, 8, 64).bfloat16(), 0.1 * draw(2, 200, 8).exp(), -draw(8).exp()]
    inputs += [draw(2, 200, 2, 128).bfloat16(), draw(2, 200, 2, 128).flip(1).bfloat16()]
    segments = {"segment_ids": (torch.arange(200, device="cuda") // 70).expand(2, -1)}
    options = segments if is_packed else {"state": draw(2, 8, 64, 128)}

    def with_gradients_by(scan: Callable[..., tuple[Tensor, Tensor]], parts: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in parts]
        y, last = scan(*leaves, chunk_size=64, **options)
        return (y, last, *torch.autograd.grad((y, last), leaves, (draw(*y.shape).to(y.dtype), draw(*last.shape))))

    exact = with_gradients_by(chunked_scan, [x.float() for x in inputs])
    assert_near(with_gradients_by(triton_scan, inputs), exact, 3e-2)


def selective_inputs(length: int) -> list[Tensor]:
    """x, dt, a, b and c of 200 channels with 16 numbers"""
    x, dt, a = draw(2, length, 200), 0.1 * draw(2, length, 200).exp(), -draw(200, 16).exp()
    return [x.bfloat16(), dt, a, draw(2, length, 16).bfloat16(), draw(2, length, 16).flip(1).bfloat16()]


@pytest.mark.parametrize("is_packed", [False, True])
def test_kernels_of_the_scan_of_mamba1(is_packed: bool) -> None:
    from mt_models.blocks.triton_kernels.selective_scan import triton_selective_scan

    segments = {"segment_ids": (torch.arange(150, device="cuda") // 70).expand(2, -1)}
    options = segments if is_packed else {"state": draw(2, 200, 16)}

    def with_gradients_by(scan: Callable[..., tuple[Tensor, Tensor]], parts: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in parts]
        y, last = scan(*leaves, **options)
        return (y, last, *torch.autograd.grad((y, last), leaves, (draw(*y.shape), draw(*last.shape))))

    inputs = selective_inputs(150)
    exact = with_gradients_by(selective_scan, [x.float() for x in inputs])
    assert_near(with_gradients_by(triton_selective_scan, inputs), exact, 1e-2)


def test_steps_of_mamba() -> None:
    from mt_models.blocks.triton_kernels.state_space_step import triton_selective_step, triton_state_step

    inputs, state = selective_inputs(1), draw(2, 200, 16)
    assert_near(triton_selective_step(*inputs, state=state), selective_scan(*inputs, state=state), 1e-5)
    x, dt, a = draw(2, 1, 8, 64).bfloat16(), 0.1 * draw(2, 1, 8).exp(), -draw(8).exp()
    b, c, state = draw(2, 1, 2, 128).bfloat16(), draw(2, 1, 2, 128).flip(2).bfloat16(), draw(2, 8, 64, 128)
    expected = recurrent_scan(x, dt, a, b, c, state=state)
    assert_near(triton_state_step(x, dt, a, b, c, state=state), expected, 1e-2)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_kernels_of_the_short_convolution(is_packed: bool, dtype: torch.dtype, share: float) -> None:
    x, weight, bias = draw(2, 500, 136)[..., :130].to(dtype), draw(130, 4).to(dtype), draw(130).to(dtype)
    segments = (torch.arange(500, device="cuda") // 70).expand(2, -1) if is_packed else None

    def with_gradients_by(convolve: Callable[..., Tensor], parts: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [part.detach().requires_grad_() for part in parts]
        y = convolve(*leaves, segments, silu=True)
        return (y, *torch.autograd.grad(y, leaves, draw(*y.shape).to(y.dtype)))

    exact = with_gradients_by(reference.causal_conv, [part.float() for part in (x, weight, bias)])
    assert_near(with_gradients_by(CONVOLUTION.function.load(), [x, weight, bias]), exact, share)
    assert CONVOLUTION.fused is not None
    fused = CONVOLUTION.fused.load()
    for new in (1, 5):
        step = fused(x[:, 3 : 3 + new], weight, bias, x[:, :3], silu=True)
        assert_near(step, reference.causal_conv_step(x[:, 3 : 3 + new], weight, bias, x[:, :3], silu=True), share)


@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_an_indexer(count: int, dtype: torch.dtype) -> None:
    q, w, k = draw(2, count, 16, 128).to(dtype), draw(2, count, 16), draw(2, 500, 128).to(dtype)
    found = index_scores(q, w, k)
    with_gradients = index_scores(q, w.requires_grad_(), k).detach()
    assert_near((found,), (with_gradients,), 1e-5)


@pytest.mark.parametrize("count", [1, 300])
def test_scores_of_an_indexer_that_learns(count: int) -> None:
    from mt_core.nn.kernels.triton_kernels.index_scores import index_scores as by_kernels

    q, w, k = draw(2, count, 16, 128).bfloat16(), draw(2, count, 16), draw(2, 500, 128).bfloat16()

    def with_gradients_by(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        scores = function(*leaves)
        return (scores, *torch.autograd.grad(scores, leaves, draw(*scores.shape)))

    exact = with_gradients_by(torch_index_scores, q.float(), w, k.float())
    assert_near(with_gradients_by(by_kernels, q, w, k), exact, 1e-2)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_hyper_connections(n: int, dtype: torch.dtype, share: float) -> None:
    from mt_core.nn.kernels.reference import hyper_connection as reference
    from mt_core.nn.kernels.triton_kernels import hyper_connection as kernels

    width, connection = (2 + n) * n, reference.Connection(1e-6, 1e-6, 20)
    streams, output = draw(2, 150, n * 130).to(dtype), draw(2, 150, 130).to(dtype)

    def with_gradients_by(module: ModuleType, streams: Tensor, output: Tensor) -> tuple[Tensor, ...]:
        parts = (streams, draw(2, 150, width), draw(width), draw(3), output)
        leaves = [x.detach().requires_grad_() for x in parts]
        x, post, mixing = module.read_streams(*leaves[:4], connection)
        mixed = module.mixed_streams(leaves[4] + x, post, mixing, leaves[0])
        return (x, post, mixing, mixed, *torch.autograd.grad(mixed, leaves, draw(*mixed.shape).to(mixed.dtype)))

    exact = with_gradients_by(reference, streams.float(), output.float())
    assert_near(with_gradients_by(kernels, streams, output), exact, share)


# -- flash-linear-attention ----------------------------------------------------------------------------

needs_fla = pytest.mark.skipif(not can_run_fla("fla.ops.kda"), reason="needs flash-linear-attention with KDA")


@needs_fla
@pytest.mark.parametrize("name", RECURRENCES)
def test_rules_of_fla(name: str) -> None:
    recurrence: Recurrence = RECURRENCES[name]
    inputs, state = delta_inputs(name, 150, torch.bfloat16), draw(2, 8, 64, 64)
    expected = recurrence.recurrent(inputs, state=state)
    assert_near(recurrence.fla(inputs, state=state), expected, 2e-2)
    assert_near(recurrence.fla_step(inputs, state=state), expected, 1e-2)
    segments = (torch.arange(150, device="cuda") // 70).expand(2, -1)
    packed = recurrence.recurrent(inputs, segment_ids=segments)[0]
    assert_near(recurrence.fla(inputs, segment_ids=segments)[:1], (packed,), 2e-2)


@needs_fla
@pytest.mark.parametrize(("rule", "share"), [(fla_rwkv7_rule, 2e-2), (fla_rwkv7_step, 1e-2)])
def test_rwkv7_of_fla(rule: Callable[..., tuple[Tensor, Tensor]], share: float) -> None:
    inputs, state = rwkv7_inputs(150), draw(2, 8, 64, 64)
    assert_near(rule(inputs, state=state), recurrent_rwkv7_rule(inputs, state=state), share)
