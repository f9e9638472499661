"""Gemma 4 (text) in GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import (
    EPSILON,
    FREQUENCIES,
    OURS,
    SIZES,
    THEIRS,
    decoder_map,
    feed_forward,
    norms,
    tied_output,
)
from mt_models.blocks.hugging_face_decoder import FULL, SLIDING
from mt_models.gemma4.config import Gemma4Config
from mt_models.gemma4.hugging_face import GroupedProjections
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require

NORMS = {
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "self_attention.q_layernorm": "attn_q_norm",
    "self_attention.linear_proj": "attn_output",
}
EXPERTS = {
    "experts.post_dense_layernorm": "post_ffw_norm_1",
    "experts.pre_layernorm": "pre_ffw_norm_2",
    "experts.post_layernorm": "post_ffw_norm_2",
    "experts.mlp.router": "ffn_gate_inp",
    "experts.mlp.experts.linear_fc1": "ffn_gate_up_exps",
    "experts.mlp.experts.linear_fc2": "ffn_down_exps",
}
PER_LAYER = {
    "per_layer_input.gate": "inp_gate",
    "per_layer_input.projection": "proj",
    "per_layer_input.norm": "post_norm",
}
PER_LAYER_INPUTS = {
    "per_layer_inputs.embeddings": "per_layer_token_embd",
    "per_layer_inputs.projection": "per_layer_model_proj",
    "per_layer_inputs.norm": "per_layer_proj_norm",
}
UNROTATED = 1e30
"""What llama.cpp divides frequencies by that are 0."""


# -- tensors -----------------------------------------------------------------------------------------


def name_map(config: Gemma4Config) -> NameMap:
    rules = [rule.for_layer(number) for number in range(config.num_layers) for rule in layer_rules(config, number)]
    if config.hidden_size_per_layer_input:
        rules += norms(PER_LAYER_INPUTS, ours="", theirs="")
    names = decoder_map(config, rules)
    return NameMap(names.rules, 0, names.ignored | unused_projections(config))


def unused_projections(config: Gemma4Config) -> set[str]:
    """Keys and values of layers that read those of another one, which some files hold."""
    shared = [layer for layer in range(config.num_layers) if config.shares_kv(layer)]
    return {f"blk.{layer}.{name}.weight" for layer in shared for name in ("attn_k", "attn_v", "attn_k_norm")}


def layer_rules(config: Gemma4Config, number: int) -> list[Rule]:
    sized, shares = config.of_layer(number), config.shares_kv(number)
    parts = "q" if shares else "qk" if config.keys_are_values(number) else "qkv"
    rules = [
        *norms(NORMS),
        *(() if shares else norms({"self_attention.k_layernorm": "attn_k_norm"})),
        GroupedProjections(
            f"{OURS}self_attention.linear_qkv.weight",
            tuple(f"{THEIRS}attn_{part}.weight" for part in parts),
            groups=sized.query_groups,
            heads=sized.num_attention_heads,
        ),
        *feed_forward(),
        Same(f"{OURS}layer_scalar", f"{THEIRS}layer_output_scale.weight"),
    ]
    if config.hidden_size_per_layer_input:
        rules += norms(PER_LAYER)
    if config.moe is not None:
        rules += [
            *norms(EXPERTS),
            Same(f"{OURS}experts.router_input.scale", f"{THEIRS}ffn_gate_inp.scale"),
            Same(f"{OURS}experts.mlp.router.expert_scale", f"{THEIRS}ffn_down_exps.scale"),
        ]
    return rules


# -- metadata ----------------------------------------------------------------------------------------


def read(metadata: Metadata) -> dict[str, Any]:
    kinds = _kinds(metadata)
    whole, local = len(kinds) - 1, kinds.index(SLIDING) if SLIDING in kinds else len(kinds) - 1
    groups, widths = metadata.numbers("attention.head_count_kv"), metadata.numbers("feed_forward_length")
    shared = metadata.get("attention.shared_kv_layers", int) or 0
    owner = max(layer for layer, kind in enumerate(kinds[: len(kinds) - shared]) if kind == FULL)
    per_layer = metadata.get("embedding_length_per_layer_input", int) or 0
    keys_are_values = not metadata.has_tensor(f"blk.{owner}.attn_v.weight")
    return {
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "layer_types": kinds,
        "head_dim": metadata.need("attention.key_length_swa", int),
        "global_head_dim": metadata.need("attention.key_length", int),
        "num_key_value_heads": groups[local],
        "num_global_key_value_heads": groups[whole] if keys_are_values else None,
        "attention_k_eq_v": keys_are_values,
        "num_kv_shared_layers": shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": metadata.shape("per_layer_token_embd.weight")[0] if per_layer else None,
        "final_logit_softcapping": metadata.get("final_logit_softcapping", float),
        "rope_parameters": _read_positions(metadata),
        **_read_experts(metadata),
    }


def _kinds(metadata: Metadata) -> list[str]:
    return [SLIDING if local else FULL for local in metadata.flags("attention.sliding_window_pattern")]


def _read_positions(metadata: Metadata) -> dict[str, Any]:
    base = metadata.get("rope.freq_base", float) or 1000000.0
    whole: dict[str, Any] = {"rope_type": "proportional", "rope_theta": base}
    if metadata.has_tensor(FREQUENCIES):
        factors = metadata.tensor(FREQUENCIES)
        rotated = factors[factors < UNROTATED / 2]
        if not len(rotated) or bool((rotated != rotated[0]).any()):
            raise ConfigError(f"{FREQUENCIES} of a gemma4 divides frequencies by several factors; it can have one")
        whole |= {"partial_rotary_factor": len(rotated) / len(factors), "factor": float(rotated[0])}
    local = metadata.get("rope.freq_base_swa", float) or 10000.0
    return {FULL: whole, SLIDING: {"rope_type": "default", "rope_theta": local}}


def _read_experts(metadata: Metadata) -> dict[str, Any]:
    if not metadata.get("expert_count", int):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": metadata.need("expert_count", int),
        "top_k_experts": metadata.need("expert_used_count", int),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length", int),
    }


def write(external: External) -> dict[str, Any]:
    kinds, layers = list(external["layer_types"]), external["num_hidden_layers"]
    local, whole = external["num_key_value_heads"], external.get("num_global_key_value_heads")
    whole = (whole if external.get("attention_k_eq_v") else None) or local
    shared, width = external["num_kv_shared_layers"], external["intermediate_size"]
    wide = 2 * width if external["use_double_wide_mlp"] else width
    positions = external["rope_parameters"]
    if external["hidden_size_per_layer_input"]:
        require(external, "vocab_size_per_layer_input", (external["vocab_size"],), "gemma4")
    values: dict[str, Any] = {
        "attention.head_count_kv": [local if kind == SLIDING else whole for kind in kinds],
        "attention.sliding_window_pattern": [kind == SLIDING for kind in kinds],
        "attention.shared_kv_layers": shared,
        "feed_forward_length": [width if layer < layers - shared else wide for layer in range(layers)],
        "embedding_length_per_layer_input": external["hidden_size_per_layer_input"],
        "vocab_size": external["vocab_size"],
        "rope.freq_base": float(positions[FULL]["rope_theta"]),
        "rope.freq_base_swa": float(positions[SLIDING]["rope_theta"]),
    }
    for suffix, size in (("", external["global_head_dim"]), ("_swa", external["head_dim"])):
        values |= {f"attention.{part}_length{suffix}": size for part in ("key", "value")}
        values[f"rope.dimension_count{suffix}"] = size
    if external.get("final_logit_softcapping") is not None:
        values["final_logit_softcapping"] = float(external["final_logit_softcapping"])
    if external.get("enable_moe_block"):
        values |= {
            "expert_count": external["num_experts"],
            "expert_used_count": external["top_k_experts"],
            "expert_feed_forward_length": external["moe_intermediate_size"],
        }
    return values


def frequency_factors(external: External) -> Mapping[str, Tensor]:
    """`further`: what the frequencies of global layers are divided by."""
    whole, size = external["rope_parameters"][FULL], external["global_head_dim"]
    rotated = int(whole["partial_rotary_factor"] * size // 2)
    factors = torch.full((size // 2,), UNROTATED)
    factors[:rotated] = whole.get("factor", 1.0)
    return {FREQUENCIES: factors}


GEMMA4 = GGUFArchitecture(
    name="gemma4",
    model_type="gemma4_text",
    keys=(*SIZES, EPSILON, Key("attention.sliding_window", "sliding_window")),
    read=read,
    write=write,
    further=frequency_factors,
)

GGUF = GGUFFamily(family="gemma4", architectures=(GEMMA4,), name_map=name_map, copies=tied_output)
