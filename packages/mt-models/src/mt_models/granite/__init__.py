"""Granite 3, dense: Llama with factors on embeddings, scores, residual branches and logits."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="granite",
    doc="Granite 3, dense: Llama with factors on embeddings, scores and logits",
    config_type=Lazy("mt_models.granite.config:GraniteConfig"),
    build=Lazy("mt_models.granite.model:build_granite"),
    check=Lazy("mt_models.blocks.config:check_decoder"),
    presets=Lazy("mt_models.granite.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.granite.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.granite.gguf:GGUF"),
        "megatron": Lazy("mt_models.granite.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
