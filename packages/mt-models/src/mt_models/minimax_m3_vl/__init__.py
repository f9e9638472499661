"""MiniMax-M3 with pictures: a vision transformer with positions of three axes in front of a MiniMax-M3."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="minimax_m3_vl",
    doc="MiniMax-M3 with pictures: images of any size as patches, merged two by two, in front of MiniMax-M3",
    config_type=Lazy("mt_models.minimax_m3_vl.config:MiniMaxM3VLConfig"),
    build=Lazy("mt_models.minimax_m3_vl.model:build_minimax_m3_vl"),
    check=Lazy("mt_models.minimax_m3_vl.config:check_minimax_m3_vl"),
    shrink=Lazy("mt_models.minimax_m3_vl.config:shrink_minimax_m3_vl"),
    presets=Lazy("mt_models.minimax_m3_vl.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.minimax_m3_vl.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.minimax_m3_vl.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.minimax_m3_vl.config:training_flops"),
)
