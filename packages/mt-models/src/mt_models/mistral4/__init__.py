"""Mistral Small 4: latent attention with queries that grow with their positions, and experts chosen by a softmax."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="mistral4",
    doc="Mistral Small 4: latent attention with queries that grow with their positions, small experts, a shared one",
    config_type=Lazy("mt_models.mistral4.config:Mistral4Config"),
    build=Lazy("mt_models.deepseek.model:build_deepseek"),
    check=Lazy("mt_models.mistral4.config:check_mistral4"),
    presets=Lazy("mt_models.mistral4.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.mistral4.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.mistral4.gguf:GGUF"),
        "megatron": Lazy("mt_models.mistral4.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.deepseek.config:shrink_deepseek"),
    training_flops=Lazy("mt_models.deepseek.config:training_flops"),
)
