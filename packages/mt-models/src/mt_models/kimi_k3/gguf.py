"""Kimi K3 in GGUF. llama.cpp has the product of each attention residual's norm and query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import (
    DENSE,
    OURS,
    PRE_NORMS,
    SIGMOID,
    THEIRS,
    decoder_map,
    experts,
    feed_forward,
    norms,
)
from mt_models.blocks.gguf_kimi_delta_net import DECAY, kimi_delta_net
from mt_models.blocks.hugging_face_moe import BIAS_KEY
from mt_models.blocks.moe import MoEOptions
from mt_models.deepseek.gguf import latent_attention
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, NegativeExponential, require
from mt_models.kimi_k3.config import KimiK3Config
from mt_models.kimi_k3.hugging_face import BOUND, FULL_RANK, KIND, LATENT, TABLE, TEXT_KIND

NAME = "kimi-k3"


@dataclass(frozen=True)
class NormTimesQuery(Rule):
    """The weight of a norm and a query end to end here; there their product, in fp32."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([torch.ones_like(tensors[0]), tensors[0]])

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        norm_weight, query = tensor.float().chunk(2)
        return [norm_weight * query]


# -- tensors -----------------------------------------------------------------------------------------

DELTA_GATES = {
    "forget_down_proj.weight": "ssm_f_a.weight",
    "forget_up_proj.weight": "ssm_f_b.weight",
    "gate_proj.weight": "ssm_g.weight",
}
LATENTS = {
    "mlp.fc1_latent_proj": "ffn_routed_down",
    "mlp.combined_layernorm": "ffn_routed_norm",
    "mlp.fc2_latent_proj": "ffn_routed_up",
}
OUTPUT = "decoder.final_layernorm"


def name_map(config: KimiK3Config) -> NameMap:
    rules: list[Rule] = []
    for number, linear in enumerate(config.linear_layers):
        block = _delta_net(config) if linear else _attention(config)
        layer = (*norms(PRE_NORMS), *_residuals(), *block, *_feed_forward(config, number))
        rules += [rule.for_layer(number) for rule in layer]
    names = decoder_map(config, rules)
    output = [
        Same(f"{OUTPUT}.norm.weight", "output_norm.weight"),
        NormTimesQuery(f"{OUTPUT}.residual.weight", "output_res_score.weight"),
    ]
    others = [rule for rule in names.rules if rule.ours != f"{OUTPUT}.weight"]
    return NameMap([*others, *output], 0, names.ignored)


def _residuals() -> list[Rule]:
    scores = {"attention_residual": "attn_res_score", "mlp_residual": "ffn_res_score"}
    return [NormTimesQuery(f"{OURS}{ours}.weight", f"{THEIRS}{theirs}.weight") for ours, theirs in scores.items()]


def _delta_net(config: KimiK3Config) -> list[Rule]:
    return kimi_delta_net(config, NegativeExponential(*DECAY, there=()), DELTA_GATES)


def _attention(config: KimiK3Config) -> list[Rule]:
    return [*latent_attention(config), *norms({"self_attention.linear_gate": "attn_gate"})]


def _feed_forward(config: KimiK3Config, number: int) -> list[Rule]:
    if config.moe is None or not MoEOptions(config).layers[number]:
        return feed_forward()
    moe = MoEOptions(config)
    return [*experts(moe), *norms({} if moe["moe_latent_size"] is None else LATENTS)]


# -- configuration -----------------------------------------------------------------------------------

GROUPS = "attention.head_count_kv"
"""1 for layers with latents, 0 for those with a delta rule."""
KEYS = (
    *DENSE,
    Key("vocab_size", "vocab_size"),
    Key("attention.kv_lora_rank", "kv_lora_rank"),
    Key("rope.dimension_count", "qk_rope_head_dim"),
    Key("attention.value_length_mla", "v_head_dim"),
    Key("leading_dense_block_count", "first_k_dense_replace"),
    Key("expert_count", "num_experts"),
    Key("expert_used_count", "num_experts_per_token"),
    Key("expert_shared_count", "num_shared_experts"),
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_weights_scale", "routed_scaling_factor", float),
    Key("attn_res.block_size", "attn_res_block_size"),
    Key("activation.situ_beta", "activation_situ_beta", float),
    Key("activation.situ_linear_beta", "activation_situ_linear_beta", float),
)
"""Keys of `text_config`."""
OPTIONAL = (Key("attention.q_lora_rank", "q_lora_rank"), Key("expert_latent_length", LATENT))


def read(metadata: Metadata) -> dict[str, Any]:
    text: dict[str, Any] = {key.ours: metadata.need(key.theirs, key.kind) for key in KEYS}
    text |= {key.ours: metadata.get(key.theirs, key.kind) for key in OPTIONAL}
    text |= {
        "model_type": TEXT_KIND,
        "hidden_act": "situ",
        "num_key_value_heads": text["num_attention_heads"],
        "qk_nope_head_dim": metadata.need("attention.key_length_mla", int) - text["qk_rope_head_dim"],
        "moe_renormalize": text["num_experts_per_token"] > 1,
        TABLE: _read_table(metadata, text["num_attention_heads"]),
    }
    return {"text_config": text}


def _read_table(metadata: Metadata, heads: int) -> dict[str, Any]:
    groups = metadata.numbers(GROUPS)
    return {
        "num_heads": heads,
        "head_dim": metadata.need("kda.head_dim", int),
        "short_conv_kernel_size": metadata.need("ssm.conv_kernel", int),
        "full_attn_layers": [layer for layer, number in enumerate(groups, 1) if number],
        "kda_layers": [layer for layer, number in enumerate(groups, 1) if not number],
        FULL_RANK: True,
        BOUND: metadata.get("kda.gate_lower_bound", float),
    }


def write(external: External) -> dict[str, Any]:
    text: Mapping[str, Any] = external["text_config"]
    table = text[TABLE]
    _require_expressed(text, table)
    rotated, latent = text["qk_rope_head_dim"], text["kv_lora_rank"]
    full = set(table["full_attn_layers"])
    values = {
        **{key.theirs: key.kind(text[key.ours]) for key in KEYS},
        **{key.theirs: text[key.ours] for key in OPTIONAL if text.get(key.ours) is not None},
        GROUPS: [int(layer + 1 in full) for layer in range(text["num_hidden_layers"])],
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": text["qk_nope_head_dim"] + rotated,
        "kda.head_dim": table["head_dim"],
        "ssm.conv_kernel": table["short_conv_kernel_size"],
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": bool(text["moe_renormalize"]),
    }
    return values if table[BOUND] is None else {**values, "kda.gate_lower_bound": float(table[BOUND])}


def _require_expressed(text: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    if text.get("num_experts") is None:
        raise ConfigError(f"model.moe=null cannot be written as GGUF of the architecture {NAME}, which has experts")
    require({"num_heads": table["num_heads"]}, "num_heads", (text["num_attention_heads"],), NAME)
    require(text, "num_expert_group", (1, None), NAME)
    require(text, BIAS_KEY, (True, None), NAME)


KIMI_K3 = GGUFArchitecture(name=NAME, model_type=KIND, keys=(), read=read, write=write)

GGUF = GGUFFamily(family="kimi_k3", architectures=(KIMI_K3,), name_map=name_map)
