"""OLMoE: 64 small experts, and queries and keys normalized over all heads together."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="olmoe",
    doc="OLMoE: 64 small experts, norms over all heads of queries and keys",
    config_type=Lazy("mt_models.olmoe.config:OlmoeConfig"),
    build=Lazy("mt_models.olmoe.model:build_olmoe"),
    check=Lazy("mt_models.olmoe.config:check_olmoe"),
    presets=Lazy("mt_models.olmoe.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.olmoe.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.olmoe.gguf:GGUF"),
        "megatron": Lazy("mt_models.olmoe.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
