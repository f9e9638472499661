"""Muse Glimmer (text): norms around every block, gated attention with normalized heads, global layers without
positions."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="muse_glimmer",
    doc="Muse Glimmer, text: norms around every block, gated attention in windows, global layers without positions",
    config_type=Lazy("mt_models.muse_glimmer.config:MuseGlimmerConfig"),
    build=Lazy("mt_models.muse_glimmer.model:build_muse_glimmer"),
    check=Lazy("mt_models.muse_glimmer.config:check_muse_glimmer"),
    presets=Lazy("mt_models.muse_glimmer.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.muse_glimmer.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.muse_glimmer.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.muse_glimmer.flops:training_flops"),
)
