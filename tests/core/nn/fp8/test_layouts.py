"""FP8 over several ranks: tensor and sequence parallelism against one process, what is sent, schedules, ZeRO, FSDP2."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.dist.in_turn import InTurn
from torch import Tensor, nn

from mt_core.config.loading import LoadedConfig, load_config
from mt_core.config.schema import PrecisionConfig
from mt_core.nn.dropout import DropoutStreams, use_streams
from mt_core.nn.fp8.history import AdvanceHistories, AmaxHistory
from mt_core.nn.fp8.options import Fp8Options
from mt_core.nn.layout import initialize, normal, parameter_layouts
from mt_core.nn.linear import ColumnParallelLinear, LinearModule, RowParallelLinear
from mt_core.parallel.collectives import split_to
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.testing import run_ranks
from mt_tools.verify.run_record import RunRecord, record_run

pytestmark = [pytest.mark.dist, pytest.mark.slow]

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")
FORMATS = {"nvfp4": "e2m1"}
BATCH, SEQUENCE, HIDDEN, INNER = 2, 64, 128, 256


class Pair(nn.Module):
    """A column-parallel layer and a row-parallel one."""

    def __init__(self, ctx: ParallelContext, recipe: str | None) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(HIDDEN, INNER, ctx, bias=True, init=normal(0.1))
        self.down = RowParallelLinear(INNER, HIDDEN, ctx, bias=True, init=normal(0.1))
        self.histories: list[AmaxHistory] = []
        for module in (self.up, self.down) if recipe else ():
            self.convert(module, recipe)
        use_streams(self, DropoutStreams(11))
        initialize(self, 3, ctx)

    def convert(self, module: LinearModule, recipe: str) -> None:
        options = Fp8Options(
            PrecisionConfig(fp8_format=FORMATS.get(recipe, "hybrid"), fp8_recipe=recipe), "emulated", 1
        )
        if recipe == "delayed":
            module.add_module("fp8", options.history(module.ctx))
            self.histories.append(module.fp8)
        history = module.fp8 if recipe == "delayed" else None
        module.multiply = options.multiply(module, history)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def results(ctx: ParallelContext, recipe: str | None, steps: int = 1) -> dict[str, Tensor]:
    """Canonical out, dx and gradients, of the last of so many passes."""
    pair = Pair(ctx, recipe)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        pair.zero_grad()
        whole = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator).requires_grad_()
        grad = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator)
        divided = ctx.sequence_parallel
        out = pair(split_to(whole, 1, ctx.tp) if divided else whole)
        out.backward(split_to(grad, 1, ctx.tp) if divided else grad)
        AdvanceHistories(pair.histories, ctx).after_step()
    found = {"out": out.detach(), "dx": whole.grad}
    if divided:
        gathered = [torch.empty_like(found["out"]) for _ in range(ctx.tp.size)]
        dist.all_gather(gathered, found["out"].contiguous(), group=ctx.tp.group)
        found["out"] = torch.cat(gathered, 1)
    layouts = parameter_layouts(pair)
    for name, parameter in pair.named_parameters():
        if name.endswith("amax_history"):
            found[name] = parameter.detach()
            continue
        gradient = parameter.grad.clone()
        for axis in layouts[name].partial_gradient:
            dist.all_reduce(gradient, group=ctx.axis(axis).group)
        found[name] = layouts[name].to_canonical(gradient, ctx)
    return found


def off(mine: Tensor, reference: Tensor) -> float:
    return ((mine - reference).norm() / reference.norm()).item()


def layer_differences(rank: int, world: int, case: tuple[str, bool]) -> dict[str, tuple[float, float]]:
    """By name: how far two ranks are from one, and how far one process is in FP8 from one in fp32."""
    recipe, sequence_parallel = case
    ctx = build_parallel_context(AxisSizes(tp=world), sequence_parallel=sequence_parallel)
    divided = results(ctx, recipe, steps=2)
    alone, exact = results(ParallelContext(), recipe, steps=2), results(ParallelContext(), None, steps=2)
    return {name: (off(divided[name], alone[name]), off(alone[name], exact.get(name, alone[name]))) for name in alone}


DIFFERENCES = InTurn(layer_differences, [(2, (recipe, divided)) for recipe in RECIPES for divided in (False, True)])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_compute_what_one_process_does(recipe, sequence_parallel) -> None:
    """Sums in another order move a number of the next cast to its neighbour now and then: a tenth of what FP8 costs.
    With a scale a row, the rows of the row-parallel layer are pieces on each rank, with finer scales of their own."""
    for found in DIFFERENCES.of_ranks(2, (recipe, sequence_parallel)):
        for name, (between, rounding) in found.items():
            if "history" in name:
                assert between < 1e-5, found
                continue
            own_scales = recipe == "rowwise"
            assert between <= rounding * (1.0 if own_scales else 0.1) + 1e-6, (name, found)


def sent_formats(rank: int, world: int, recipe: str) -> dict[str, int]:
    """Bytes that an all-gather of the column-parallel layer's forward pass collects, by dtype."""
    ctx = build_parallel_context(AxisSizes(tp=world), sequence_parallel=True)
    pair = Pair(ctx, recipe)
    counted: dict[str, int] = {}
    gather = dist.all_gather_into_tensor

    def counting(out, x, **options):
        counted[str(out.dtype)] = counted.get(str(out.dtype), 0) + out.numel() * out.element_size()
        return gather(out, x, **options)

    dist.all_gather_into_tensor = counting
    with torch.no_grad():
        pair.up(torch.randn(BATCH, SEQUENCE // world, HIDDEN))
    return counted


@pytest.mark.parametrize(("recipe", "scales"), [("tensorwise", 0), ("rowwise", 1), ("blockwise", 1)])
def test_divided_sequences_are_gathered_in_fp8(recipe, scales) -> None:
    elements, rows = BATCH * SEQUENCE * HIDDEN, BATCH * SEQUENCE
    expected = {"torch.uint8": elements} | ({"torch.float32": 4 * rows * scales} if scales else {})
    assert run_ranks(2, sent_formats, recipe) == [expected] * 2


# -- runs -----------------------------------------------------------------------------------------------

STEPS = 2
"""The second has scales out of the history of the first."""

SETTINGS = (
    "model.num_layers=4",
    "model.hidden_size=128",
    "model.ffn_hidden_size=128",
    "model.num_attention_heads=4",
    "model.vocab_size=263",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "train.train_iters=5",
    "train.eval_interval=null",
    "train.eval_iters=1",
    "checkpoint.save_interval=null",
    "lr_schedule.lr_warmup_iters=1",
    "logging.progress=none",
    "precision.fp8_format=hybrid",
)


def config(*more: str) -> LoadedConfig:
    torch.set_num_threads(1)
    return load_config(preset="gpt-tiny", overrides=[*SETTINGS, *more])


def recorded(rank: int, world: int, more: tuple[str, ...]) -> RunRecord | None:
    record = record_run(config(*more), STEPS)
    return record if rank == 0 else None


ZERO_BUBBLE = ("parallel.pipeline_model_parallel_size=2", "parallel.pipeline_schedule=interleaved_zero_bubble")
EXACT = {
    "pipeline": ("parallel.pipeline_model_parallel_size=2",),
    "zero bubble": ZERO_BUBBLE,
    "data": (),
    "ZeRO": ("parallel.use_distributed_optimizer=true",),
    "FSDP2": ("parallel.use_torch_fsdp2=true",),
}
"""Layouts in which each rank multiplies what one process does: only sums of gradients differ."""


CASES = [(recipe, layout) for recipe in ("tensorwise", "delayed") for layout in EXACT]
CASES.remove(("delayed", "FSDP2"))  # refused by name, see test_training
CASES += [("nvfp4", "zero bubble"), ("nvfp4", "data")]
WHOLE = ("tensorwise", "delayed", "nvfp4")
TENSOR_PARALLEL = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")


def of_recipe(recipe: str) -> tuple[str, ...]:
    return (f"precision.fp8_recipe={recipe}", f"precision.fp8_format={FORMATS.get(recipe, 'hybrid')}")


RUNS = InTurn(
    recorded,
    [
        *((1, of_recipe(recipe)) for recipe in WHOLE),
        *((2, (*of_recipe(recipe), *TENSOR_PARALLEL)) for recipe in WHOLE),
    ],
    [(2, (*of_recipe(recipe), *EXACT[layout])) for recipe, layout in CASES],
)


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_layouts_that_cut_no_matrix_have_the_same_losses(recipe, layout) -> None:
    keys = of_recipe(recipe)
    alone, found = RUNS.result(1, keys), RUNS.result(2, (*keys, *EXACT[layout]))
    assert found.losses[0] == pytest.approx(alone.losses[0], rel=1e-5)
    assert found.losses == pytest.approx(alone.losses, rel=1e-3)
    assert found.norms[0] == pytest.approx(alone.norms[0], rel=1e-4)
    for name, gradient in alone.gradients.items():
        assert off(found.gradients[name], gradient) < 1e-3, name
    for name, weight in alone.weights.items():
        if name.endswith("amax_history"):
            assert torch.allclose(found.weights[name], weight, rtol=0.05), name


@pytest.mark.parametrize("recipe", WHOLE)
def test_tensor_parallel_runs_stay_together(recipe) -> None:
    keys = of_recipe(recipe)
    alone, found = RUNS.result(1, keys), RUNS.result(2, (*keys, *TENSOR_PARALLEL))
    assert found.losses == pytest.approx(alone.losses, rel=2e-3)
    assert found.evaluation == pytest.approx(alone.evaluation, rel=5e-3)


def together(rank: int, world: int) -> list[bool]:
    """Whether histories have the same bits on all ranks after steps on different samples."""
    from mt_core.train import Trainer

    trainer = Trainer(config("precision.fp8_recipe=delayed", "train.train_iters=2"))
    trainer.train()
    own = torch.stack([p.detach() for name, p in trainer.model.named_parameters() if name.endswith("amax_history")])
    everyone = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(everyone, own)
    return [bool((own > 0).all()), *(torch.equal(own, other) for other in everyone)]


def test_data_parallel_ranks_share_their_histories() -> None:
    assert run_ranks(2, together) == [[True, True, True]] * 2
