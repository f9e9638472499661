"""Hybrids in Hugging Face's formats: NemotronH, which has one block a layer as ours; Bamba and GraniteMoeHybrid, which
have two."""

from __future__ import annotations

from mt_core.name_map import NameMap
from mt_models.hugging_face import HuggingFaceFamily, tied_output
from mt_models.hybrid import granite
from mt_models.hybrid.bamba import BAMBA
from mt_models.hybrid.bamba import name_map as bamba_name_map
from mt_models.hybrid.config import HybridConfig
from mt_models.hybrid.nemotron_h import NEMOTRON_H, held
from mt_models.hybrid.nemotron_h import name_map as nemotron_h_name_map


def model_type_of(config: HybridConfig) -> str:
    """Gated feed-forwards throughout are GraniteMoeHybrid's; else NemotronH has no positions, Bamba rotary ones."""
    if granite.fits(config):
        return granite.KIND
    return "nemotron_h" if config.position_embedding_type == "none" else "bamba"


def name_map(config: HybridConfig) -> NameMap:
    maps = {"nemotron_h": nemotron_h_name_map, "bamba": bamba_name_map, granite.KIND: granite.name_map}
    return maps[model_type_of(config)](config)


def spelling(config: HybridConfig, name: str) -> str:
    """NemotronH's checkpoints say `backbone` where transformers says `model`."""
    return f"model.{name.removeprefix('backbone.')}" if name.startswith("backbone.") else name


HUGGING_FACE = HuggingFaceFamily(
    family="hybrid",
    model_types={"nemotron_h": NEMOTRON_H, "bamba": BAMBA, granite.KIND: granite.GRANITE},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=tied_output,
    spelling=spelling,
    held=held,
    architectures={
        "nemotron_h": "NemotronHForCausalLM",
        "bamba": "BambaForCausalLM",
        granite.KIND: "GraniteMoeHybridForCausalLM",
    },
)
