"""`plan_layout`: what every rank of a configured layout holds, sends and computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import nn

from mt_core.config.checks import as_world, data_parallel_size
from mt_core.config.schema import Config, ParallelConfig, RecomputeConfig
from mt_core.data.batch_size import build_batch_size, total_train_samples
from mt_core.data.building import build_tokenizer
from mt_core.errors import ConfigError
from mt_core.nn.stage import Stage
from mt_core.parallel.context import Axis, AxisName, ParallelContext
from mt_core.parallel.pipeline.garbage import without_garbage_collection
from mt_core.parallel.pipeline.orders import Action, Kind, Order
from mt_core.parallel.pipeline.placement import stages_of_rank
from mt_core.parallel.pipeline.schedules import get_schedule
from mt_core.parallel.pipeline.simulator import simulate
from mt_core.parallel.stage_copies import StageCopies
from mt_core.plan.activations import StageCost
from mt_core.plan.contexts import all_axis_sizes, made_up_axis, made_up_context
from mt_core.plan.ledger import Flow, Ledger
from mt_core.plan.machines import GIB, Machine
from mt_core.plan.parameters import ParameterCount, count_parameters
from mt_core.plan.remembered import RememberedResults
from mt_core.plan.routing import Deal, dealt_in_turn, dealt_to_few
from mt_core.plan.stages import Kind as LayerKind
from mt_core.plan.stages import Runs, SharedRuns, StageCosts, build_on_meta, has_experts, layer_kinds, only_stage
from mt_core.plan.stand_ins import PlannedKernels
from mt_core.plan.timing import Clock
from mt_core.plan.weights import StateBytes, WeightCost, probe_state, weight_cost
from mt_core.plugins import PluginHost
from mt_core.train.build import DTYPES, axis_sizes, with_vocab_size
from mt_core.train.stages import model_stages

WITHOUT_RECOMPUTING = RecomputeConfig(recompute_granularity="none", cpu_offloading_num_layers=0)


@dataclass(frozen=True)
class RankPlan:
    """The ranks of some pipeline stages that hold alike; numbers are those of the first of them.

    activations: bytes by part when most is kept. in_flight: micro-batches kept at that moment, over its stages.
    """

    pp_ranks: tuple[int, ...]
    count: int
    layers: tuple[range, ...]
    weights: WeightCost
    activations: Mapping[str, float]
    in_flight: int
    recomputed: float
    buffers: float
    flow: Flow
    """Of a step."""
    crowded_activations: float | None = None
    """Bytes in place of `activation_bytes` if all tokens chose experts of one rank, and this is that rank; None: tokens
    go nowhere, or nobody asked."""

    @property
    def activation_bytes(self) -> float:
        return sum(self.activations.values())

    @property
    def total(self) -> float:
        return self.weights.total + self.activation_bytes + self.recomputed + self.buffers


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of a step, of its busiest pipeline rank."""

    products: float
    messages: float
    waiting: float
    """For other stages."""
    end: float
    """Sums of gradients that nothing hides, the update, collecting weights."""

    @property
    def total(self) -> float:
        return self.products + self.messages + self.waiting + self.end


