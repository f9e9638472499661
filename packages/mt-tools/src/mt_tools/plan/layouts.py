"""`plan_layout`: memory, communication and compute of every rank of a configured layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import nn

from mt_core._torch_compat import uncompiled_references
from mt_core.config.checks import as_world, data_parallel_size
from mt_core.config.schema import Config, ParallelConfig, RecomputeConfig
from mt_core.data.building import build_tokenizer, unsuitable_data
from mt_core.data.training_length import build_batch_size, total_train_samples
from mt_core.errors import ConfigError
from mt_core.nn.model import required_inputs
from mt_core.optim.base import StateBytes, probe_state
from mt_core.optim.finalize_grads import TiedWeights
from mt_core.parallel.context import Axis, AxisName, ParallelContext
from mt_core.parallel.pipeline.gc_control import without_garbage_collection
from mt_core.parallel.pipeline.schedule_tables import Action, Kind, ScheduleTable, stages_of_rank
from mt_core.parallel.pipeline.schedules import configured_schedule
from mt_core.parallel.pipeline.stage import Stage
from mt_core.parallel.pipeline.timeline import simulate
from mt_core.plugins import PluginHost
from mt_core.train.auto_choices import with_resolved_main_weights
from mt_core.train.build import DTYPES, axis_sizes, with_vocab_size
from mt_core.train.pipelining import model_stages
from mt_tools.plan.activations import StageCost
from mt_tools.plan.fakes import PlannedKernels
from mt_tools.plan.fused_kernels import ConfiguredKernels
from mt_tools.plan.ledger import Flow, Ledger, all_axis_sizes, fake_axis, fake_context
from mt_tools.plan.machines import GIB, Machine
from mt_tools.plan.parameters import ParameterCount, count_parameters
from mt_tools.plan.result_cache import ResultCache
from mt_tools.plan.routing import Assignment, assign_round_robin, assign_to_few
from mt_tools.plan.stages import Kind as LayerKind
from mt_tools.plan.stages import Runs, SharedRuns, StageCosts, build_on_meta, has_experts, layer_kinds, only_stage
from mt_tools.plan.timing import Clock
from mt_tools.plan.weights import GradientMemory, WeightCost, weight_cost

WITHOUT_RECOMPUTING = RecomputeConfig(recompute_granularity="none", cpu_offloading_num_layers=0)


@dataclass(frozen=True)
class RankPlan:
    """Pipeline stages whose ranks have the same costs; numbers are those of the first of them.

    activations: bytes by part at peak. in_flight: micro-batches whose activations are kept at that moment, over its
    stages.
    """

    pp_ranks: tuple[int, ...]
    count: int
    layers: tuple[range, ...]
    weights: WeightCost
    activations: Mapping[str, float]
    in_flight: int
    temporary: float
    """Bytes that a layer or the loss holds at most while it runs, above what is kept."""
    buffers: float
    flow: Flow
    """Messages of a step."""
    imbalanced_activations: float | None = None
    """Bytes instead of `activation_bytes` if all tokens chose this rank's experts; None: not an MoE model, or not
    computed."""

    @property
    def activation_bytes(self) -> float:
        return sum(self.activations.values())

    @property
    def total(self) -> float:
        """Bytes at the peak: of the passes or of the optimizer's update."""
        # Of the late gradients `temporary` has those that are there at the peak.
        before = self.weights.total - self.weights.late_gradients
        passes = before + self.activation_bytes + self.temporary + self.buffers
        return max(passes, self.weights.total + self.weights.update)


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of a step, on its busiest pipeline rank."""

    products: float
    messages: float
    waiting: float
    """Pipeline bubble: waiting for other stages."""
    end: float
    """Exposed gradient reduction, the optimizer update, the parameter all-gather."""

    @property
    def total(self) -> float:
        return self.products + self.messages + self.waiting + self.end


@dataclass(frozen=True)
class LayoutPlan:
    """The plan of a configuration on `world` ranks."""

    config: Config
    world: int
    sizes: Mapping[AxisName, int]
    ranks: Sequence[RankPlan]
    micro_batches: int
    flops_per_token: float
    """Forward and backward, over the positions of a sample's main sequence."""
    flops_per_step: float
    bubble: float
    """Pipeline bubble: fraction of the time of all ranks spent waiting."""
    time: StepTime
    parameters: ParameterCount
    """Of the whole model."""

    @cached_property
    def ramp_up(self) -> Sequence[tuple[int, int]]:
        """(batch size, steps) of each stage of the batch-size ramp-up, and of the final batch size."""
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
        """Model FLOPs (recomputation not counted) over the peak FLOPs of the machine."""
        return self.flops_per_step / (self.seconds * machine.flops * self.world)


