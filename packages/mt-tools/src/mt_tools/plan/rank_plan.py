"""What a pipeline rank of a layout holds at its peak, and what it sends in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mt_core.parallel.pipeline.schedule_tables import Action, Kind, ScheduleTable
from mt_core.parallel.pipeline.stage import Stage
from mt_tools.plan.activations import StageCost
from mt_tools.plan.ledger import Flow, Ledger
from mt_tools.plan.stages import StageCosts
from mt_tools.plan.weights import WeightCost


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


def plan_rank(
    stages: Sequence[Stage],
    by_rank: Sequence[tuple[int, ...]],
    order: ScheduleTable,
    by_stage: Sequence[StageCost],
    weights: Sequence[WeightCost],
    rank: int,
    passes: int,
) -> RankPlan:
    """The plan of one pipeline rank.

    by_rank: numbers of each rank's stages. by_stage: costs of a micro-batch in each stage. passes: micro-batches of a
    step.
    """
    in_flight = peak_in_flight(order[rank], by_stage)  # stage -> micro-batches
    kept: Counter[str] = Counter()
    for stage, count in in_flight.items():
        for part, size in by_stage[stage].kept.items():
            kept[part] += count * size  # type: ignore[assignment]
    passing = Flow()
    for number in by_rank[rank]:
        passing = passing + by_stage[number].forward + by_stage[number].backward
    sends = messages_between_stages(by_rank, by_stage, rank)
    cost = weights[rank]
    # Every micro-batch passes all stages of the rank; the rest is once per step.
    flow = (passing + sends + cost.micro_batch) * passes + cost.step
    temporary = [by_stage[number].temporary for number in by_rank[rank]]
    boundary = max((by_stage[number].sent for number in by_rank[rank]), default=0.0) if len(stages) > 1 else 0.0
    return RankPlan(
        (rank,),
        0,
        tuple(stages[number].layers for number in by_rank[rank]),
        cost,
        dict(kept),
        sum(in_flight.values()),
        max((max(each.forward, each.backward) for each in temporary), default=0.0),
        # boundary twice: hidden states that are received while others are sent.
        cost.buffers + 2 * boundary,
        flow,
    )


def with_expert_imbalance(
    rank: RankPlan, actions: Sequence[Action], stages: Sequence[Stage], by_stage: Sequence[StageCost], costs: StageCosts
) -> RankPlan:
    """The plan with the activations of a rank whose experts all tokens chose. costs: of stages under that load."""
    in_flight = peak_in_flight(actions, by_stage)
    kept = sum(count * costs.of(stages[number]).kept_bytes for number, count in in_flight.items())
    return replace(rank, imbalanced_activations=kept)


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


def messages_between_stages(by_rank: Sequence[tuple[int, ...]], by_stage: Sequence[StageCost], rank: int) -> Flow:
    """Hidden states to the next stage and gradients to the previous one, for one micro-batch, if on another rank."""
    ledger = Ledger()
    for number in by_rank[rank]:
        if number + 1 < len(by_stage) and number + 1 not in by_rank[rank]:
            ledger.sent("pp", "send", by_stage[number].sent)  # hidden states forward
        if number > 0 and number - 1 not in by_rank[rank]:
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
