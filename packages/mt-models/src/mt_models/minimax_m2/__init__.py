"""MiniMax-M2: many small experts with sigmoid scores, norms over all heads, half of each head rotated."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="minimax_m2",
    doc="MiniMax-M2: 256 experts with sigmoid scores, norms over all heads of queries and keys",
    config_type=Lazy("mt_models.minimax_m2.config:MiniMaxM2Config"),
    build=Lazy("mt_models.blocks.decoder:build_rotary_decoder"),
    check=Lazy("mt_models.blocks.config:check_moe_decoder"),
    presets=Lazy("mt_models.minimax_m2.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.minimax_m2.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.minimax_m2.gguf:GGUF"),
        "megatron": Lazy("mt_models.minimax_m2.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
