"""GPT-OSS sharded over ranks: losses, every gradient, norms and weights of the steps are one process's."""

from __future__ import annotations

import pytest
from tests.covering import EXHAUSTIVE
from tests.dist.in_turn import InTurn
from tests.models.test_moe_layouts import BATCH4, CP2, EP2, FULL, PP2, SP, TP2, ZERO, of_one_process, record

from mt_tools.verify.comparison import compare
from mt_tools.verify.run_record import RunRecord

pytestmark = [pytest.mark.dist, pytest.mark.slow]

MODEL = {
    "family": "gpt_oss",
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 12,
    "vocab_size": 263,
    "sliding_window": 5,
    "init_method_std": 0.2,
    "moe": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "moe_aux_loss_coeff": [0.01]},
}
TP4 = "parallel.tensor_model_parallel_size=4"
SELECTIVE = "recompute.recompute_granularity=selective"
ETP = "parallel.expert_tensor_parallel_size=1"


def method(name: str) -> str:
    return f"parallel.cp_comm_type={name}"


def run(rank: int, world: int, layout: tuple[str, ...]) -> RunRecord | None:
    found = record(MODEL, layout)
    return found if rank == 0 else None


LAYOUTS: list[tuple[int, tuple[str, ...]]] = [
    (2, (TP2, SP, SELECTIVE)),
    (4, (TP4, ETP)),  # more ranks than key-value groups
    (4, (TP2, EP2, ZERO, BATCH4)),
    (2, (PP2, FULL)),
    (2, (CP2, method("p2p"))),
    (2, (CP2, method("all_gather"))),
    (2, (CP2, method("a2a"))),
    (4, (CP2, TP2, SP, EP2)),
]
IN_OTHERS: list[tuple[int, tuple[str, ...]]] = [(2, (TP2,)), (2, (EP2, BATCH4))]
"""Four ranks have both."""
RUNS = InTurn(run, LAYOUTS, [(1, of_one_process(layout)) for _, layout in LAYOUTS])


@pytest.mark.long
@pytest.mark.parametrize(("world", "layout"), [*LAYOUTS, *(pytest.param(*one, marks=EXHAUSTIVE) for one in IN_OTHERS)])
def test_a_layout_computes_what_one_process_does(world, layout) -> None:
    differences = compare(RUNS.result(world, layout), RUNS.result(1, of_one_process(layout)))
    names = {difference.name for difference in differences}
    assert "decoder.layers.0.self_attention.core_attention.softmax_offset" in " ".join(names)
    assert "decoder.layers.0.mlp.experts.linear_fc2.bias" in " ".join(names)
    assert not [str(difference) for difference in differences if difference.too_large]


def test_sinks_matter_in_these_runs() -> None:
    """Or a layout that forgets them would pass: their gradient is no rounding."""
    gradients = RUNS.result(1, ()).gradients
    for number in range(2):
        name = f"decoder.layers.{number}.self_attention.core_attention.softmax_offset"
        assert gradients[name].abs().max() > 1e-5
