"""Planner: memory, communication and compute of every rank of a configured layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import nn

from mt_core._torch_compat import uncompiled_references
from mt_core.config.checks import as_world, data_parallel_size
from mt_core.config.parallel import ParallelConfig
from mt_core.config.schema import Config, RecomputeConfig
from mt_core.data.building import build_tokenizer, unsuitable_data
from mt_core.data.training_length import build_batch_size, total_train_samples
from mt_core.errors import ConfigError
from mt_core.nn.layout import parameter_layouts
from mt_core.nn.model import required_inputs
from mt_core.optim.base import StateBytes, probe_state
from mt_core.parallel.context import AxisName, ParallelContext
from mt_core.parallel.pipeline.gc_control import without_garbage_collection
from mt_core.parallel.pipeline.schedule_tables import Action, Kind, ScheduleTable, stages_of_rank
from mt_core.parallel.pipeline.schedules import configured_schedule
from mt_core.parallel.pipeline.stage import Stage
from mt_core.parallel.pipeline.timeline import simulate
from mt_core.plugins import PluginHost
from mt_core.specs import FEED_FORWARDS
from mt_core.train.auto_choices import with_resolved_main_weights
from mt_core.train.build import DTYPES, axis_sizes, with_vocab_size
from mt_core.train.pipelining import model_stages
from mt_tools.plan.activations import StageCost
from mt_tools.plan.fakes import PlannedKernels
from mt_tools.plan.fused_kernels import ConfiguredKernels
from mt_tools.plan.ledger import Ledger, all_axis_sizes, fake_context, fake_tied_weights
from mt_tools.plan.machines import GIB, Machine
from mt_tools.plan.rank_plan import RankPlan, merged, plan_rank, with_expert_imbalance
from mt_tools.plan.result_cache import ResultCache
from mt_tools.plan.routing import Assignment, assign_round_robin, assign_to_few
from mt_tools.plan.stages import Kind as LayerKind
from mt_tools.plan.stages import Runs, SharedRuns, StageCosts, build_on_meta, has_experts, layer_kinds, only_stage
from mt_tools.plan.timing import Clock, StepTime, step_time
from mt_tools.plan.weights import GradientMemory, WeightCost, weight_cost

WITHOUT_RECOMPUTING = RecomputeConfig(recompute_granularity="none", cpu_offloading_num_layers=0)


@dataclass(frozen=True)
class ParameterCount:
    """total: of the whole model. experts: parameters of routed experts among these. active: used by one token."""

    total: int
    experts: int
    active: int
    experts_of_a_layer: int = 0
    """Number of routed experts."""


def count_parameters(config: Config, host: PluginHost, model: nn.Module) -> ParameterCount:
    """Counts a model built in one process, without padding of its vocabulary. Expert parameters are those that expert
    parallelism shards."""
    sizes = [(layout, prod(layout.shape)) for layout in parameter_layouts(model).values()]
    total = sum(size for _, size in sizes)
    experts = sum(size for layout, size in sizes if any(split.axis == "ep" for split in layout.splits))
    of_a_layer, share = experts_of_a_layer(config, host)
    # A token uses top-k of the experts of each layer.
    return ParameterCount(total, experts, total - experts + round(experts * share), of_a_layer)


def experts_of_a_layer(config: Config, host: PluginHost) -> tuple[int, float]:
    """(routed experts, fraction of them that a token uses); 0 and 1 for a model without experts."""
    options: dict[str, Any] | None = getattr(config.model, "moe", None)
    if options is None:
        return 0, 1.0
    defaults: Any = host[FEED_FORWARDS].get("moe", asker="model.moe").config_type.load()
    values = defaults.model_validate(options)
    return values.num_experts, values.moe_router_topk / values.num_experts


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
    """Parameters of the whole model."""

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
        """Tokens per second of one rank."""
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
        by_rank = [stages_of_rank(rank, len(stages), pp, placement) for rank in range(pp)]
        # Micro-batches of a step.
        passes = build_batch_size(config).full // (config.train.micro_batch_size * data_parallel_size(config))
        weights = self.weights(config, world, stages, by_rank, passes)
        gradients = weights[0].gradient_memory
        costs = self.stage_costs(config, world, gradients=gradients)
        by_stage = [costs.of(stage) for stage in stages]
        clock = Clock(self.machine, sizes)
        order, bubble, seconds = self.start_times(config, pp, by_stage, passes, clock)
        ranks = [plan_rank(stages, by_rank, order, by_stage, weights, rank, passes) for rank in range(pp)]
        imbalanced = self.imbalanced_costs(config, world, gradients)
        if imbalanced is not None:
            ranks = [
                with_expert_imbalance(rank, order[rank.pp_ranks[0]], stages, by_stage, imbalanced) for rank in ranks
            ]
        batch = build_batch_size(config)
        costs_of_ranks = [[by_stage[number] for number in numbers] for numbers in by_rank]
        return LayoutPlan(
            config,
            world,
            sizes,
            merged(ranks, world // pp),
            passes,
            self.flops_per_token,
            self.flops_per_token * batch.full * config.data.seq_length,
            bubble,
            step_time(config, clock, costs_of_ranks, ranks, passes, seconds),
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
        self, config: Config, world: int, stages: Sequence[Stage], by_rank: Sequence[tuple[int, ...]], passes: int
    ) -> list[WeightCost]:
        """Costs of each rank; computed once for layouts that differ in micro-batches and recomputation only."""
        # passes > 1: FSDP2 then keeps unsharded gradients between micro-batches.
        key = (repr(config.parallel), world, passes > 1)
        if key not in self._weights:
            self._weights[key] = self._weigh(config, world, stages, by_rank, passes)
        return self._weights[key]

    def _weigh(
        self, config: Config, world: int, stages: Sequence[Stage], by_rank: Sequence[tuple[int, ...]], passes: int
    ) -> list[WeightCost]:
        """Pipeline ranks with the same kinds of layers are computed once."""
        ledger = Ledger()
        # A middle rank of a deep pipeline is like its neighbours: one model is built for all of them.
        kinds = [self._kind_of_rank([stages[number] for number in numbers]) for numbers in by_rank]
        models = {
            kind: build_on_meta(
                config,
                self.host,
                fake_context(config, world, kinds.index(kind), ledger),
                PlannedKernels(ledger),
                tuple(stages[number] for number in by_rank[kinds.index(kind)]) if self.kinds else None,
            )
            for kind in dict.fromkeys(kinds)
        }
        # Outside of layers: embeddings, norms, the LM head.
        names = [{name for name, _ in models[kind].named_parameters() if not _is_numbered(name)} for kind in kinds]
        costs: dict[object, WeightCost] = {}
        for kind, model in models.items():
            rank = kinds.index(kind)
            copies = fake_tied_weights(names, rank, ledger)
            ctx = fake_context(config, world, rank, ledger)
            costs[kind] = weight_cost(config, self.host, model, ctx, ledger, copies, self.state, passes)
        return [costs[kind] for kind in kinds]

    def _kind_of_rank(self, stages: Sequence[Stage]) -> object:
        return tuple(
            (stage.first, stage.last, tuple(self.kinds.get(number) for number in stage.layers)) for stage in stages
        )


def _is_numbered(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def ramp_up(config: Config) -> list[tuple[int, int]]:
    """(batch size, steps with it); empty without a ramp-up."""
    if config.train.rampup_batch_size is None:
        return []
    counts: Counter[int] = Counter()
    for _, size in build_batch_size(config).steps(0, total_train_samples(config)):
        counts[size] += 1
    return sorted(counts.items())
