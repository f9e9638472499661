"""Qwen3-Next, Qwen3.5 and 3.6: gated delta nets, every fourth layer gated attention; dense or with experts."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="qwen_next",
    doc="Qwen3-Next, Qwen3.5 and 3.6 (text): gated delta nets and gated attention, dense or with experts",
    config_type=Lazy("mt_models.qwen_next.config:QwenNextConfig"),
    build=Lazy("mt_models.qwen_next.model:build_qwen_next"),
    check=Lazy("mt_models.qwen_next.config:check_qwen_next"),
    presets=Lazy("mt_models.qwen_next.presets:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.qwen_next.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.qwen_next.gguf:GGUF"),
        "megatron": Lazy("mt_models.qwen_next.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.qwen_next.config:shrink_qwen_next"),
    training_flops=Lazy("mt_models.qwen_next.config:training_flops"),
)
