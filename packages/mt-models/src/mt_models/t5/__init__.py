"""T5: an encoder and a decoder, with relative positions as published or learned positions as in Megatron."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="t5",
    doc="T5, T5 1.1, mT5, UMT5, Megatron's T5: encoder and decoder with relative or learned positions",
    config_type=Lazy("mt_models.t5.config:T5Config"),
    build=Lazy("mt_models.t5.model:build_t5"),
    check=Lazy("mt_models.t5.config:check_t5"),
    presets=Lazy("mt_models.t5.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.t5.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.t5.gguf:GGUF"),
        "megatron": Lazy("mt_models.t5.megatron:MEGATRON"),
    },
    training_flops=Lazy("mt_models.t5.config:training_flops"),
)
