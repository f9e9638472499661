"""Plans as plain values, for JSON and for tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from mt_tools.plan.layout_search import EXPERT_AXES, Candidate, Found
from mt_tools.plan.layouts import LayoutPlan, RankPlan
from mt_tools.plan.ledger import Flow, sent_bytes
from mt_tools.plan.machines import GIB, Machine
from mt_tools.plan.timing import Clock


def plan_values(plan: LayoutPlan, machine: Machine) -> dict[str, Any]:
    """The whole plan. Bytes are of one rank, messages of one step."""
    sizes = plan.sizes
    return {
        "world_size": plan.world,
        "layout": {name: sizes[name] for name in ("tp", "cp", "dp", "pp", "etp", "ep", "edp")},
        "parameters": {
            "total": plan.parameters.total,
            "active": plan.parameters.active,
            "experts": plan.parameters.experts,
        },
        "micro_batches": plan.micro_batches,
        "flops_per_token": plan.flops_per_token,
        "flops_per_step": plan.flops_per_step,
        "bubble": plan.bubble,
        "machine": machine.name,
        "machine_is_assumed": machine.is_assumed,
        "estimated_seconds": plan.seconds if machine.has_speed else None,
        "estimated_seconds_of": asdict(plan.time) if machine.has_speed else None,
        "estimated_utilization": plan.utilization(machine) if machine.has_speed else None,
        "ramp_up": [{"global_batch_size": size, "steps": steps} for size, steps in plan.ramp_up],
        "ranks": [rank_values(rank, Clock(machine, sizes)) for rank in plan.ranks],
    }


def rank_values(rank: RankPlan, clock: Clock) -> dict[str, Any]:
    weights = rank.weights
    return {
        "pp_ranks": list(rank.pp_ranks),
        "count": rank.count,
        "layers": [[layers.start, layers.stop] for layers in rank.layers],
        "parameters": weights.parameters,
        "bytes": {
            "weights": round(weights.weights),
            "gradients": round(weights.gradients),
            "late_gradients": round(weights.late_gradients),
            "main_weights": round(weights.main_weights),
            "optimizer_state": round(weights.optimizer_state),
            "activations": {part: round(size) for part, size in rank.activations.items()},
            "temporary": round(rank.temporary),
            "communication_buffers": round(rank.buffers),
            "optimizer_update": round(weights.update),
            "total": round(rank.total),
        },
        "imbalanced_activations": None if rank.imbalanced_activations is None else round(rank.imbalanced_activations),
        "gib": rank.total / GIB,
        "micro_batches_in_flight": rank.in_flight,
        "messages": messages(rank.flow, clock),
    }


def messages(flow: Flow, clock: Clock) -> dict[str, dict[str, float]]:
    """By axis: calls per step, the bytes of their largest tensors, and the bytes a rank sends in a ring."""
    rows: dict[str, Counter[str]] = {}
    for (axis, operation), payload in flow.bytes.items():
        row = rows.setdefault(axis, Counter())
        row["calls"] += round(flow.calls[axis, operation])
        row["bytes"] += round(payload)
        row["sent"] += round(sent_bytes(operation, payload, clock.size(axis)))
    return {axis: dict(row) for axis, row in rows.items()}


def search_values(results: Found, machine: Machine, top: int) -> dict[str, Any]:
    """The fastest layouts, how many were valid and how many fit, and the reasons why others were rejected."""
    fastest = results.candidates[0] if results.candidates else None
    return {
        "experts_because": [] if fastest is None else reasons_for_experts(fastest, results),
        "legal": results.legal,
        "fitting": len(results.candidates),
        "too_large": results.too_large,
        "smallest_that_does_not_fit_gib": results.smallest_gib,
        "refused": [{"reason": reason, "layouts": count} for reason, count in results.refused.most_common()],
        "machine": machine.name,
        "machine_is_assumed": machine.is_assumed,
        "layouts": [candidate_values(candidate, machine) for candidate in results.candidates[:top]],
    }


def candidate_values(candidate: Candidate, machine: Machine) -> dict[str, Any]:
    plan = candidate.plan
    return {
        **{key: value for section in candidate.choice.values() for key, value in section.items()},
        "data_parallel_size": plan.sizes["dp"],
        "gib": plan.memory_gib,
        "bubble": plan.bubble,
        "tokens_per_step": candidate.tokens_per_step,
        "estimated_tokens_per_second": candidate.tokens_per_second,
        "estimated_seconds": plan.seconds,
        "estimated_seconds_of": asdict(plan.time),
        "estimated_utilization": plan.utilization(machine),
    }


def reasons_for_experts(chosen: Candidate, results: Found) -> list[str]:
    """The costs of other expert-parallel sizes in an otherwise equal layout; empty without experts."""
    if EXPERT_AXES[0] not in chosen.choice["parallel"]:
        return []
    reasons = []
    for other in results.looked_at:
        if other is not chosen and dense_part(other) == dense_part(chosen):
            ep, etp = (other.choice["parallel"][axis] for axis in EXPERT_AXES)
            needed, seconds = other.plan.memory_gib, other.plan.seconds / chosen.plan.seconds - 1
            verdict = f"takes {seconds:+.1%} time" if other in results.candidates else "does not fit"
            reasons.append(f"expert parallel {ep} x tensor {etp}: {needed:.1f} GiB, {verdict}")
    return reasons


def dense_part(candidate: Candidate) -> object:
    """Everything that is chosen besides the axes of experts."""
    axes = {key: size for key, size in candidate.choice["parallel"].items() if key not in EXPERT_AXES}
    return axes, candidate.choice["train"], candidate.choice["recompute"]
