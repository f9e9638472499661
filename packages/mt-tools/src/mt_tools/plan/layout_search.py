"""Search for layouts of N ranks: which are valid, which fit, and which is fastest by the estimates of `timing`; and for
the longest sequence that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mt_core.config.checks import as_world, check_config, divisors
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.parallel.pipeline.schedule_tables import ScheduleTable
from mt_core.plugins import PluginHost
from mt_core.train.build import DTYPES, keeps_remainders
from mt_tools.plan.activations import StageCost
from mt_tools.plan.layouts import LayoutPlan, Planner
from mt_tools.plan.machines import GIB, Machine
from mt_tools.plan.routing import Assignment, assign_round_robin
from mt_tools.plan.stages import StageCosts
from mt_tools.plan.timing import Clock
from mt_tools.plan.weights import FP32, GradientMemory

MICRO_BATCHES = (1, 2, 4)
SIMULATED_ROUNDS = 4
AXES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
EXPERT_AXES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
RECOMPUTE = ("none", "selective", "full")
TOKENS_OF_A_CONTEXT_RANK = 4096
"""Sequences are sharded over at most as many ranks as leave each this many tokens."""

Choice = Mapping[str, Mapping[str, Any]]
"""section -> key -> value"""


@dataclass(frozen=True)
class Candidate:
    """A valid layout. memory_gib: of its fullest rank."""

    choice: Choice
    plan: LayoutPlan

    tokens_per_step: int
    """Tokens of all ranks in a step."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.plan.seconds

    def fits(self, memory_gib: float) -> bool:
        return self.plan.memory_gib <= memory_gib


class QuickPlanner(Planner):
    """A planner for many layouts. It measures one sample and scales it to every micro-batch size; of a step with very
    many micro-batches it simulates some, since each further one adds the same time."""

    def stage_costs(
        self,
        config: Config,
        world: int,
        assign: Assignment = assign_round_robin,
        gradients: GradientMemory = "allocated",
    ) -> StageCosts:
        train = config.train.model_copy(update={"micro_batch_size": 1})
        costs = super().stage_costs(config.model_copy(update={"train": train}), world, assign, gradients)
        # Activations, messages and FLOPs of a micro-batch grow with its samples; one measurement serves all sizes.
        return costs.of_samples(config.train.micro_batch_size)

    def imbalanced_costs(self, config: Config, world: int, gradients: GradientMemory) -> StageCosts | None:
        """Layouts are ranked with a balanced load."""
        return None

    def start_times(
        self, config: Config, pp: int, by_stage: list[StageCost], passes: int, clock: Clock
    ) -> tuple[ScheduleTable, float, float]:
        # Behind the warm-up a schedule repeats itself: pp more micro-batches add the same time. gpipe keeps all of
        # them, so that its peak memory needs the whole order.
        simulated = SIMULATED_ROUNDS * pp
        if pp == 1 or passes <= simulated or config.parallel.pipeline_schedule == "gpipe":
            return super().start_times(config, pp, by_stage, passes, clock)
        order, bubble, seconds = super().start_times(config, pp, by_stage, simulated, clock)
        # Two simulations, pp micro-batches apart, give the time of each further one.
        shorter = super().start_times(config, pp, by_stage, simulated - pp, clock)[2]
        whole = seconds + (passes - simulated) * (seconds - shorter) / pp
        busy = (1 - bubble) * seconds * passes / simulated  # seconds of computing, which grow with the passes
        return order, 1 - busy / whole, whole


@dataclass
class Found:
    """candidates: those that fit, fastest first. refused: reason -> how many layouts."""

    candidates: list[Candidate] = field(default_factory=list)
    looked_at: list[Candidate] = field(default_factory=list)
    """Layouts that fit, and those that do not."""
    too_large: int = 0
    smallest_gib: float | None = None
    """The smallest memory of the layouts that do not fit."""
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def legal(self) -> int:
        return len(self.candidates) + self.too_large


