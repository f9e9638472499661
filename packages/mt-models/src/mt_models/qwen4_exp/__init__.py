"""Qwen4-Exp (text): residual streams with gates of low rank, gated delta nets, attention to chosen runs of keys,
embeddings of n-grams."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="qwen4_exp",
    doc="Qwen4-Exp, text: four residual streams, gated delta nets, attention to chosen runs, n-grams, experts",
    config_type=Lazy("mt_models.qwen4_exp.config:Qwen4ExpConfig"),
    build=Lazy("mt_models.qwen4_exp.model:build_qwen4_exp"),
    check=Lazy("mt_models.qwen4_exp.config:check_qwen4_exp"),
    presets=Lazy("mt_models.qwen4_exp.presets:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.qwen4_exp.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.qwen4_exp.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.qwen4_exp.config:shrink_qwen4_exp"),
    training_flops=Lazy("mt_models.qwen4_exp.flops:training_flops"),
)
