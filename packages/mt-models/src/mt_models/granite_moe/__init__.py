"""Granite-MoE: Llama with MoE, and factors on embeddings, scores, residual branches and logits."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="granite_moe",
    doc="Granite 3 MoE: small experts, factors on embeddings, scores and logits",
    config_type=Lazy("mt_models.granite_moe.config:GraniteMoeConfig"),
    build=Lazy("mt_models.granite.model:build_granite"),
    check=Lazy("mt_models.blocks.config:check_moe_decoder"),
    presets=Lazy("mt_models.granite_moe.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.granite_moe.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.granite_moe.gguf:GGUF"),
        "megatron": Lazy("mt_models.granite_moe.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
