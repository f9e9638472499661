"""What mt-models registers. A family's declaration is in its folder; none imports torch."""

from __future__ import annotations

from mt_core.hookspecs import hookimpl
from mt_core.specs import LossSpec, ModelSpec
from mt_models import (
    bart,
    bert,
    biencoder,
    deepseek,
    deepseek_v32,
    ernie4_5,
    exaone4,
    falcon_h1,
    gemma,
    gemma4,
    gemma4_vl,
    glm4_moe_lite,
    gpt,
    gpt_oss,
    granite,
    granite_moe,
    heads,
    hunyuan,
    hybrid,
    internvl,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    llava,
    mamba,
    minimax_m2,
    ministral3,
    mistral,
    mixtral,
    olmo,
    olmo_hybrid,
    olmoe,
    phi3,
    qwen,
    qwen3_vl,
    qwen_moe,
    qwen_next,
    qwen_next_vl,
    qwen_vl,
    retro,
    seed_oss,
    smollm3,
    smolvlm,
    t5,
    vision,
)

FAMILIES = (
    gpt.SPEC,
    llama.SPEC,
    mistral.SPEC,
    qwen.SPEC,
    gemma.SPEC,
    gemma4.SPEC,
    phi3.SPEC,
    smollm3.SPEC,
    ministral3.SPEC,
    olmo.SPEC,
    olmo_hybrid.SPEC,
    exaone4.SPEC,
    seed_oss.SPEC,
    granite.SPEC,
    ernie4_5.SPEC,
    hunyuan.SPEC,
    mixtral.SPEC,
    qwen_moe.SPEC,
    qwen_next.SPEC,
    deepseek.SPEC,
    deepseek_v32.SPEC,
    glm4_moe_lite.SPEC,
    kimi_linear.SPEC,
    granite_moe.SPEC,
    gpt_oss.SPEC,
    olmoe.SPEC,
    llama4.SPEC,
    lfm2.SPEC,
    minimax_m2.SPEC,
    bert.SPEC,
    t5.SPEC,
    bart.SPEC,
    mamba.SPEC,
    hybrid.SPEC,
    falcon_h1.SPEC,
    retro.SPEC,
    biencoder.SPEC,
    vision.SPEC,
    llava.SPEC,
    smolvlm.SPEC,
    internvl.SPEC,
    qwen_vl.SPEC,
    qwen3_vl.SPEC,
    qwen_next_vl.SPEC,
    gemma4_vl.SPEC,
    *heads.SPECS,
)
LOSSES = (bert.LOSS, *heads.LOSSES, biencoder.LOSS)


@hookimpl
def mt_register_models() -> list[ModelSpec]:
    return list(FAMILIES)


@hookimpl
def mt_register_losses() -> list[LossSpec]:
    return list(LOSSES)
