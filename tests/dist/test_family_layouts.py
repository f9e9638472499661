"""Families of decoders under layouts of two ranks: loss, each gradient and weights are those of one process.

A step of two micro-batches: what the second step has of the first, and more samples, depend on no family, and are in
test_layouts.py and in tests/models/test_moe_layouts.py.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from tests.ckpt.convert_cases import GROUPED, MODELS
from tests.covering import EXHAUSTIVE
from tests.dist.in_turn import InTurn
from tests.dist.test_layouts import CP2, EP2, PP2, SP, TP2, ZERO, require_equal

from mt_core.config.loading import load_config
from mt_core.plugins import load_plugins
from mt_tools.verify.run_record import RunRecord, record_run

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SETTINGS = (
    # The gradient of a bias of keys is zero but for rounding, which Adam would make as large as any other.
    "optimizer.optimizer=sgd",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "data.eod_mask_loss=true",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "train.train_iters=5",
    "train.eval_interval=null",
    "train.eval_iters=1",
    "checkpoint.save_interval=null",
    "lr_schedule.lr_warmup_iters=0",
    "logging.progress=none",
)
STEPS = 1
LAYOUTS: dict[str, tuple[str, ...]] = {"tp-sp": (TP2, SP), "cp": (CP2,), "pp": (PP2,), "zero": (ZERO,), "ep": (EP2,)}
SHORT = {"original_max_position_embeddings": 32}
"""Longrope under context parallelism, which needs sequences within the first list of factors."""
FAMILIES: dict[str, dict[str, Any]] = {
    name: {**MODELS[name], "vocab_size": 263}
    for name in (
        "phi3",
        "smollm3",
        "ministral3",
        "olmo",
        "exaone4",
        "seed_oss",
        "granite",
        "ernie4_5",
        "hunyuan",
        "minimax_m2",
        "minimax_m3",
        "ernie4_5_moe",
        "hunyuan_v1_moe",
        "lfm2_moe",
        "dots1",
        "solar_open",
        "exaone_moe",
        "lfm2",
        "llama4",
        "qwen_next",
        "gemma4",
        "gemma4_experts",
        "deepseek_v32",
        "glm_5",
        "glm4_moe_lite",
        "kimi_linear",
        "hy_v3",
        "muse_glimmer",
        "muse_spark",
        "inkling",
        "qwen4_exp",
        "bailing_hybrid",
        "glm5_next",
        "kimi_k3",
        "nemotron_3",
        "granite_hybrid",
        "falcon_h1",
        "deepseek_v4",
        "mistral4",
        "mistral_large4",
        "longcat_flash",
        "jamba",
        "rwkv7",
        "lfm3",
        "afmoe",
        "mimo_v2_flash",
        "step3p7",
        "hy_v4",
    )
}
MIXED = "glm4_moe_lite with dense layers between"
UNSHARED = "mistral_large4 without shared latents"
ON_DEMAND = ("lfm3", "afmoe", "longcat_flash", "mistral_large4", UNSHARED)
ON_DEMAND += (
    "mimo_v2_flash",
    "mimo_v2_flash that predicts",
    "bailing_hybrid",
    "glm5_next",
    "kimi_k3",
    "step3p7",
    "hy_v4",
)
ON_DEMAND += ("step3p7", "hy_v4", "muse_spark", "inkling")
"""Families all of whose layouts are exhaustive: what these divide is divided in families above too."""
ROTARY_GPT = {"position_embedding_type": "rope", "normalization": "RMSNorm", "add_bias_linear": False}
FAMILIES[UNSHARED] = {**FAMILIES["mistral_large4"], "kv_source_layers": None}
FAMILIES["minimax_m2"] = {**FAMILIES["minimax_m2"], "moe": {**FAMILIES["minimax_m2"]["moe"], "num_experts": 6}}
FAMILIES["phi3 within its first factors"] = {**FAMILIES["phi3"], **SHORT}
FAMILIES["olmo2"] = {"family": "olmo", **GROUPED, "vocab_size": 263}
# The output of a head may be nearly 0, and its norm would enlarge the rounding errors of its gradients.
FAMILIES["qwen_next"]["norm_epsilon"] = 1e-2
# In fp64 its gradients under tp-sp are those of one process to 4e-15.
FAMILIES["qwen4_exp"]["norm_epsilon"] = 1e-2
FAMILIES["qwen_next that predicts"] = {**FAMILIES["qwen_next"], "num_query_groups": 1, "mtp_num_layers": 1}
FAMILIES["gpt that predicts"] = {
    **MODELS["mixtral"],
    **ROTARY_GPT,
    "family": "gpt",
    "vocab_size": 263,
    "moe": {"num_experts": 4, "moe_layer_freq": "([0]*1+[1]*2)"},
    "mtp_num_layers": 2,
}
LEARNING = {"dsa_indexer_loss_coeff": 1.0, "dsa_indexer_use_sparse_loss": True}
FAMILIES["deepseek_v32 that learns"] = {**FAMILIES["deepseek_v32"], **LEARNING, "mtp_num_layers": 1}
FAMILIES["deepseek_v32 in warm-up"] = {
    **FAMILIES["deepseek_v32"],
    "dsa_indexer_loss_coeff": 1.0,
    "dsa_dense_warmup": True,
}
FAMILIES["mimo_v2_flash that predicts"] = {**FAMILIES["mimo_v2_flash"], "num_query_groups": 1, "mtp_num_layers": 2}
PREDICTING = ("bailing_hybrid", "glm5_next", "exaone_moe", "longcat_flash", "qwen4_exp")
FAMILIES |= {f"{name} that predicts": {**FAMILIES[name], "mtp_num_layers": 1} for name in PREDICTING}
FAMILIES["glm4_moe that predicts"] = {
    **FAMILIES["dots1"],
    "family": "qwen_moe",
    "add_qkv_bias": True,
    "mtp_num_layers": 1,
}
FAMILIES[MIXED] = {
    **FAMILIES["glm4_moe_lite"],
    "num_layers": 4,
    "moe": {**FAMILIES["glm4_moe_lite"]["moe"], "moe_layer_freq": "([1]*1+[0]*2+[1]*1)"},
}
ON_DEMAND += tuple(f"{name} that predicts" for name in (*PREDICTING, "glm4_moe"))
REFUSED = {("phi3", "cp"), ("gemma4", "pp"), ("qwen_next that predicts", "cp"), ("nemotron_3", "cp")}
# Layers of the second stage would read latents of the first.
REFUSED |= {("mistral_large4", "pp")}
REFUSED |= {("jamba", "cp"), ("rwkv7", "cp"), ("gpt that predicts", "cp"), ("mimo_v2_flash that predicts", "cp")}
# Gradients of decay rates are sums over positions that nearly cancel, and the order of sums over ranks shows in their
# fifth digit: tests/models/test_moe_layouts.py has these layouts, and compares by the rounding that is to be expected.
REFUSED |= {("qwen_next", "tp-sp"), ("qwen_next that predicts", "tp-sp")}
# What an expert that returns the token adds lies along the residual stream, and the final norm lets little of it
# through: gradients of its router's weights nearly cancel.
REFUSED |= {("longcat_flash", "tp-sp"), ("longcat_flash", "cp"), ("longcat_flash that predicts", "tp-sp")}
REFUSED |= {(f"{name} that predicts", "cp") for name in (*PREDICTING, "glm4_moe")}
# Gradients of an indexer's norm nearly cancel, too, since a shift of all scores changes nothing.
REFUSED |= {("deepseek_v32 that learns", "tp-sp")}
# Biases by distance and convolutions are over whole sequences.
REFUSED |= {("inkling", "cp")}
# A choice is among the keys of the whole sequence.
CHOOSING = ("qwen4_exp", "glm5_next", "deepseek_v32", "deepseek_v4", "glm_5", "minimax_m3", "mistral_large4", "hy_v4")
REFUSED |= {(name, "cp") for name in FAMILIES if name.startswith(CHOOSING)}
ELSEWHERE = {("deepseek_v4", "pp"), ("deepseek_v4", "ep")}
"""In tests/models/test_moe_layouts.py too, with losses of indexers and multi-token prediction."""
ALIKE = {
    # Rotary embeddings and causal attention of all positions in every layer, as llama's in test_layouts.py: scales of
    # outputs and norms of heads are of single positions.
    *((name, "cp") for name in ("olmo", "olmo2", "seed_oss", "granite", "hunyuan", "minimax_m2", "glm4_moe_lite")),
    (MIXED, "cp"),
    # Layers that do not depend on their number; those of smollm3, exaone4 and llama4 do.
    *(
        (name, "pp")
        for name in ("olmo", "olmo2", "seed_oss", "hunyuan", "ministral3", "minimax_m2", "minimax_m3", "ernie4_5")
    ),
    # The dispatcher and the experts of mixtral; routers are whole on each rank.
    *((name, "ep") for name in ("granite_hybrid", "jamba", "glm4_moe_lite", "glm_5", "deepseek_v32", "minimax_m3")),
    # The layers of the dense sizes, and the dispatcher.
    # In the exhaustive run: streams divide as those of deepseek_v4, delta nets as those of qwen_next.
    *(("qwen4_exp", layout) for layout in LAYOUTS),
    # Normalized heads as in hunyuan, the router and the experts of glm4_moe_lite.
    *(("hy_v3", layout) for layout in LAYOUTS),
    # Windows, layers without positions and gated attention divide as those of exaone4 and qwen_next do.
    *(("muse_glimmer", layout) for layout in LAYOUTS),
    *(
        (name, layout)
        for name in ("ernie4_5_moe", "hunyuan_v1_moe", "lfm2_moe", "dots1", "solar_open", "exaone_moe")
        for layout in LAYOUTS
    ),
    ("deepseek_v32 that learns", "ep"),
    ("deepseek_v32 in warm-up", "ep"),
    ("deepseek_v32 in warm-up", "pp"),
    *((name, layout) for name in ON_DEMAND for layout in LAYOUTS),
}
"""Layouts that divide nothing of a family's own."""
GRID = [
    (name, layout)
    for name, keys in FAMILIES.items()
    for layout in LAYOUTS
    if (name, layout) not in REFUSED and (layout != "ep" or "moe" in keys)
]


