"""ERNIE 4.5: Llama with rotary positions on adjacent channels, dense or with experts chosen by softmax and bias."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="ernie4_5",
    doc="ERNIE 4.5: Llama with rotary positions on adjacent channels, dense or with experts",
    config_type=Lazy("mt_models.ernie4_5.config:Ernie45Config"),
    build=Lazy("mt_models.blocks.decoder:build_rotary_decoder"),
    check=Lazy("mt_models.ernie4_5.config:check_ernie4_5"),
    presets=Lazy("mt_models.ernie4_5.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.ernie4_5.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.ernie4_5.gguf:GGUF"),
        "megatron": Lazy("mt_models.ernie4_5.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