def search(planner: QuickPlanner, world: int, memory_gib: float) -> Found:
    """Layouts with tensor parallelism within a node, with sequence parallelism, and a sharded optimizer state.

    Pruned: a layout whose weights alone do not fit, and recomputation for a layout that fits without it. Raises
    ConfigError without train.global_batch_size, since a batch of one micro-batch a rank differs between layouts.
    """
    if planner.config.train.global_batch_size is None:
        raise ConfigError(
            "a search compares layouts of one global batch, and train.global_batch_size is not set; add "
            "--set train.global_batch_size=N, the samples of a step over all ranks"
        )
    result = Found()
    for axes in axis_choices(planner, world):
        # The smallest micro-batch without recomputation: rules that it breaks hold for the others, too.
        bare = _with(planner.config, axes, "none", 1)
        try:
            _checked(planner, bare, world)
        except ConfigError as error:
            result.refused[_reason(error)] += 1
            continue
        # Before the plan, which is slow: an average rank is a lower bound of the fullest.
        if weights_gib(planner, bare, world) > memory_gib:
            result.too_large += 1
            continue
        for size in MICRO_BATCHES:
            _try_micro_batch(planner, axes, size, world, memory_gib, result)
    result.candidates.sort(key=lambda candidate: candidate.tokens_per_second, reverse=True)
    return result


def _try_micro_batch(
    planner: QuickPlanner, axes: Mapping[str, Any], size: int, world: int, memory_gib: float, results: Found
) -> None:
    # From the fastest to the one with the least memory; the first that fits is taken.
    for recompute in RECOMPUTE:
        choice = _with(planner.config, axes, recompute, size)
        try:
            config = _checked(planner, choice, world)
            plan, batch = planner.plan(config, world), config.train.global_batch_size
            candidate = Candidate(_changes(choice), plan, (batch or 0) * config.data.seq_length)
        except ConfigError as error:
            results.refused[_reason(error)] += 1
            return
        results.looked_at.append(candidate)
        if candidate.fits(memory_gib):
            results.candidates.append(candidate)
            return
        needed = candidate.plan.memory_gib
        results.smallest_gib = needed if results.smallest_gib is None else min(results.smallest_gib, needed)
    results.too_large += 1


