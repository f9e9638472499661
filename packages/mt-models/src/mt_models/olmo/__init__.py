"""OLMo 2 and 3: norms of what is added, and of all heads of queries and keys together."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="olmo",
    doc="OLMo 2 and 3: norms behind attention and feed-forward, windows and YaRN by kind of layer in OLMo 3",
    config_type=Lazy("mt_models.olmo.config:OlmoConfig"),
    build=Lazy("mt_models.blocks.decoder:build_rotary_decoder"),
    check=Lazy("mt_models.olmo.config:check_olmo"),
    presets=Lazy("mt_models.olmo.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.olmo.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.olmo.gguf:GGUF"),
        "megatron": Lazy("mt_models.olmo.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
