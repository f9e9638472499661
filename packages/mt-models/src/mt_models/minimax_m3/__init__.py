"""MiniMax-M3, text: attention over blocks of keys that an indexer chooses, experts with sigmoid scores."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="minimax_m3",
    doc="MiniMax-M3, text: attention over chosen blocks of keys, 128 experts with sigmoid scores, a shared one",
    config_type=Lazy("mt_models.minimax_m3.config:MiniMaxM3Config"),
    build=Lazy("mt_models.minimax_m3.model:build_minimax_m3"),
    check=Lazy("mt_models.minimax_m3.config:check_minimax_m3"),
    presets=Lazy("mt_models.minimax_m3.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.minimax_m3.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.minimax_m3.gguf:GGUF"),
        "megatron": Lazy("mt_models.minimax_m3.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.minimax_m3.config:shrink_minimax_m3"),
    training_flops=Lazy("mt_models.minimax_m3.flops:training_flops"),
)
