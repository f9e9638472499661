"""LFM3: gated short convolutions, attention within a window and to everything, norms behind each block, gated heads."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="lfm3",
    doc="LFM3: gated short convolutions, windows and global layers of gated heads, norms before and behind each block",
    config_type=Lazy("mt_models.lfm3.config:Lfm3Config"),
    build=Lazy("mt_models.lfm3.model:build_lfm3"),
    check=Lazy("mt_models.lfm3.config:check_lfm3"),
    shrink=Lazy("mt_models.lfm3.config:shrink_lfm3"),
    presets=Lazy("mt_models.lfm3.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.lfm3.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.lfm3.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.lfm3.flops:training_flops"),
)
