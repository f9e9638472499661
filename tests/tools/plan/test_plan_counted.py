"""What `mt plan` says against what ranks that train for real hold and send.

Parameters, gradients, master weights, optimizer state and messages are equal to the byte; all memory together, with
the activations that autograd keeps at once, within 5 %.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the functions that ranks run

from cases import CP, EP, ETP, EXPERTS, GPT_OSS, LLAMA, MODEL, MOE, PAIRS, PP, T5, TP, Tree, planned, tree
from counting import SMALLEST, Counted, count
from tests.covering import EXHAUSTIVE
from tests.dist.in_turn import InTurn

from mt_tools.plan.layouts import LayoutPlan
from mt_tools.plan.rank_plan import RankPlan

pytestmark = [pytest.mark.dist, pytest.mark.slow]

FUSED = ("rms_norm", "rotary", "activation", "cross_entropy")


def fused_tree() -> Tree:
    """On a CPU Triton's interpreter runs the kernels of a GPU, a row in milliseconds: few of them."""
    values = tree({**LLAMA, "num_layers": 1}, kernels=dict.fromkeys(FUSED, "triton"), precision={"dtype": "bf16"})
    values["train"] |= {"micro_batch_size": 1, "global_batch_size": 1}
    values["data"]["seq_length"] = 8
    return values


def short(model: dict[str, Any] | None = None, **sections: Any) -> Tree:
    """Two layers and micro-batches: that further layers cost what the second does is a test of its own."""
    values = tree({**(model or MODEL), "num_layers": 2}, **sections)
    values["train"]["global_batch_size"] = 4
    return values


SP = {TP: 2, "sequence_parallel": True}
LAYOUTS = {
    "one process": (1, tree()),
    "fused kernels": (1, fused_tree()),
    "full recomputation": (1, tree(recompute={"recompute_granularity": "full"})),
    "uniform recomputation": (
        1,
        tree(recompute={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}),
    ),
    "selective recomputation": (1, short(recompute={"recompute_granularity": "selective"})),
    "tensor": (2, short(parallel={TP: 2})),
    "tensor and sequence": (2, short(parallel=SP)),
    "tensor, more ranks than groups": (2, short({**LLAMA, "num_query_groups": 1}, parallel={TP: 2})),
    "pipeline": (2, tree(parallel={PP: 2})),
    "pipeline of four, interleaved": (2, tree(parallel={PP: 2, "pipeline_schedule": "interleaved_1f1b"})),
    "pipeline in a V": (2, tree(parallel={PP: 2, "pipeline_schedule": "zbv_zero_bubble"})),
    "context": (2, short(parallel={CP: 2})),
    "context, all-gather": (2, short(parallel={CP: 2, "cp_comm_type": "all_gather"})),
    "context, all-to-all": (2, short(parallel={CP: 2, "cp_comm_type": "a2a"})),
    "sinks": (1, short(GPT_OSS)),
    "sinks, context": (2, short(GPT_OSS, parallel={CP: 2})),
    "data": (2, short(precision={"dtype": "bf16"})),
    "distributed optimizer": (2, short(parallel={"use_distributed_optimizer": True})),
    "distributed optimizer, bf16": (
        2,
        short(parallel={"use_distributed_optimizer": True}, precision={"dtype": "bf16"}),
    ),
    "distributed optimizer, instances": (
        4,
        tree(parallel={"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}),
    ),
    "three axes": (4, short({**LLAMA}, parallel={**SP, PP: 2})),
    "experts, one process": (1, short(MOE)),
    "experts sharded": (2, short(MOE, parallel={EP: 2})),
    "experts and tensor": (4, short(MOE, parallel={EP: 2, TP: 2})),
    "experts and sequence": (4, short(MOE, parallel={**SP, EP: 2, ETP: 1})),
    "experts' matrices": (2, short(MOE, parallel={**SP, ETP: 2})),
    "experts, distributed optimizer": (
        4,
        tree(MOE, parallel={EP: 2, "use_distributed_optimizer": True}, precision={"dtype": "bf16"}),
    ),
    "experts gather tokens": (
        2,
        short({**LLAMA, "moe": {**EXPERTS, "moe_token_dispatcher_type": "allgather"}}, parallel={EP: 2}),
    ),
    "experts with a capacity": (
        2,
        short(
            {
                **LLAMA,
                "moe": {
                    **EXPERTS,
                    "moe_expert_capacity_factor": 0.5,
                    "moe_token_drop_policy": "position",
                    "moe_pad_expert_input_to_capacity": True,
                },
            },
            parallel={EP: 2},
        ),
    ),
    "encoder and decoder": (2, short(T5, parallel=SP, data=PAIRS)),
    "encoder and decoder through a pipeline": (2, short(T5, parallel={PP: 2}, data=PAIRS)),
    "experts through a pipeline": (4, short(MOE, parallel={PP: 2, EP: 2})),
}
SHARDED = (2, tree(parallel={"use_torch_fsdp2": True}))
IN_OTHERS = (
    *("tensor", "context", "sinks", "distributed optimizer", "experts sharded", "experts and tensor"),
    "experts, one process",
)
"""Layouts of which each axis and option is in another."""
RUNS = InTurn(
    count,
    *(
        [(world, json.dumps(values)) for name, (world, values) in LAYOUTS.items() if (name in IN_OTHERS) == further]
        for further in (False, True)
    ),
    [(SHARDED[0], json.dumps(SHARDED[1]))],
)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=EXHAUSTIVE if name in IN_OTHERS else ()) for name in LAYOUTS]
)
def test_a_plan_is_what_ranks_hold_and_send(layout: str) -> None:
    world, values = LAYOUTS[layout]
    plan, counted = planned(values, world), RUNS.of_ranks(world, json.dumps(values))
    for row in plan.ranks:
        for pp_rank in row.pp_ranks:
            # The first rank of a stage: a plan speaks of those that are first on every other axis.
            compare(row, next(one for one in counted if one.pp_rank == pp_rank))


def compare(row: RankPlan, counted: Counted) -> None:
    held = row.weights
    assert held.parameters == counted.parameters
    assert held.weights == counted.weights
    assert held.gradients == counted.gradients
    assert held.main_weights == counted.main_weights
    assert held.optimizer_state == counted.optimizer_state
    assert row.activation_bytes == pytest.approx(counted.activations, rel=0.01)
    assert held.total + row.activation_bytes == pytest.approx(counted.total, rel=0.05)
    assert sent(row, counted.same_ranks) == counted.sent


def sent(row: RankPlan, same_ranks: dict[str, str]) -> dict[tuple[str, str], float]:
    """Without messages that are not counted, under the names that they are counted by."""
    found: Counter[tuple[str, str]] = Counter()
    for (axis, operation), size in row.flow.bytes.items():
        if size > SMALLEST * row.flow.calls[axis, operation]:
            found[same_ranks.get(axis, axis), operation] += size
    return dict(found)


def test_sharded_weights_are_counted_too() -> None:
    """FSDP2: rows of every parameter over the ranks; what it collects is not seen in torch.distributed calls."""
    world, values = SHARDED
    row, counted = only(planned(values, world)), RUNS.result(world, json.dumps(values))
    held = row.weights
    assert (held.weights, held.gradients, held.optimizer_state) == (
        counted.weights,
        counted.gradients,
        counted.optimizer_state,
    )


def only(plan: LayoutPlan) -> RankPlan:
    (row,) = plan.ranks
    return row