@dataclass(frozen=True)
class LayoutPlan:
    """What a configuration asks of `world` ranks."""

    config: Config
    world: int
    sizes: Mapping[AxisName, int]
    ranks: Sequence[RankPlan]
    micro_batches: int
    flops_per_token: float
    """Forward and backward, over the positions of a sample's main sequence."""
    flops_per_step: float
    bubble: float
    """Part of the time of all ranks in which they wait for the pipeline."""
    time: StepTime
    parameters: ParameterCount
    """Of the whole model."""

    @cached_property
    def ramp_up(self) -> Sequence[tuple[int, int]]:
        """(batch size, steps) while the batch grows, and then."""
        return ramp_up(self.config)

    @property
    def largest(self) -> RankPlan:
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def memory_gib(self) -> float:
        return self.largest.total / GIB

    @property
    def seconds(self) -> float:
        return self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Of one rank."""
        return self.flops_per_step / self.flops_per_token / self.seconds / self.world

    def utilization(self, machine: Machine) -> float:
        """Model FLOPs (nothing counted twice that is computed again) over what the machine could do."""
        return self.flops_per_step / (self.seconds * machine.flops * self.world)


@dataclass
class Planner:
    """Plans layouts of one model. Kinds of layers and the optimizer's state are found out once."""

    config: Config
    host: PluginHost
    machine: Machine
    _costs: dict[object, StageCosts] = field(default_factory=dict)
    _runs_without_experts: dict[object, Runs] = field(default_factory=dict)
    _results: RememberedResults = field(default_factory=RememberedResults)
    _weights: dict[object, list[WeightCost]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.config.model.vocab_size is None:
            self.config = with_vocab_size(self.config, build_tokenizer(self.config, self.host))

    @cached_property
    def whole_model(self) -> nn.Module:
        """In one process, on the meta device."""
        return build_on_meta(
            self.config, self.host, ParallelContext(torch.device("meta")), PlannedKernels(Ledger()), None
        )

    @cached_property
    def kinds(self) -> dict[int, LayerKind]:
        return layer_kinds(self.config, self.whole_model)

    @cached_property
    def parameters(self) -> ParameterCount:
        return count_parameters(self.config, self.host, self.whole_model)

    @cached_property
    def flops_per_token(self) -> float:
        """Forward and backward through the whole model in one process, the same for every layout. What is computed
        again is not counted."""
        changes = {
            "parallel": ParallelConfig(),
            "recompute": WITHOUT_RECOMPUTING,
            "train": self.config.train.model_copy(update={"micro_batch_size": 1}),
        }
        config = self.config.model_copy(update=changes)
        ctx = ParallelContext(torch.device("meta"), DTYPES[config.precision.dtype])
        forward = StageCosts(config, self.host, ctx, Ledger(), self.kinds).of(only_stage(config)).forward
        return 3 * forward.flops / config.data.seq_length

    @cached_property
    def state(self) -> StateBytes:
        return probe_state(self.config, self.host)

    @without_garbage_collection()
    def plan(self, config: Config, world: int) -> LayoutPlan:
        """Of the planner's configuration with any [parallel], [recompute] and [train]."""
        with as_world(world):
            return self._plan(config.model_copy(update={"model": self.config.model}), world)

    def _plan(self, config: Config, world: int) -> LayoutPlan:
        sizes = all_axis_sizes(axis_sizes(config), world)
        pp = sizes["pp"]
        stages = model_stages(config) if pp > 1 else [only_stage(config)]
        self._require_pipelined(config, pp)
        placement = get_schedule(config.parallel.pipeline_schedule).placement if pp > 1 else "loop"
        own = [stages_of_rank(rank, len(stages), pp, placement) for rank in range(pp)]
        passes = build_batch_size(config).full // (config.train.micro_batch_size * data_parallel_size(config))
        costs = self.stage_costs(config, world)
        by_stage = [costs.of(stage) for stage in stages]
        clock = Clock(self.machine, sizes)
        order, bubble, seconds = self.play(config, pp, by_stage, passes, clock)
        weights = self.weights(config, world, stages, own, passes)
        again = [self.recomputed(config, world, stage) for stage in stages]
        ranks = [self._rank(stages, own, order, by_stage, weights, again, rank, passes) for rank in range(pp)]
        crowded = self.crowded_costs(config, world)
        if crowded is not None:
            ranks = [with_crowded(rank, order[rank.pp_ranks[0]], stages, by_stage, crowded) for rank in ranks]
        batch = build_batch_size(config)
        return LayoutPlan(
            config,
            world,
            sizes,
            merged(ranks, world // pp),
            passes,
            self.flops_per_token,
            self.flops_per_token * batch.full * config.data.seq_length,
            bubble,
            _step_time(config, clock, [[by_stage[number] for number in held] for held in own], ranks, passes, seconds),
            self.parameters,
        )

    def stage_costs(self, config: Config, world: int, deal: Deal = dealt_in_turn) -> StageCosts:
        """One for all layouts in which a layer is divided alike, whatever the number of stages and ranks."""
        parallel = config.parallel
        dense = (
            parallel.tensor_model_parallel_size,
            parallel.sequence_parallel,
            parallel.context_parallel_size,
            parallel.cp_comm_type,
            str(parallel.hierarchical_context_parallel_sizes),
            config.train.micro_batch_size,
            repr(config.recompute),
        )
        experts = (parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size, deal)
        if (dense, experts) not in self._costs:
            ledger = Ledger()
            ctx = made_up_context(config, world, 0, ledger)
            runs = self._runs_without_experts.setdefault(dense, {})
            shared = SharedRuns(partial(has_experts, self.whole_model), runs, self._results)
            self._costs[dense, experts] = StageCosts(
                config, self.host, ctx, ledger, self.kinds, deal=deal, shared=shared
            )
        return self._costs[dense, experts]

    def crowded_costs(self, config: Config, world: int) -> StageCosts | None:
        """If all tokens chose the same experts; None for a model without."""
        return self.stage_costs(config, world, dealt_to_few) if self.parameters.experts else None

    def _require_pipelined(self, config: Config, pp: int) -> None:
        if pp > 1 and not self.kinds:
            raise ConfigError(
                f"parallel.pipeline_model_parallel_size={pp}: model.family={config.model.family} cannot be cut into "
                "stages; it can be 1"
            )

    def play(
        self, config: Config, pp: int, by_stage: list[StageCost], passes: int, clock: Clock
    ) -> tuple[Order, float, float]:
        """The order of a step, the bubble in it and its seconds, from the first pass to the last."""
        times = clock.stage_times(by_stage)
        if pp == 1:
            # The stage at hand is the whole model: each micro-batch goes forward and back before the next.
            order = [[Action(kind, 0, number) for number in range(passes) for kind in (Kind.FORWARD, Kind.BACKWARD)]]
            return order, 0.0, passes * (times.forward[0] + 2 * times.backward_input[0])
        schedule = get_schedule(config.parallel.pipeline_schedule)
        timeline = simulate(schedule.name, pp, passes, times)
        order = [[span.action for span in rank] for rank in timeline.ranks]
        return order, timeline.bubble_fraction, timeline.makespan

    def weights(
        self, config: Config, world: int, stages: Sequence[Stage], own: Sequence[tuple[int, ...]], passes: int
    ) -> list[WeightCost]:
        """Of each pipeline rank; worked out once for layouts that differ in micro-batches and recomputation alone."""
        key = (repr(config.parallel), world, passes > 1)
        if key not in self._weights:
            self._weights[key] = self._weigh(config, world, stages, own, passes)
        return self._weights[key]

    def _weigh(
        self, config: Config, world: int, stages: Sequence[Stage], own: Sequence[tuple[int, ...]], passes: int
    ) -> list[WeightCost]:
        """Pipeline ranks with the same kinds of layers are worked out once."""
        ledger = Ledger()
        kinds = [self._kind_of_rank([stages[number] for number in numbers]) for numbers in own]
        models = {
            kind: build_on_meta(
                config,
                self.host,
                made_up_context(config, world, kinds.index(kind), ledger),
                PlannedKernels(ledger),
                tuple(stages[number] for number in own[kinds.index(kind)]) if self.kinds else None,
            )
            for kind in dict.fromkeys(kinds)
        }
        names = [{name for name, _ in models[kind].named_parameters() if not _is_numbered(name)} for kind in kinds]
        found: dict[object, WeightCost] = {}
        for kind, model in models.items():
            rank = kinds.index(kind)
            copies = made_up_copies(names, rank, ledger)
            ctx = made_up_context(config, world, rank, ledger)
            found[kind] = weight_cost(config, model, ctx, ledger, copies, self.state, passes)
        return [found[kind] for kind in kinds]

    def _kind_of_rank(self, stages: Sequence[Stage]) -> object:
        return tuple(
            (stage.first, stage.last, tuple(self.kinds.get(number) for number in stage.layers)) for stage in stages
        )

    def recomputed(self, config: Config, world: int, stage: Stage) -> float:
        """Bytes that a group of recomputed layers keeps for the time of its backward pass."""
        options = config.recompute
        if options.recompute_granularity != "full" or not len(stage.layers):
            return 0.0
        size = (options.recompute_num_layers or 1) if options.recompute_method == "uniform" else 1
        plain = self.stage_costs(config.model_copy(update={"recompute": WITHOUT_RECOMPUTING}), world)
        return plain.of(Stage(stage.layers[:size], first=False, last=False)).kept_bytes

    def _rank(
        self,
        stages: Sequence[Stage],
        own: Sequence[tuple[int, ...]],
        order: Order,
        by_stage: Sequence[StageCost],
        weights: Sequence[WeightCost],
        again: Sequence[float],
        rank: int,
        passes: int,
    ) -> RankPlan:
        held = peak_in_flight(order[rank], by_stage)
        kept: Counter[str] = Counter()
        for stage, count in held.items():
            for part, size in by_stage[stage].kept.items():
                kept[part] += count * size  # type: ignore[assignment]
        passing = Flow()
        for number in own[rank]:
            passing = passing + by_stage[number].forward + by_stage[number].backward
        sends = messages_between_stages(own, by_stage, rank)
        cost = weights[rank]
        flow = (passing + sends + cost.micro_batch) * passes + cost.step
        largest = max((size / by_stage_calls for size, by_stage_calls in _sizes(passing)), default=0.0)
        boundary = max((by_stage[number].sent for number in own[rank]), default=0.0) if len(stages) > 1 else 0.0
        return RankPlan(
            (rank,),
            0,
            tuple(stages[number].layers for number in own[rank]),
            cost,
            dict(kept),
            sum(held.values()),
            max((again[number] for number in own[rank]), default=0.0),
            cost.buffers + largest + 2 * boundary,
            flow,
        )


def _step_time(
    config: Config,
    clock: Clock,
    held: Sequence[Sequence[StageCost]],
    ranks: Sequence[RankPlan],
    passes: int,
    played: float,
) -> StepTime:
    """held: the stages of each pipeline rank. played: seconds from the first pass to the last."""
    one = [sum((cost.forward + cost.backward for cost in costs), Flow()) for costs in held]
    busiest = max(one, key=lambda flow: clock.compute(flow) + clock.messages(flow))
    products, messages = passes * clock.compute(busiest), passes * clock.messages(busiest)
    backward = 2 / 3 * (products + messages) / passes
    collecting = passes * max(clock.messages(rank.weights.micro_batch) for rank in ranks)
    end = max(clock.step_end(config, rank.weights, backward) for rank in ranks)
    return StepTime(products, messages + collecting, max(0.0, played - products - messages), end)


def with_crowded(
    rank: RankPlan, actions: Sequence[Action], stages: Sequence[Stage], by_stage: Sequence[StageCost], costs: StageCosts
) -> RankPlan:
    held = peak_in_flight(actions, by_stage)
    kept = sum(count * costs.of(stages[number]).kept_bytes for number, count in held.items())
    return replace(rank, crowded_activations=kept)


def _sizes(flow: Flow) -> list[tuple[float, float]]:
    return [(size, flow.calls[call]) for call, size in flow.bytes.items()]


def _is_numbered(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def made_up_copies(names: Sequence[set[str]], rank: int, ledger: Ledger) -> StageCopies:
    """Weights that several pipeline ranks hold, given those of each rank outside of its layers."""
    axes: dict[str, Axis] = {}
    for name in sorted(names[rank]):
        holders = [place for place, held in enumerate(names) if name in held]
        if len(holders) > 1:
            axes[name] = made_up_axis("stage_copies", len(holders), holders.index(rank), ledger)  # type: ignore[arg-type]
    return StageCopies(axes)


def peak_in_flight(actions: Sequence[Action], by_stage: Sequence[StageCost]) -> dict[int, int]:
    """Stage -> micro-batches whose activations are kept when most bytes are."""
    kept = [cost.kept_bytes for cost in by_stage]
    held: Counter[int] = Counter()
    peak, most = dict(held), -1.0
    size = 0.0
    for action in actions:
        if action.kind is Kind.FORWARD:
            held[action.stage] += 1
            size += kept[action.stage]
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            held[action.stage] -= 1
            size -= kept[action.stage]
        if size > most:
            peak, most = dict(held), size
    return peak


def messages_between_stages(own: Sequence[tuple[int, ...]], by_stage: Sequence[StageCost], rank: int) -> Flow:
    """Hidden states to the next stage and gradients to the one before, of one micro-batch, where that is elsewhere."""
    ledger = Ledger()
    for number in own[rank]:
        if number + 1 < len(by_stage) and number + 1 not in own[rank]:
            ledger.sent("pp", "send", by_stage[number].sent)
        if number > 0 and number - 1 not in own[rank]:
            ledger.sent("pp", "send", by_stage[number - 1].sent)
    return ledger.take()


def merged(ranks: Sequence[RankPlan], ranks_of_stage: int) -> list[RankPlan]:
    """One row for the pipeline ranks that have the same numbers."""
    rows: dict[object, list[RankPlan]] = {}
    for rank in ranks:
        alike = (rank.weights, tuple(rank.activations.items()), rank.in_flight, rank.recomputed)
        rows.setdefault(repr(alike), []).append(rank)
    return [
        replace(row[0], pp_ranks=tuple(rank.pp_ranks[0] for rank in row), count=len(row) * ranks_of_stage)
        for row in rows.values()
    ]


def ramp_up(config: Config) -> list[tuple[int, int]]:
    """(batch size, steps with it); empty when the batch does not grow."""
    if config.train.rampup_batch_size is None:
        return []
    counts: Counter[int] = Counter()
    for _, size in build_batch_size(config).steps(0, total_train_samples(config)):
        counts[size] += 1
    return sorted(counts.items())
