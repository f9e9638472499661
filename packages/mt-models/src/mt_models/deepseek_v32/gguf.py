"""DeepSeek-V3.2 and GLM-5 in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap, Rule
from mt_models.blocks.gguf_decoder import decoder_map, norms, tied_output
from mt_models.deepseek import gguf as deepseek
from mt_models.deepseek_v32.config import DeepseekV32Config
from mt_models.deepseek_v32.hugging_face import DEEPSEEK, FULL, GLM, SHARED
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require

PREFIX = "self_attention.core_attention.indexer."
INDEXER = {f"{PREFIX}linear_wq_b": "indexer.attn_q_b", f"{PREFIX}linear_wk": "indexer.attn_k"}
INDEXER |= {f"{PREFIX}linear_weights_proj": "indexer.proj"}
KEY_NORM = {f"{PREFIX}k_norm": "indexer.k_norm"}
NORM_EPSILON = 1e-6
"""Epsilon of the norm of the indexer's keys."""


def name_map(config: DeepseekV32Config) -> NameMap:
    layers = [rule.for_layer(number) for number in range(config.num_layers) for rule in _layer(config, number)]
    return decoder_map(config, layers)


def _layer(config: DeepseekV32Config, number: int) -> list[Rule]:
    indexer_rules = [*norms(INDEXER), *norms(KEY_NORM, bias=True)] if config.indexer_of(number) == number else []
    return [*deepseek.layer_rules(config, number), *indexer_rules]


def read(metadata: Metadata) -> dict[str, Any]:
    return deepseek.read_v3(metadata)


def write(external: External) -> dict[str, Any]:
    # Of dense layers the file has the number of those that come first.
    require(external, "mlp_layer_types", (None,), str(external["model_type"]))
    return {
        **deepseek.write(external),
        "expert_gating_func": deepseek.SIGMOID,
        "attention.layer_norm_epsilon": NORM_EPSILON,
    }


def read_glm(metadata: Metadata) -> dict[str, Any]:
    layers = range(metadata.need("block_count", int))
    has_indexer = [metadata.has_tensor(f"blk.{layer}.indexer.proj.weight") for layer in layers]
    return {**deepseek.read_v3(metadata), "indexer_types": [FULL if there else SHARED for there in has_indexer]}


def write_glm(external: External) -> dict[str, Any]:
    return {**write(external), "attention.indexer.types": [int(kind == FULL) for kind in external["indexer_types"]]}


KEYS = (
    *deepseek.KEYS,
    Key("attention.indexer.head_count", "index_n_heads"),
    Key("attention.indexer.key_length", "index_head_dim"),
    Key("attention.indexer.top_k", "index_topk"),
)
DEEPSEEK_V32 = GGUFArchitecture("deepseek32", DEEPSEEK, KEYS, read, write)
GLM_5 = GGUFArchitecture("glm-dsa", GLM, KEYS, read_glm, write_glm)

GGUF = GGUFFamily(family="deepseek_v32", architectures=(DEEPSEEK_V32, GLM_5), name_map=name_map, copies=tied_output)
