"""Estimated step time, from each rank's FLOPs and messages and a machine's parameters. Used to rank layouts.

products      FLOPs / (machine.flops x efficiency)
messages      bytes sent by ring algorithms / the slower of the links that the axis uses, + latency per call
a pass        products + messages of tp, cp and ep, none of them overlapped
pipeline      the schedule's own order, simulated with the passes' times
gradients     messages of dp; with overlap_grad_reduce what one backward pass does not hide
weights       messages of dp; with overlap_param_gather those used before the layers, and what one forward pass does not
              hide of the others
update        bytes that the optimizer reads and writes / memory_speed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mt_core.config.schema import Config
from mt_core.parallel.context import AxisName
from mt_core.parallel.pipeline.timeline import StageTimes
from mt_tools.plan.activations import StageCost
from mt_tools.plan.ledger import Flow, sent_bytes
from mt_tools.plan.machines import Machine
from mt_tools.plan.rank_plan import RankPlan
from mt_tools.plan.weights import WeightCost

UPDATE_BYTES = 28
"""Bytes per element of Adam: fp32 weight, in one piece or two halves, and two moments read and written, gradient
read."""


@dataclass(frozen=True)
class Clock:
    """Seconds of compute and messages on a machine. sizes: of the axes."""

    machine: Machine
    sizes: Mapping[AxisName, int]

    def compute(self, flow: Flow) -> float:
        return flow.flops / (self.machine.flops * self.machine.efficiency)

    def messages(self, flow: Flow, axes: frozenset[str] | None = None) -> float:
        """Seconds of the messages of some axes; default: all."""
        seconds = 0.0
        for (axis, operation), payload in flow.bytes.items():
            if axes is None or axis in axes:
                sent = sent_bytes(operation, payload, self.size(axis))
                seconds += sent / self.speed(axis) + flow.calls[axis, operation] * self.machine.latency
        return seconds

    def speed(self, axis: str) -> float:
        """Bandwidth between the ranks of an axis: that within a node if the whole axis fits into a node."""
        # Ranks are numbered tp fastest: an axis spans stride x size neighbouring ranks.
        stays = self._stride(axis) * self.size(axis) <= self.machine.node_size
        return self.machine.node_speed if stays else self.machine.network_speed

    def stage_times(self, costs: list[StageCost]) -> StageTimes:
        forward = [self.compute(cost.forward) + self.messages(cost.forward) for cost in costs]
        backward = [self.compute(cost.backward) + self.messages(cost.backward) for cost in costs]
        half = [seconds / 2 for seconds in backward]  # dx and dW: one product each
        # The slowest boundary: the simulator takes one time for all of them.
        sent = max((cost.sent for cost in costs[:-1]), default=0.0)
        return StageTimes(forward, half, half, sent / self.speed("pp") + self.machine.latency if sent else 0.0)

    def step_end(self, config: Config, weights: WeightCost, forward: float, backward: float) -> float:
        """Exposed time from the last backward pass to the next forward pass, including communication that the forward
        pass waits for. forward, backward: seconds of a pass."""
        step = weights.step
        # calls of both operations: `messages` looks up those of the bytes it has.
        reduced = Flow(0.0, {call: size for call, size in step.bytes.items() if call[1] != "all_gather"}, step.calls)
        gathered = Flow(0.0, {call: size for call, size in step.bytes.items() if call[1] == "all_gather"}, step.calls)
        sums = self.messages(reduced)
        if config.parallel.overlap_grad_reduce:
            sums = max(0.0, sums - backward)
        collecting = self.messages(gathered)
        if config.parallel.overlap_param_gather:
            # Before the first layer nothing can be hidden.
            first = weights.collected_first * collecting
            collecting = first + max(0.0, collecting - first - forward)
        return sums + collecting + weights.updated * UPDATE_BYTES / self.machine.memory_speed

    def size(self, axis: str) -> int:
        # dp stands for the ranks that reduce gradients (SHOWN_AS), copies for the stages that hold them: pp at most.
        names: Mapping[str, AxisName] = {"dp": "dp_cp", "stage_copies": "pp"}
        return self.sizes[names.get(axis, axis)]  # type: ignore[arg-type]

    def _stride(self, axis: str) -> int:
        """Distance of neighbours on the axis, in ranks (tp-cp-dp-pp, tp fastest)."""
        tp, etp, ep = self.sizes["tp"], self.sizes["etp"], self.sizes["ep"]
        # pp is the slowest axis: a stage is world / pp neighbours.
        strides = {"tp": 1, "cp": tp, "dp": tp, "etp": 1, "ep": etp, "edp": etp * ep}
        return strides.get(axis, self.sizes["world"] // self.sizes["pp"])


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


def step_time(
    config: Config,
    clock: Clock,
    stages: Sequence[Sequence[StageCost]],
    ranks: Sequence[RankPlan],
    passes: int,
    simulated: float,
) -> StepTime:
    """stages: the stages of each pipeline rank. simulated: seconds from the first pass to the last."""
    # One micro-batch through each rank.
    flows = [sum((cost.forward + cost.backward for cost in costs), Flow()) for costs in stages]
    busiest = max(flows, key=lambda flow: clock.compute(flow) + clock.messages(flow))
    products, messages = passes * clock.compute(busiest), passes * clock.messages(busiest)
    # Of one micro-batch: a forward pass is about a third.
    backward = 2 / 3 * (products + messages) / passes
    collecting = passes * max(clock.messages(rank.weights.micro_batch) for rank in ranks)
    end = max(clock.step_end(config, rank.weights, backward / 2, backward) for rank in ranks)
    # The bubble is what the simulated schedule takes beyond the busiest rank's own work.
    waiting = simulated - products - messages
    # Without stages to wait for it is a rounding error of either sign.
    return StepTime(products, messages + collecting, waiting if waiting > 1e-9 * simulated else 0.0, end)
