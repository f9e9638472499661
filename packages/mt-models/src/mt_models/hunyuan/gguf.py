"""Hunyuan in GGUF, with the base of rotary wavelengths that alpha gives."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    PRE_NORMS,
    QK_NORMS,
    attention,
    decoder_map,
    experts,
    feed_forward,
    head_size,
    norms,
    read_shape,
    require_scaling,
    tied_output,
    write_shape,
)
from mt_models.blocks.moe import MoEOptions
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, require
from mt_models.hunyuan.config import HunyuanConfig
from mt_models.hunyuan.hugging_face import COUNT, EXPERTS, TOPK
from mt_models.hunyuan.hugging_face import DENSE as DENSE_TYPE


def name_map(config: HunyuanConfig) -> NameMap:
    blocks = feed_forward() if config.moe is None else experts(MoEOptions(config))
    return decoder_map(config, [*norms(PRE_NORMS), *norms(QK_NORMS), *attention(config), *blocks])


def write(external: External) -> dict[str, Any]:
    name = (HUNYUAN_MOE if external["model_type"] == EXPERTS else HUNYUAN).name
    require(external, "attention_bias", (False,), name)
    scaling = external.get("rope_scaling") or {}
    if scaling.get("rope_type") == "dynamic" and scaling.get("alpha"):
        external = {**external, "rope_theta": scaled_base(external, float(scaling["alpha"])), "rope_scaling": None}
    require_scaling(external, ("default", "linear", "yarn"), name)
    return write_shape(external)


def scaled_base(external: External, alpha: float) -> float:
    size = head_size(external)
    return float(external["rope_theta"]) * alpha ** (size / (size - 2))


HUNYUAN = GGUFArchitecture(name="hunyuan-dense", model_type=DENSE_TYPE, keys=DENSE, read=read_shape, write=write)


def write_experts(external: External) -> dict[str, Any]:
    widths = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
    return {**write(external), "expert_shared_count": 1, **dict.fromkeys(widths, external["intermediate_size"])}


HUNYUAN_MOE = GGUFArchitecture(
    name="hunyuan-moe",
    model_type=EXPERTS,
    keys=(*DENSE, Key("expert_count", COUNT), Key("expert_used_count", TOPK)),
    read=read_shape,
    write=write_experts,
)

GGUF = GGUFFamily(family="hunyuan", architectures=(HUNYUAN, HUNYUAN_MOE), name_map=name_map, copies=tied_output)
