"""Models cut into pipeline stages against the same models in one process: loss and every gradient.

A test starts its ranks once and goes through many cases; ranks return what differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import initialize, parameter_layouts
from mt_core.nn.loss import cross_entropy, vocab_parallel_cross_entropy
from mt_core.optim.master_weights import Fp32MasterWeights
from mt_core.parallel.collectives import all_reduce
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.parallel.pipeline.p2p_communicator import P2PCommunicator
from mt_core.parallel.pipeline.partition import balanced_stages
from mt_core.parallel.pipeline.pipeline import Pipeline
from mt_core.parallel.pipeline.schedule_tables import Kind, stages_of_rank
from mt_core.parallel.pipeline.schedules import PipelineSchedule, rank_actions
from mt_core.parallel.pipeline.stage import Stage
from mt_core.parallel.pipeline.timeline import COMPUTATION, Timeline, simulate
from mt_core.parallel.pipeline.trace import ScheduleRecorder
from mt_core.plugins import load_plugins
from mt_core.specs import MODELS, PIPELINE_SCHEDULES
from mt_core.testing import run_ranks
from mt_tools.bench.pipeline import measured, stage_times

pytestmark = pytest.mark.dist

VOCAB, SEQUENCE = 29, 8
INPUTS = ("tokens", "position_ids", "segment_ids")
LLAMA = {"family": "llama", "num_query_groups": 1, "untie_embeddings_and_output_weights": True}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt tied": {"family": "gpt", "max_position_embeddings": 16, "untie_embeddings_and_output_weights": False},
    "llama": LLAMA,
    "llama tied": {**LLAMA, "untie_embeddings_and_output_weights": False},
}
STAGES_PER_RANK = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved_1f1b": (2,),
    "interleaved_zero_bubble": (1, 2),
    "zbv_zero_bubble": (2,),
    "dualpipe_v": (2,),
}


def build(host: Any, keys: Mapping[str, Any], ctx: ParallelContext, stages: tuple[Stage, ...] | None, layers: int):
    shape = {"num_layers": layers, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": VOCAB, **keys}
    settings = [
        f"model.{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in shape.items()
    ]
    settings += [f"data.seq_length={SEQUENCE}", "train.train_iters=1"]
    config = load_config(overrides=settings, host=host).config
    environment = ModelBuildContext(config, ctx, host, stages)
    model = host[MODELS].get(config.model.family).build.load()(config.model, environment)
    initialize(model, 3, ctx)
    return model


def micro_batches(count: int, sequence: int = SEQUENCE) -> list[dict[str, Tensor]]:
    """Samples with a different weight each, so that exchanging two would show."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCAB, (count, 2, sequence + 1), generator=generator)
    return [
        {"tokens": own[:, :-1], "labels": own[:, 1:], "weight": torch.tensor(1.0 + number)}
        for number, own in enumerate(ids)
    ]


