"""Dense Hunyuan models in GGUF, with the base of rotary wavelengths that alpha gives."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    PRE_NORMS,
    QK_NORMS,
    attention,
    decoder_map,
    feed_forward,
    head_size,
    norms,
    read_shape,
    require_scaling,
    tied_output,
    write_shape,
)
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, require
from mt_models.hunyuan.config import HunyuanConfig


def name_map(config: HunyuanConfig) -> NameMap:
    return decoder_map(config, [*norms(PRE_NORMS), *norms(QK_NORMS), *attention(config), *feed_forward()])


def write(external: External) -> dict[str, Any]:
    require(external, "attention_bias", (False,), "hunyuan-dense")
    scaling = external.get("rope_scaling") or {}
    if scaling.get("rope_type") == "dynamic" and scaling.get("alpha"):
        external = {**external, "rope_theta": scaled_base(external, float(scaling["alpha"])), "rope_scaling": None}
    require_scaling(external, ("default", "linear", "yarn"), "hunyuan-dense")
    return write_shape(external)


def scaled_base(external: External, alpha: float) -> float:
    size = head_size(external)
    return float(external["rope_theta"]) * alpha ** (size / (size - 2))


HUNYUAN = GGUFArchitecture(
    name="hunyuan-dense", model_type="hunyuan_v1_dense", keys=DENSE, read=read_shape, write=write
)

GGUF = GGUFFamily(family="hunyuan", architectures=(HUNYUAN,), name_map=name_map, copies=tied_output)
