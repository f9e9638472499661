"""MiMo-V2-Flash: values narrower than keys, windows with sinks and twice the key-value heads, experts with sigmoid
scores, multi-token prediction."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="mimo_v2_flash",
    doc="MiMo-V2-Flash: windows with sinks and twice the key-value heads, narrow values, 256 experts, further tokens",
    config_type=Lazy("mt_models.mimo_v2_flash.config:MiMoV2FlashConfig"),
    build=Lazy("mt_models.mimo_v2_flash.model:build_mimo_v2_flash"),
    check=Lazy("mt_models.mimo_v2_flash.config:check_mimo_v2_flash"),
    shrink=Lazy("mt_models.mimo_v2_flash.config:shrink_mimo_v2_flash"),
    presets=Lazy("mt_models.mimo_v2_flash.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.mimo_v2_flash.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.mimo_v2_flash.gguf:GGUF"),
        "megatron": Lazy("mt_models.mimo_v2_flash.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.mimo_v2_flash.flops:training_flops"),
)
