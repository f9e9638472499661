"""Gemma 4 (text): per-layer embeddings, head sizes by layer, keys as values, shared keys and values, experts beside the
dense feed-forward."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="gemma4",
    doc="Gemma 4, text: local and global layers of other head sizes, per-layer embeddings, shared keys and values, MoE",
    config_type=Lazy("mt_models.gemma4.config:Gemma4Config"),
    build=Lazy("mt_models.gemma4.model:build_gemma4"),
    check=Lazy("mt_models.gemma4.config:check_gemma4"),
    presets=Lazy("mt_models.gemma4.presets:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.gemma4.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.gemma4.gguf:GGUF"),
        "megatron": Lazy("mt_models.gemma4.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.gemma4.config:shrink_gemma4"),
    training_flops=Lazy("mt_models.gemma4.flops:training_flops"),
)