def axis_choices(planner: QuickPlanner, world: int) -> Iterator[dict[str, Any]]:
    """Values of [parallel] to try."""
    config = planner.config
    longest = max(1, config.data.seq_length // TOKENS_OF_A_CONTEXT_RANK)
    layers = len(planner.kinds)
    # tp within a node: its messages are in every layer and are not overlapped.
    for tp in (size for size in divisors(world) if size <= planner.machine.node_size):
        for cp in (size for size in divisors(world // tp) if size <= longest):
            for pp in (size for size in divisors(world // (tp * cp)) if size <= max(1, layers)):
                for ep, etp in expert_choices(planner, world // pp, tp):
                    yield {
                        "tensor_model_parallel_size": tp,
                        "sequence_parallel": tp > 1,
                        "context_parallel_size": cp,
                        "pipeline_model_parallel_size": pp,
                        "expert_model_parallel_size": ep,
                        "expert_tensor_parallel_size": etp,
                        "use_distributed_optimizer": True,
                        "use_torch_fsdp2": False,
                    }


def expert_choices(planner: QuickPlanner, stage: int, tp: int) -> Iterator[tuple[int, int | None]]:
    """(expert parallel, expert tensor parallel sizes) to try for the ranks of a stage: experts over as many ranks as
    possible, over all ranks of a node, and over half of these; each expert whole, or sharded as the dense layers
    are."""
    experts = planner.parameters.experts_of_a_layer
    if not experts:
        yield 1, None
        return
    for etp in dict.fromkeys((1, tp)):
        # Every rank has equally many experts, and the ranks of a stage are divided evenly.
        legal = [ep for ep in divisors(experts) if stage % (ep * etp) == 0]
        inside = [ep for ep in legal if ep * etp <= planner.machine.node_size]
        yield from ((ep, etp) for ep in dict.fromkeys((*inside[-2:], *legal[-1:])))


def bytes_of_parameter(planner: QuickPlanner) -> tuple[float, float]:
    """Bytes of a parameter: (weight and gradient, on every rank that has it; master weight, its gradient in fp32 where
    the other one is not, and optimizer state, which data-parallel ranks shard). Where matrices and vectors have states
    of two sizes, with the smaller."""
    precision = planner.config.precision
    weight = DTYPES[precision.dtype].itemsize
    gradient = FP32 if precision.accumulate_allreduce_grads_in_fp32 else weight
    has_main = weight < FP32 and not keeps_remainders(planner.config)
    main = (FP32 + (FP32 if gradient < FP32 else 0)) if has_main else 0
    return weight + gradient, main + min(planner.state.of_element.values())


def weights_gib(planner: QuickPlanner, choice: Choice, world: int) -> float:
    """GiB of weights, gradients and optimizer state of an average rank, without padding."""
    parallel, parameters = choice["parallel"], planner.parameters
    fixed, sharded = bytes_of_parameter(planner)
    stage = world // parallel["pipeline_model_parallel_size"]

    def gibibytes(count: float, shards: int) -> float:
        # stage / world = 1 / pp. A rank has count / pp / shards elements; of their sharded state 1 / (stage / shards),
        # as many ranks hold the same elements.
        return count * stage / world / shards * (fixed + sharded * shards / stage)

    tensor = parallel["tensor_model_parallel_size"]
    expert_tensor = parallel["expert_tensor_parallel_size"] or tensor
    experts = gibibytes(parameters.experts, expert_tensor * parallel["expert_model_parallel_size"])
    return (gibibytes(parameters.total - parameters.experts, tensor) + experts) / GIB


def _with(config: Config, axes: Mapping[str, Any], recompute: str, size: int) -> dict[str, dict[str, Any]]:
    tree = config.to_dict()
    tree["parallel"].update(axes)
    tree["train"]["micro_batch_size"] = size
    kept = {"recompute_granularity": recompute, "cpu_offloading_num_layers": 0}
    tree["recompute"] = kept
    return tree


def _checked(planner: QuickPlanner, tree: dict[str, dict[str, Any]], world: int) -> Config:
    # config_from_dict validates the sections; the rules across them depend on the number of ranks.
    with as_world(world):
        config = config_from_dict(tree, planner.host)
        check_config(config)
        planner.host.check_config(config)
        return config


def _changes(tree: Choice) -> Choice:
    """The reported values of a layout."""
    parallel = tree["parallel"]
    return {
        "parallel": {
            key: parallel[key]
            for key in (*AXES, *(EXPERT_AXES if parallel["expert_tensor_parallel_size"] is not None else ()))
        },
        "train": {"micro_batch_size": tree["train"]["micro_batch_size"]},
        "recompute": {"recompute_granularity": tree["recompute"]["recompute_granularity"]},
    }


def _reason(error: ConfigError) -> str:
    """The message without its numbers, so that rejections for one reason are counted together."""
    # Up to the first semicolon: what follows is advice.
    return " ".join("N" if any(c.isdigit() for c in word) else word for word in str(error).split(";")[0].split())


# -- longest sequence --------------------------------------------------------------------------------

LoadAt = Callable[[int], Config]
"""Sequence length -> the validated configuration. Raises ConfigError for lengths that it cannot have."""


def longest_sequence(
    load: LoadAt, world: int, host: PluginHost, machine: Machine, memory_gib: float, unit: int
) -> tuple[int, LayoutPlan] | None:
    """(length, plan) of the longest sequence, a multiple of `unit` tokens, that fits into memory_gib; None if one unit
    does not. Memory grows with the length. Raises ConfigError if not even one unit is valid."""

    def fitting(units: int) -> LayoutPlan | None:
        try:
            config = load(units * unit)
        except ConfigError:
            if units == 1:
                raise
            return None
        planner = Planner(config, host, machine)
        planner.require_suitable_data()
        plan = planner.plan(config, world)
        return plan if plan.memory_gib <= memory_gib else None

    best, units = fitting(1), 1
    if best is None:
        return None
    # Doubling: `units` fits and 2 * units does not.
    while (longer := fitting(2 * units)) is not None:
        best, units = longer, 2 * units
    # Then a binary search in between: steps of units / 2, units / 4, ..., 1.
    step = units // 2
    while step:
        if (longer := fitting(units + step)) is not None:
            best, units = longer, units + step
        step //= 2
    return units * unit, best
