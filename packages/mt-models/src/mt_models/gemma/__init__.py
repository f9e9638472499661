"""Gemma 2 and 3 (text): GeGLU, norms around every block, alternating local and global layers, logit soft caps."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="gemma",
    doc="Gemma 2 and 3, text: GeGLU, norms around every block, local and global layers in turn, soft caps",
    config_type=Lazy("mt_models.gemma.config:GemmaConfig"),
    build=Lazy("mt_models.gemma.model:build_gemma"),
    check=Lazy("mt_models.blocks.config:check_decoder"),
    presets=Lazy("mt_models.gemma.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.gemma.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.gemma.gguf:GGUF"),
        "megatron": Lazy("mt_models.gemma.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
