"""LFM2 in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import (
    EXPERT_COUNTS,
    FEED_FORWARD,
    OURS,
    PRE_NORMS,
    QK_NORMS,
    SIGMOID,
    SIZES,
    THEIRS,
    attention,
    decoder_map,
    experts,
    feed_forward,
    norms,
    read_shape,
    require_scaling,
    tied_output,
    write_shape,
)
from mt_models.blocks.hugging_face_decoder import FULL
from mt_models.blocks.moe import MoEOptions
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, Reshaped, require
from mt_models.lfm2.config import Lfm2Config
from mt_models.lfm2.hugging_face import ADJUST, CONV, DENSE_LAYERS, EXPERTS, SCALE

GROUPS = "attention.head_count_kv"
"""0 for layers with a convolution."""


def name_map(config: Lfm2Config) -> NameMap:
    rules = [rule.for_layer(number) for number in range(config.num_layers) for rule in _layer(config, number)]
    return decoder_map(config, rules, final_norm="token_embd_norm")


def _layer(config: Lfm2Config, number: int) -> list[Rule]:
    mixer = _convolution(config.conv_kernel) if config.conv_layers[number] else [*norms(QK_NORMS), *attention(config)]
    sparse = config.moe is not None and MoEOptions(config).layers[number]
    return [*norms(PRE_NORMS), *mixer, *(experts(MoEOptions(config)) if sparse else feed_forward())]


def _convolution(kernel: int) -> list[Rule]:
    return [
        *(
            Same(f"{OURS}short_conv.{name}.weight", f"{THEIRS}shortconv.{name}.weight")
            for name in ("in_proj", "out_proj")
        ),
        # [channels, 1, kernel] here.
        Reshaped(f"{OURS}short_conv.conv.weight", f"{THEIRS}shortconv.conv.weight", here=(1, kernel), there=(kernel,)),
    ]


def read(metadata: Metadata) -> dict[str, Any]:
    return {**read_layers(metadata), ADJUST: False}


def read_layers(metadata: Metadata) -> dict[str, Any]:
    groups = metadata.numbers(GROUPS)
    kinds = [FULL if number else CONV for number in groups]
    return {**read_shape(metadata, groups=max(groups)), "layer_types": kinds}


def write(external: External) -> dict[str, Any]:
    require(external, "conv_bias", (False,), "lfm2")
    require_scaling(external, ("default", "linear", "yarn"), "lfm2")
    groups = external["num_key_value_heads"]
    return {
        **write_shape(external),
        GROUPS: [groups if kind == FULL else 0 for kind in external["layer_types"]],
    }


KEYS = (
    *SIZES,
    FEED_FORWARD,
    Key("attention.layer_norm_rms_epsilon", "norm_eps", float),
    Key("shortconv.l_cache", "conv_L_cache"),
)
LFM2 = GGUFArchitecture(name="lfm2", model_type="lfm2", keys=KEYS, read=read, write=write)


def write_experts(external: External) -> dict[str, Any]:
    for key, legal in (("norm_topk_prob", True), ("use_expert_bias", True), (SCALE, 1.0)):
        require(external, key, (legal,), LFM2_MOE.name)
    return {**write(external), "expert_gating_func": SIGMOID}


LFM2_MOE = GGUFArchitecture(
    name="lfm2moe",
    model_type=EXPERTS,
    keys=(
        *KEYS,
        Key("expert_count", "num_experts"),
        *EXPERT_COUNTS,
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("leading_dense_block_count", DENSE_LAYERS),
    ),
    read=read_layers,
    write=write_experts,
)

GGUF = GGUFFamily(family="lfm2", architectures=(LFM2, LFM2_MOE), name_map=name_map, copies=tied_output)
