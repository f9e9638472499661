"""RWKV-7: a recurrent language model with a state of fixed size, without attention and without positions."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="rwkv7",
    doc="RWKV-7: a recurrence with decays of each channel in place of attention, token shift",
    config_type=Lazy("mt_models.rwkv7.config:Rwkv7Config"),
    build=Lazy("mt_models.rwkv7.model:build_rwkv7"),
    check=Lazy("mt_models.rwkv7.config:check_rwkv7"),
    presets=Lazy("mt_models.rwkv7.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.rwkv7.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.rwkv7.gguf:GGUF"),
        "megatron": Lazy("mt_models.rwkv7.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.rwkv7.config:training_flops"),
)