def settings(table: str, keys: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for key, value in keys.items():
        name = f"{table}.{key}"
        found += settings(name, value) if isinstance(value, dict) else [f"{name}={json.dumps(value)}"]
    return found


def run(rank: int, world: int, case: tuple[str, tuple[str, ...]]) -> RunRecord | None:
    name, layout = case
    torch.set_num_threads(1)
    host = load_plugins()
    config = load_config(overrides=[*SETTINGS, *settings("model", FAMILIES[name]), *layout], host=host)
    record = record_run(config, STEPS, host=host)
    return record if rank == 0 else None


BY_DEFAULT = [one for one in GRID if one[1] != "zero" and one not in ALIKE | ELSEWHERE]
FURTHER = [one for one in GRID if one not in BY_DEFAULT]
DIVIDED = InTurn(run, *([(2, (name, LAYOUTS[layout])) for name, layout in part] for part in (BY_DEFAULT, FURTHER)))
ALONE = InTurn(run, [(1, (name, ())) for name in FAMILIES if name not in ON_DEMAND], [(1, (n, ())) for n in ON_DEMAND])


@cache
def one_process(name: str) -> RunRecord:
    return ALONE.result(1, (name, ()))


@pytest.mark.parametrize(("name", "layout"), [*BY_DEFAULT, *(pytest.param(*one, marks=EXHAUSTIVE) for one in FURTHER)])
def test_a_family_computes_what_one_process_computes(name: str, layout: str) -> None:
    require_equal(DIVIDED.result(2, (name, LAYOUTS[layout])), one_process(name))