@dataclass
class Planner:
    """Plans layouts of one model. Layer kinds and the size of the optimizer state are determined once."""

    config: Config
    host: PluginHost
    machine: Machine
    _costs: dict[object, StageCosts] = field(default_factory=dict)
    _runs_without_experts: dict[object, Runs] = field(default_factory=dict)
    _results: ResultCache = field(default_factory=ResultCache)
    _weights: dict[object, list[WeightCost]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.config.model.vocab_size is None:
            self.config = with_vocab_size(self.config, build_tokenizer(self.config, self.host))
        kernels = ConfiguredKernels(self.config, ParallelContext(torch.device("meta")))
        self.config = with_resolved_main_weights(self.config, in_one_kernel=kernels.is_fused("adamw"))

    @cached_property
    def whole_model(self) -> nn.Module:
        """In one process, on the meta device."""
        return build_on_meta(
            self.config, self.host, ParallelContext(torch.device("meta")), PlannedKernels(Ledger()), None
        )

    def unsuitable_data(self) -> str | None:
        """Why samples of the configured data set cannot go through the model; None: they can."""
        return unsuitable_data(required_inputs(self.whole_model), self.config, self.host)

    def require_suitable_data(self) -> None:
        """Raise ConfigError for a data set whose samples cannot go through the model."""
        reason = self.unsuitable_data()
        if reason is not None:
            raise ConfigError(reason)

    @cached_property
    def kinds(self) -> dict[int, LayerKind]:
        return layer_kinds(self.config, self.whole_model)

    @cached_property
    def parameters(self) -> ParameterCount:
        return count_parameters(self.config, self.host, self.whole_model)

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward through the whole model in one process, the same for every layout, without
        recomputation."""
        changes = {
            "parallel": ParallelConfig(),
            "recompute": WITHOUT_RECOMPUTING,
            "train": self.config.train.model_copy(update={"micro_batch_size": 1}),
        }
        config = self.config.model_copy(update=changes)
        ctx = ParallelContext(torch.device("meta"), DTYPES[config.precision.dtype])
        shared = SharedRuns(results=self._results)
        costs = StageCosts(config, self.host, ctx, Ledger(), self.kinds, shared=shared, with_backward=False)
        forward = costs.of(only_stage(config)).forward
        return 3 * forward.flops / config.data.seq_length

    @cached_property
    def state(self) -> StateBytes:
        return probe_state(self.config, self.host)

    @without_garbage_collection()
    @uncompiled_references()
    def plan(self, config: Config, world: int) -> LayoutPlan:
        """The planner's configuration with any [parallel], [recompute] and [train]."""
        with as_world(world):
            # The model of this planner has its vocabulary size resolved, the optimizer its form of master weights.
            same = {"model": self.config.model, "optimizer": self.config.optimizer}
            return self._plan(config.model_copy(update=same), world)

    def _plan(self, config: Config, world: int) -> LayoutPlan:
        # Stages of each pipeline rank -> the cost of a micro-batch in each stage -> the schedule's order and time ->
        # what is in flight at the peak, plus weights and messages of each rank. Ranks with equal numbers become one row
        # at the end.
        sizes = all_axis_sizes(axis_sizes(config), world)
        pp = sizes["pp"]
        stages = model_stages(config, self.host) if pp > 1 else [only_stage(config)]
        self._require_pipelined(config, pp)
        placement = configured_schedule(config.parallel, self.host).placement if pp > 1 else "loop"
        own = [stages_of_rank(rank, len(stages), pp, placement) for rank in range(pp)]
        # Micro-batches of a step.
        passes = build_batch_size(config).full // (config.train.micro_batch_size * data_parallel_size(config))
        weights = self.weights(config, world, stages, own, passes)
        gradients = weights[0].gradient_memory
        costs = self.stage_costs(config, world, gradients=gradients)
        by_stage = [costs.of(stage) for stage in stages]
        clock = Clock(self.machine, sizes)
        order, bubble, seconds = self.start_times(config, pp, by_stage, passes, clock)
        ranks = [self._rank(stages, own, order, by_stage, weights, rank, passes) for rank in range(pp)]
        imbalanced = self.imbalanced_costs(config, world, gradients)
        if imbalanced is not None:
            ranks = [
                with_expert_imbalance(rank, order[rank.pp_ranks[0]], stages, by_stage, imbalanced) for rank in ranks
            ]
        batch = build_batch_size(config)
        costs_of_ranks = [[by_stage[number] for number in numbers] for numbers in own]
        return LayoutPlan(
            config,
            world,
            sizes,
            merged(ranks, world // pp),
            passes,
            self.flops_per_token,
            self.flops_per_token * batch.full * config.data.seq_length,
            bubble,
            _step_time(config, clock, costs_of_ranks, ranks, passes, seconds),
            self.parameters,
        )

    def stage_costs(
        self,
        config: Config,
        world: int,
        assign: Assignment = assign_round_robin,
        gradients: GradientMemory = "allocated",
    ) -> StageCosts:
        """Shared by all layouts that shard a layer in the same way, for any number of stages and ranks."""
        parallel = config.parallel
        # All that changes the tensors of a stage without experts. Data-parallel and pipeline sizes do not.
        dense = (
            parallel.tensor_model_parallel_size,
            parallel.sequence_parallel,
            parallel.context_parallel_size,
            parallel.cp_comm_type,
            str(parallel.hierarchical_context_parallel_sizes),
            config.train.micro_batch_size,
            repr(config.recompute),
            gradients,
        )
        experts = (parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size, assign)
        if (dense, experts) not in self._costs:
            ledger = Ledger()
            ctx = fake_context(config, world, 0, ledger)
            # Layouts that differ in the axes of experts share the stages without them.
            runs = self._runs_without_experts.setdefault(dense, {})
            shared = SharedRuns(partial(has_experts, self.whole_model), runs, self._results)
            self._costs[dense, experts] = StageCosts(
                config,
                self.host,
                ctx,
                ledger,
                self.kinds,
                assign=assign,
                shared=shared,
                gradients=gradients,
                capability=self.machine.capability,
                # Of an imbalanced load the plan has the activations alone.
                with_backward=assign is not assign_to_few,
            )
        return self._costs[dense, experts]

    def imbalanced_costs(self, config: Config, world: int, gradients: GradientMemory) -> StageCosts | None:
        """Costs if all tokens chose the same experts; None for a model without experts."""
        return self.stage_costs(config, world, assign_to_few, gradients) if self.parameters.experts else None

    def _require_pipelined(self, config: Config, pp: int) -> None:
        if pp > 1 and not self.kinds:
            raise ConfigError(
                f"parallel.pipeline_model_parallel_size={pp}: model.family={config.model.family} cannot be cut into "
                "stages; it can be 1"
            )

    def start_times(
        self, config: Config, pp: int, by_stage: list[StageCost], passes: int, clock: Clock
    ) -> tuple[ScheduleTable, float, float]:
        """The schedule of a step, its bubble and its seconds, from the first pass to the last."""
        times = clock.stage_times(by_stage)
        if pp == 1:
            # With one pipeline rank: each micro-batch runs forward and backward before the next.
            order = [[Action(kind, 0, number) for number in range(passes) for kind in (Kind.FORWARD, Kind.BACKWARD)]]
            # Both halves of a backward pass take equally long.
            return order, 0.0, passes * (times.forward[0] + 2 * times.backward_input[0])
        timeline = simulate(configured_schedule(config.parallel, self.host), pp, passes, times)
        order = [[span.action for span in rank] for rank in timeline.ranks]
        return order, timeline.bubble_fraction, timeline.makespan

    def weights(
        self, config: Config, world: int, stages: Sequence[Stage], own: Sequence[tuple[int, ...]], passes: int
    ) -> list[WeightCost]:
        """Of each pipeline rank; computed once for layouts that differ in micro-batches and recomputation only."""
        # passes > 1: FSDP2 then keeps unsharded gradients between micro-batches.
        key = (repr(config.parallel), world, passes > 1)
        if key not in self._weights:
            self._weights[key] = self._weigh(config, world, stages, own, passes)
        return self._weights[key]

    def _weigh(
        self, config: Config, world: int, stages: Sequence[Stage], own: Sequence[tuple[int, ...]], passes: int
    ) -> list[WeightCost]:
        """Pipeline ranks with the same kinds of layers are computed once."""
        ledger = Ledger()
        # A middle rank of a deep pipeline is like its neighbours: one model is built for all of them.
        kinds = [self._kind_of_rank([stages[number] for number in numbers]) for numbers in own]
        models = {
            kind: build_on_meta(
                config,
                self.host,
                fake_context(config, world, kinds.index(kind), ledger),
                PlannedKernels(ledger),
                tuple(stages[number] for number in own[kinds.index(kind)]) if self.kinds else None,
            )
            for kind in dict.fromkeys(kinds)
        }
        # Outside of layers: embeddings, norms, the LM head.
        names = [{name for name, _ in models[kind].named_parameters() if not _is_numbered(name)} for kind in kinds]
        found: dict[object, WeightCost] = {}
        for kind, model in models.items():
            rank = kinds.index(kind)
            copies = fake_copies(names, rank, ledger)
            ctx = fake_context(config, world, rank, ledger)
            found[kind] = weight_cost(config, self.host, model, ctx, ledger, copies, self.state, passes)
        return [found[kind] for kind in kinds]

    def _kind_of_rank(self, stages: Sequence[Stage]) -> object:
        return tuple(
            (stage.first, stage.last, tuple(self.kinds.get(number) for number in stage.layers)) for stage in stages
        )

    def _rank(
        self,
        stages: Sequence[Stage],
        own: Sequence[tuple[int, ...]],
        order: ScheduleTable,
        by_stage: Sequence[StageCost],
        weights: Sequence[WeightCost],
        rank: int,
        passes: int,
    ) -> RankPlan:
        in_flight = peak_in_flight(order[rank], by_stage)  # stage -> micro-batches
        kept: Counter[str] = Counter()
        for stage, count in in_flight.items():
            for part, size in by_stage[stage].kept.items():
                kept[part] += count * size  # type: ignore[assignment]
        passing = Flow()
        for number in own[rank]:
            passing = passing + by_stage[number].forward + by_stage[number].backward
        sends = messages_between_stages(own, by_stage, rank)
        cost = weights[rank]
        # Every micro-batch passes all stages of the rank; the rest is once per step.
        flow = (passing + sends + cost.micro_batch) * passes + cost.step
        temporary = [by_stage[number].temporary for number in own[rank]]
        boundary = max((by_stage[number].sent for number in own[rank]), default=0.0) if len(stages) > 1 else 0.0
        return RankPlan(
            (rank,),
            0,
            tuple(stages[number].layers for number in own[rank]),
            cost,
            dict(kept),
            sum(in_flight.values()),
            max((max(each.forward, each.backward) for each in temporary), default=0.0),
            # boundary twice: hidden states that are received while others are sent.
            cost.buffers + 2 * boundary,
            flow,
        )


def _step_time(
    config: Config,
    clock: Clock,
    stages: Sequence[Sequence[StageCost]],
    ranks: Sequence[RankPlan],
    passes: int,
    simulated: float,
) -> StepTime:
    """stages: the stages of each pipeline rank. simulated: seconds from the first pass to the last."""
    # One micro-batch through each rank.
    one = [sum((cost.forward + cost.backward for cost in costs), Flow()) for costs in stages]
    busiest = max(one, key=lambda flow: clock.compute(flow) + clock.messages(flow))
    products, messages = passes * clock.compute(busiest), passes * clock.messages(busiest)
    # Of one micro-batch: a forward pass is about a third.
    backward = 2 / 3 * (products + messages) / passes
    collecting = passes * max(clock.messages(rank.weights.micro_batch) for rank in ranks)
    end = max(clock.step_end(config, rank.weights, backward / 2, backward) for rank in ranks)
    # The bubble is what the simulated schedule takes beyond the busiest rank's own work.
    return StepTime(products, messages + collecting, max(0.0, simulated - products - messages), end)


def with_expert_imbalance(
    rank: RankPlan, actions: Sequence[Action], stages: Sequence[Stage], by_stage: Sequence[StageCost], costs: StageCosts
) -> RankPlan:
    in_flight = peak_in_flight(actions, by_stage)
    kept = sum(count * costs.of(stages[number]).kept_bytes for number, count in in_flight.items())
    return replace(rank, imbalanced_activations=kept)


def _is_numbered(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def fake_copies(names: Sequence[set[str]], rank: int, ledger: Ledger) -> TiedWeights:
    """Weights that several pipeline ranks hold (tied weights), given those of each rank outside of its layers."""
    axes: dict[str, Axis] = {}
    for name in sorted(names[rank]):
        # The word embeddings of the first stage and the tied LM head of the last, for instance.
        holders = [place for place, of_rank in enumerate(names) if name in of_rank]
        if len(holders) > 1:
            axes[name] = fake_axis("stage_copies", len(holders), holders.index(rank), ledger)  # type: ignore[arg-type]
    return TiedWeights(axes)


def peak_in_flight(actions: Sequence[Action], by_stage: Sequence[StageCost]) -> dict[int, int]:
    """Stage -> micro-batches in flight at the peak of activation memory."""
    kept = [cost.kept_bytes for cost in by_stage]
    in_flight: Counter[int] = Counter()
    peak, most = dict(in_flight), -1.0
    size = 0.0
    for action in actions:
        if action.kind is Kind.FORWARD:
            in_flight[action.stage] += 1
            size += kept[action.stage]
        # A split backward pass frees activations with its second half, the weights' gradients.
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            in_flight[action.stage] -= 1
            size -= kept[action.stage]
        if size > most:
            peak, most = dict(in_flight), size
    return peak


def messages_between_stages(own: Sequence[tuple[int, ...]], by_stage: Sequence[StageCost], rank: int) -> Flow:
    """Hidden states to the next stage and gradients to the previous one, of one micro-batch, if on another rank."""
    ledger = Ledger()
    for number in own[rank]:
        if number + 1 < len(by_stage) and number + 1 not in own[rank]:
            ledger.sent("pp", "send", by_stage[number].sent)  # hidden states forward
        if number > 0 and number - 1 not in own[rank]:
            ledger.sent("pp", "send", by_stage[number - 1].sent)  # their gradients back
    return ledger.take()


def merged(ranks: Sequence[RankPlan], ranks_of_stage: int) -> list[RankPlan]:
    """One row for the pipeline ranks that have the same numbers."""
    rows: dict[object, list[RankPlan]] = {}
    for rank in ranks:
        alike = (rank.weights, tuple(rank.activations.items()), rank.in_flight, rank.temporary)
        rows.setdefault(repr(alike), []).append(rank)
    return [
        replace(row[0], pp_ranks=tuple(rank.pp_ranks[0] for rank in row), count=len(row) * ranks_of_stage)
        for row in rows.values()
    ]


def ramp_up(config: Config) -> list[tuple[int, int]]:
    """(batch size, steps with it); empty without a ramp-up."""
    if config.train.rampup_batch_size is None:
        return []
    counts: Counter[int] = Counter()
    for _, size in build_batch_size(config).steps(0, total_train_samples(config)):
        counts[size] += 1
    return sorted(counts.items())