def share(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return (cross_entropy(output, batch) * batch["weight"]).sum() / 100


def one_process(model: Any, batches: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    total = torch.zeros(())
    for batch in batches:
        part = share(model(batch["tokens"]), batch)
        part.backward()
        total += part.detach()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def summed_over_ranks(
    loss: Tensor, model: Any, ctx: ParallelContext, *, add_copies: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients of all ranks; those of copies of a weight are added."""
    held: list[Any] = [None] * ctx.pp.size
    # As arrays, which are pickled ten times faster than tensors.
    own = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    dist.all_gather_object(held, (loss.item(), own), group=ctx.pp.group)
    gradients: dict[str, Any] = {}
    for _, of_rank in held:
        for name, gradient in of_rank.items():
            # Tied embeddings: the first and the last stage have a part of the gradient each.
            gradients[name] = gradients[name] + gradient if name in gradients and add_copies else gradient
    loss = torch.tensor(sum(of_rank for of_rank, _ in held))
    return loss, {name: torch.from_numpy(gradient) for name, gradient in gradients.items()}


def differences(
    expected: tuple[Tensor, dict[str, Tensor]], actual: tuple[Tensor, dict[str, Tensor]]
) -> dict[str, float]:
    """Of loss and gradients, relative to the largest value of each."""
    assert expected[1].keys() == actual[1].keys(), expected[1].keys() ^ actual[1].keys()
    found = {"loss": relative(actual[0], expected[0])}
    return found | {name: relative(actual[1][name], expected[1][name]) for name in expected[1]}


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()


@cache
def registered(name: str) -> PipelineSchedule:
    schedule: PipelineSchedule = load_plugins()[PIPELINE_SCHEDULES].get(name).schedule.load()
    return schedule


def pipeline_of(
    host: Any, keys: Mapping[str, Any], schedule: str, stages: Sequence[Stage], ctx: ParallelContext, layers: int
):
    numbers = stages_of_rank(ctx.pp.rank, len(stages), ctx.pp.size, registered(schedule).placement)
    model = build(host, keys, ctx, tuple(stages[number] for number in numbers), layers)
    return model, Pipeline(model, stages, registered(schedule), ctx, inputs=INPUTS)


def train(
    rank: int, world: int, cases: Sequence[tuple[str, int]], layers: int
) -> dict[tuple[str, int, str, int], tuple[Tensor, dict[str, Tensor]]]:
    """Of each family with each number of micro-batches under each schedule: loss and gradients, on the first rank."""
    host, ctx, found = load_plugins(), build_parallel_context(AxisSizes(pp=world)), {}
    for (family, count), (schedule, numbers) in itertools.product(cases, STAGES_PER_RANK.items()):
        for each in numbers:
            stages = balanced_stages(layers, each * world, embedding_cost=0.5, output_cost=1.0)
            model, pipeline = pipeline_of(host, FAMILIES[family], schedule, stages, ctx, layers)
            loss = pipeline.forward_backward(micro_batches(count), share)
            found[family, count, schedule, each] = summed_over_ranks(loss, model, ctx)
    return found if rank == 0 else {}


ON_TWO = (("gpt tied", 4), ("llama", 1), ("llama tied", 3))
ON_FOUR = (("gpt tied", 9), ("llama", 3))
"""Models and numbers of micro-batches, each of which goes through all schedules."""
FURTHER_ON_TWO = tuple(case for case in itertools.product(FAMILIES, (1, 3, 4)) if case not in ON_TWO)
FURTHER_ON_FOUR = tuple(case for case in itertools.product(FAMILIES, (3, 9)) if case not in ON_FOUR)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cases", "layers"),
    [
        (2, ON_TWO, 5),
        (4, ON_FOUR, 9),
        pytest.param(2, FURTHER_ON_TWO, 5, marks=pytest.mark.exhaustive),
        pytest.param(4, FURTHER_ON_FOUR, 9, marks=pytest.mark.exhaustive),
    ],
)
def test_every_schedule_computes_the_gradients_of_one_process(world, cases, layers) -> None:
    """Layers that do not divide evenly; fewer and more micro-batches than stages, and no multiples."""
    host = load_plugins()
    found = run_ranks(world, train, cases, layers)[0]
    # Six schedules, one of them with two numbers of stages.
    assert len(found) == len(cases) * 7
    for family, count in cases:
        whole = build(host, FAMILIES[family], ParallelContext(), None, layers)
        expected = one_process(whole, micro_batches(count))
        of_case = {case: differences(expected, actual) for case, actual in found.items() if case[:2] == (family, count)}
        assert not {case: off for case, off in of_case.items() if not max(off.values()) < 1e-5}


def mutated(rank: int, world: int, mutation: str) -> float:
    """The largest difference with one thing broken."""
    host, ctx, layers = load_plugins(), build_parallel_context(AxisSizes(pp=world)), 4
    keys, batches = FAMILIES["gpt tied"], micro_batches(3)
    expected = one_process(build(host, keys, ParallelContext(), None, layers), batches)
    stages = balanced_stages(layers, world)
    if mutation == "wrong sequence of stages":
        # Each stage has the layers of the other.
        swapped = zip(stages, [stages[1].layers, stages[0].layers], strict=True)
        stages = [replace(stage, layers=numbers) for stage, numbers in swapped]
    model, pipeline = pipeline_of(host, keys, "1f1b", stages, ctx, layers)
    loss = pipeline.forward_backward(batches, share)
    actual = summed_over_ranks(loss, model, ctx, add_copies=mutation != "copies not added")
    return max(differences(expected, actual).values())


@pytest.mark.parametrize("mutation", ["copies not added", "wrong sequence of stages"])
def test_a_broken_pipeline_is_noticed(mutation) -> None:
    assert min(run_ranks(2, mutated, mutation)) > 1e-3


def evaluated_and_resized(rank: int, world: int) -> dict[str, float]:
    """Evaluation between steps, other lengths and counts from call to call and within one, frozen weights."""
    host, ctx, layers, found = load_plugins(), build_parallel_context(AxisSizes(pp=world)), 3, {}
    stages = balanced_stages(layers, world)
    model, pipeline = pipeline_of(host, FAMILIES["llama tied"], "1f1b", stages, ctx, layers)
    reference = build(host, FAMILIES["llama tied"], ParallelContext(), None, layers)
    mixed = [*micro_batches(1, 5), *micro_batches(2), *micro_batches(1, 3)]
    for step, batches in enumerate([micro_batches(2), micro_batches(5, 6), mixed, micro_batches(1)]):
        model.zero_grad(), reference.zero_grad()
        evaluated = pipeline.forward(batches, share)
        assert evaluated.dtype == torch.float64
        assert not evaluated.requires_grad
        assert all(p.grad is None for p in model.parameters())
        loss = pipeline.forward_backward(batches, share)
        expected = one_process(reference, batches)
        found[f"evaluation {step}"] = relative(summed_over_ranks(evaluated, model, ctx)[0], expected[0])
        actual = summed_over_ranks(loss, model, ctx)
        found |= {f"step {step}, {name}": value for name, value in differences(expected, actual).items()}
    assert pipeline.forward_backward([], share) == 0
    return found


def frozen(rank: int, world: int, schedule: str) -> dict[str, float]:
    """The whole first stage frozen: no gradient comes back to it, and the second has no leaf to stop at."""
    host, ctx, layers = load_plugins(), build_parallel_context(AxisSizes(pp=world)), 4
    stages = balanced_stages(layers, world * STAGES_PER_RANK[schedule][-1])
    model, pipeline = pipeline_of(host, FAMILIES["llama"], schedule, stages, ctx, layers)
    reference = build(host, FAMILIES["llama"], ParallelContext(), None, layers)
    for one in (model, reference):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(not name.startswith(("embedding", "decoder.layers.0.", "decoder.layers.1.")))
    batches = micro_batches(3)
    expected = one_process(reference, batches)
    return differences(expected, summed_over_ranks(pipeline.forward_backward(batches, share), model, ctx))


class TwoStreams(nn.Module):
    """As an encoder-decoder: from stage 1 on a second tensor goes along, which later stages read and pass on."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in numbers})
        for number in numbers:
            nn.init.orthogonal_(self.layers[str(number)].weight, generator=torch.Generator().manual_seed(number))
            nn.init.constant_(self.layers[str(number)].bias, 0.1 * number)

    def run_stage(self, stage: Stage, hidden: Any, x: Tensor, flag: Tensor) -> Any:
        own = self.layers[str(stage.layers.start)]
        if stage.first:
            return own(x).tanh()
        if not isinstance(hidden, tuple):
            return own(x + 1).tanh(), hidden, flag
        state, memory, flag = hidden
        assert flag.dtype == torch.bool
        state = own(state).tanh() * memory.where(flag, 0.5)
        return state if stage.last else (state, memory, flag)

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        yield self.layers[str(stage.layers.start)]


def two_streams(rank: int, world: int, schedule: str) -> dict[str, float]:
    ctx, count = build_parallel_context(AxisSizes(pp=world)), 4
    stages = balanced_stages(count, count)
    generator = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(2, 4, generator=generator), "flag": torch.randn(2, 4, generator=generator) > 0}] * 3
    total, whole = torch.zeros(()), TwoStreams(range(count))
    for batch in batches:
        hidden = None
        for stage in stages:
            hidden = whole.run_stage(stage, hidden, **batch)
        hidden.square().sum().backward()
        total += hidden.detach().square().sum()
    expected = total, {name: p.grad for name, p in whole.named_parameters()}
    model = TwoStreams(stages_of_rank(rank, count, world, registered(schedule).placement))
    pipeline = Pipeline(model, stages, registered(schedule), ctx, inputs=("x", "flag"))
    loss = pipeline.forward_backward(batches, lambda output, batch: output.square().sum())
    return differences(expected, summed_over_ranks(loss, model, ctx))


def small_cases(rank: int, world: int) -> dict[str, float]:
    found = evaluated_and_resized(rank, world)
    for schedule in ("1f1b", "interleaved_zero_bubble"):
        found |= {f"frozen, {schedule}, {name}": value for name, value in frozen(rank, world, schedule).items()}
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"):
        found |= {f"two streams, {schedule}, {name}": v for name, v in two_streams(rank, world, schedule).items()}
    return found


@pytest.mark.slow
def test_evaluation_other_shapes_frozen_stages_and_several_tensors_between_stages() -> None:
    for found in run_ranks(2, small_cases):
        assert not {case: difference for case, difference in found.items() if not difference < 1e-5}


def in_bf16(rank: int, world: int, schedule: str) -> dict[str, bool]:
    """Gradients added up in fp32 by hooks, as the trainer does for 16-bit weights, with any schedule."""
    host, layers = load_plugins(), 4
    ctx = replace(build_parallel_context(AxisSizes(pp=world)), params_dtype=torch.bfloat16)
    stages = balanced_stages(layers, world * STAGES_PER_RANK[schedule][-1])
    model, pipeline = pipeline_of(host, FAMILIES["llama"], schedule, stages, ctx, layers)
    reference = build(host, FAMILIES["llama"], ParallelContext(params_dtype=torch.bfloat16), None, layers)
    mine, theirs = Fp32MasterWeights(model), Fp32MasterWeights(reference)
    batches = micro_batches(3)
    pipeline.forward_backward(batches, share)
    one_process(reference, batches)
    expected = dict(theirs.named_parameters())
    return {name: torch.equal(copy.grad, expected[name].grad) for name, copy in mine.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
def test_bf16_gradients_accumulate_in_fp32_bit_for_bit(schedule) -> None:
    for found in run_ranks(2, in_bf16, schedule):
        assert len(found) > 10
        assert all(found.values()), found


def with_sequence_parallel(rank: int, world: int) -> dict[str, float]:
    """Two pipeline ranks of two tensor-parallel ranks: hidden states are half as long."""
    host, layers, keys = load_plugins(), 3, FAMILIES["llama"] | {"num_query_groups": 2}
    ctx = build_parallel_context(AxisSizes(tp=2, pp=2), sequence_parallel=True)
    batches = micro_batches(3)
    reference = build(host, keys, ParallelContext(), None, layers)
    expected_loss, expected = one_process(reference, batches)
    model, pipeline = pipeline_of(host, keys, "1f1b", balanced_stages(layers, 2), ctx, layers)
    columns = 0 if model.output_layer is None else model.output_layer.weight.shape[0]
    loss_of = vocab_parallel_cross_entropy(ctx.tp.rank * columns, ctx.tp)
    loss = pipeline.forward_backward(
        batches, lambda output, batch: (loss_of(output, batch) * batch["weight"]).sum() / 100
    )
    dist.all_reduce(loss, group=ctx.pp.group)
    found, layouts, canonical = (
        {"loss": relative(loss, expected_loss)},
        parameter_layouts(model),
        parameter_layouts(reference),
    )
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        for axis in layouts[name].partial_gradient:
            gradient = all_reduce(gradient, ctx.axis(axis))
        own = layouts[name].to_local(canonical[name].to_canonical(expected[name]), ctx)
        found[name] = relative(gradient, own)
    return found


@pytest.mark.slow
def test_with_sequence_parallel() -> None:
    for found in run_ranks(4, with_sequence_parallel):
        assert not {case: difference for case, difference in found.items() if not difference < 1e-5}


def recorded_timeline(rank: int, world: int) -> Timeline:
    host, ctx, layers = load_plugins(), build_parallel_context(AxisSizes(pp=world)), 4
    stages = balanced_stages(layers, 2 * world)
    numbers = stages_of_rank(rank, len(stages), world, "v")
    model = build(host, FAMILIES["llama"], ctx, tuple(stages[number] for number in numbers), layers)
    recorder = ScheduleRecorder(ctx.device)
    pipeline = Pipeline(model, stages, registered("zbv_zero_bubble"), ctx, inputs=INPUTS, recorder=recorder)
    recorder.begin(ctx.pp)
    pipeline.forward_backward(micro_batches(3), share)
    return recorder.gather(ctx.pp)


def test_every_action_is_recorded() -> None:
    first, second = run_ranks(2, recorded_timeline)
    assert first == second
    for rank, spans in enumerate(first.ranks):
        expected = rank_actions(registered("zbv_zero_bubble"), 2, 4, 3, rank, training=True)
        assert sorted(span.action for span in spans) == sorted(expected)
        ends = [span.end for span in spans if span.action.kind in COMPUTATION]
        assert ends == sorted(ends)
    # A micro-batch goes from the first rank to the second and back. Their clocks begin about together, not exactly.
    forward = {
        span.action.stage: span
        for spans in first.ranks
        for span in spans
        if span.action[0] is Kind.FORWARD and span.action[2] == 0
    }
    # Placement "v" on two ranks: stages 0 and 3 on the first, 1 and 2 on the second. Spans are compared within a rank,
    # by its own clock.
    assert forward[1].end <= forward[2].start
    assert forward[3].start - forward[0].end >= forward[2].end - forward[1].start


def unlike(rank: int, world: int) -> str:
    ctx = build_parallel_context(AxisSizes(pp=world))
    exchange = P2PCommunicator(ctx.pp, ctx.device)
    if rank == 1:
        exchange.receive_hidden(0, "key").wait()
        return ""
    exchange.send_hidden(torch.ones(2, 3), 1, "key")
    exchange.finish()
    with pytest.raises(RuntimeError) as caught:
        exchange.send_hidden(torch.ones(2, 4), 1, "key")
    return str(caught.value)


def test_hidden_states_that_change_unannounced_are_refused() -> None:
    message = run_ranks(2, unlike)[0]
    assert "(2, 4)" in message
    assert "depend on the shapes of the inputs only" in message


def test_stages_that_do_not_fit_are_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="1f1b cannot divide 2 stages"):
        Pipeline(TwoStreams([0]), balanced_stages(2, 2), registered("1f1b"), ParallelContext(), inputs=())


def slept(rank: int, world: int) -> list[tuple[float, float]]:
    """Makespan and bubble fraction of stages that sleep."""
    schedules = [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv_zero_bubble", 2)]
    return [(one.makespan, one.bubble_fraction) for one in measured(rank, world, schedules, 4, 0.01)]


@pytest.mark.slow
def test_the_bubble_of_sleeping_stages_is_near_the_simulators() -> None:
    """Never shorter, since sleep is not; and not far above in the best of several attempts, of which a busy machine
    draws out most. mt bench pipeline measures how near."""
    schedules = [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv_zero_bubble", 2)]
    simulated = [simulate(registered(name), 2, 4, stage_times(2, each, 0.01)) for name, each in schedules]
    bubbles = [1.0] * len(schedules)
    for _ in range(20):
        found = run_ranks(2, slept)[0]
        assert all(makespan > 0.999 * one.makespan for (makespan, _), one in zip(found, simulated, strict=True))
        bubbles = [min(best, bubble) for best, (_, bubble) in zip(bubbles, found, strict=True)]
        if all(best < one.bubble_fraction + 0.3 for best, one in zip(bubbles, simulated, strict=True)):
            return
    raise AssertionError(f"bubbles of {bubbles}, simulated {[one.bubble_fraction for one in simulated]}")
