"""With adapters every layout computes what one process computes: loss, gradients, weights after two steps."""

from __future__ import annotations

from functools import cache

import pytest
from tests.covering import EXHAUSTIVE, uncovered_pairs
from tests.dist.in_turn import InTurn
from tests.dist.test_layouts import CP2, EP2, FSDP, PP2, SP, TP2, TP4, ZERO, config, require_equal, small_enough

from mt_core.nn.layout import normal
from mt_core.plugins import load_plugins
from mt_tools.verify.run_record import RunRecord, record_run
from mt_tune.adapters import expert_vectors, experts, low_rank

pytestmark = [pytest.mark.dist, pytest.mark.slow]

LORA = (
    "adapter.type=lora",
    "adapter.rank=3",
    "adapter.alpha=3.0",
    "adapter.lr_ratio=4.0",
)
DORA = ("adapter.type=dora", "adapter.rank=3", "adapter.alpha=3.0")
IA3 = ("adapter.type=ia3", 'adapter.targets=["q_proj", "v_proj", "up_proj", "down_proj"]')
VERA = ("adapter.type=vera", "adapter.rank=8")
EMBEDDINGS = ('adapter.targets=["embed_tokens", "lm_head", "o_proj"]',)
TIED = ('adapter.targets=["word_embeddings", "output_layer"]',)
TOKENS = ("adapter.trainable_token_indices=[101, 32, 260]",)
PISSA = ("adapter.init=pissa",)
DROPOUT = ("adapter.dropout=0.3",)
LLAMA = (
    "model.normalization=RMSNorm",
    "model.position_embedding_type=rope",
    "model.activation=swiglu",
    "model.add_bias_linear=false",
    "model.untie_embeddings_and_output_weights=true",
    "model.num_query_groups=2",
)
"""A GPT that is a Llama in Hugging Face's format: projections of several modules each."""
EXPERTS = (
    "model.moe={num_experts = 4, moe_router_topk = 2, "
    "moe_router_load_balancing_type = ['none'], moe_aux_loss_coeff = []}",
    'adapter.targets=["all-linear", "router"]',
)
MATRICES_OF_EXPERTS = (EXPERTS[0], 'adapter.targets=["all-linear"]')
SHARED_OUTER = ("adapter.experts=shared_outer",)
ETP2 = "parallel.expert_tensor_parallel_size=2"
NF4 = ("adapter.base=nf4", "adapter.base_block_size=16")
INT8, FP8 = ("adapter.base=int8",), ("adapter.base=fp8", "adapter.base_block_size=16")
CASES = [
    (4, (*LORA, *LLAMA, *DROPOUT, "adapter.rank_pattern={k_proj = 2}", TP4, SP)),
    (4, (*LORA, *DROPOUT, TP2, SP, CP2)),
    (2, (*LORA, ZERO)),
    (2, (*LORA, FSDP)),
    (4, (*DORA, *LLAMA, TP2, SP, PP2)),
    (2, (*DORA, FSDP)),
    (4, (*IA3, *LLAMA, TP2, SP, PP2)),
    (2, (*IA3, *LLAMA, FSDP)),
    (4, (*VERA, *LLAMA, TP2, SP, CP2)),
    (4, (*LORA, *LLAMA, *EMBEDDINGS, TP2, SP, PP2)),
    (4, (*LORA, *TIED, TP2, SP, PP2)),
    (4, (*LORA, *TOKENS, TP2, SP, PP2)),
    (2, (*LORA, *LLAMA, *PISSA, TP2, SP)),
    (2, (*LORA, *PISSA, FSDP)),
    (4, (*LORA, *EXPERTS, TP2, SP, EP2, ZERO)),
    (4, (*LORA, *EXPERTS, *SHARED_OUTER, TP2, EP2, ETP2)),
    (4, (*LORA, *EXPERTS, *SHARED_OUTER, TP2, SP, EP2, ZERO)),
    (4, (*LORA, *MATRICES_OF_EXPERTS, *PISSA, TP2, EP2, ETP2)),
    (4, (*DORA, *MATRICES_OF_EXPERTS, *INT8, TP2, EP2, ETP2)),
    (4, (*IA3, *MATRICES_OF_EXPERTS, TP2, EP2, ETP2)),
    (4, (*VERA, *MATRICES_OF_EXPERTS, TP2, EP2, ETP2)),
    (4, (*LORA, *EXPERTS, *SHARED_OUTER, EP2, FSDP)),
    (4, (*DORA, *MATRICES_OF_EXPERTS, EP2, FSDP)),
    (4, (*DORA, *MATRICES_OF_EXPERTS, TP2, SP, EP2, ZERO)),
    (4, (*LORA, *LLAMA, *NF4, TP2, SP, PP2)),
    (2, (*LORA, *NF4, FSDP)),
    (4, (*DORA, *LLAMA, *INT8, TP2, ZERO)),
    (4, (*LORA, *EXPERTS, *FP8, TP2, EP2, ETP2)),
    (4, (*LORA, *EXPERTS, *NF4, EP2, ZERO)),
]
MORE_CASES = [
    (2, (*IA3, *MATRICES_OF_EXPERTS, FSDP)),
    (2, (*LORA, TP2)),
    (2, (*LORA, *LLAMA, TP2, SP)),
    (4, (*LORA, TP2, PP2)),
    (2, (*LORA, *TOKENS, TP2)),
    (2, (*LORA, *EXPERTS, EP2)),
    (4, (*LORA, *EXPERTS, TP2, EP2, ETP2)),
]
"""Keys that also meet, two by two, in CASES."""


def run(rank: int, world: int, more: tuple[str, ...]) -> RunRecord | None:
    host = load_plugins()
    # B is zero at first, and the gradient of A with it.
    low_rank.zeros = experts.zeros = expert_vectors.zeros = normal(0.05)
    record = record_run(config(*more, host=host), 2, host=host)
    return record if rank == 0 else None


def keys_of(world: int, keys: tuple[str, ...]) -> tuple[str, ...]:
    return (*small_enough(world, keys), *keys)


@cache
def one_process(keys: tuple[str, ...]) -> RunRecord:
    record: RunRecord = ALONE.result(1, keys)
    return record


def without_layout(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(key for key in keys if key.startswith(("model.", "train.", "adapter.")))


RUNS, MORE_RUNS = ([(world, keys_of(world, keys)) for world, keys in cases] for cases in (CASES, MORE_CASES))
ALONE = InTurn(run, *([(1, without_layout(keys)) for _, keys in runs] for runs in (RUNS, MORE_RUNS)))
TOGETHER = InTurn(run, RUNS, MORE_RUNS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "keys"),
    [*RUNS, *(pytest.param(*one, marks=EXHAUSTIVE) for one in MORE_RUNS)],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_a_layout_computes_what_one_process_computes(world, keys) -> None:
    require_equal(TOGETHER.result(world, keys), one_process(without_layout(keys)))


def test_every_two_keys_meet_in_a_case_that_runs_by_default() -> None:
    assert not uncovered_pairs([keys for _, keys in CASES], [keys for _, keys in MORE_CASES])
