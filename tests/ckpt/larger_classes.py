"""Decoders within classes of `transformers` that have towers too, read for their text; further names of such classes,
and further inputs.

Their folders have no tensors of towers: with them, another family reads several of the types.
"""

from __future__ import annotations

from dataclasses import replace

from tests.ckpt.family_cases import CASES, IMAGE, TOWER, Case

SMALL_TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 12, "patch_size": 2}
SMALL_TOWER |= {"out_hidden_size": 32}
VISION_START, AUDIO_START = 90, 95
"""Tokens before an image and before a sound."""
BESIDE_TEXT = ("vision_config", "audio_config")
"""Parts of a configuration that text has nothing from."""


def text_of(name: str, family: str) -> Case:
    """A case with images, without them."""
    return replace(CASES[name], family=family, inputs="tokens")


def around(name: str, stem: str, parts: dict[str, tuple[str, dict[str, object]]], **keys: object) -> Case:
    """A case of a decoder, within the class of `stem` that has towers."""
    decoder = CASES[name]
    parts = {"text_config": (decoder.config, decoder.keys), **parts}
    return Case(decoder.family, f"{stem}ForConditionalGeneration", f"{stem}Config", dict(keys), parts=parts)


def _qwen4_exp() -> Case:
    tower = {**SMALL_TOWER, "num_position_embeddings": 25}
    return around("qwen4_exp_text", "Qwen4Exp", {"vision_config": ("Qwen4ExpVisionConfig", tower)})


def _glm5_next() -> Case:
    tower = {**SMALL_TOWER, "image_size": 8, "projection_intermediate_size": 12}
    return around("glm5_next", "Glm5Next", {"vision_config": ("Glm5NextVisionConfig", tower)})


def _gemma4_unified() -> Case:
    known = around("gemma4_unified_text", "Gemma4Unified", {})
    kind, keys = known.parts["text_config"]
    return replace(known, parts={"text_config": (kind, {**keys, "pad_token_id": 0})})


def _inkling() -> Case:
    tower = {"patch_size": 40, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    sounds = {"n_mel_bins": 8, "mel_vocab_size": 4}
    parts = {"vision_config": ("InklingVisionConfig", tower), "audio_config": ("InklingAudioConfig", sounds)}
    return around("inkling_text", "Inkling", parts)


def _smolvlm() -> Case:
    known = CASES["smolvlm"]
    parts = {**known.parts, "vision_config": ("SmolVLMVisionConfig", TOWER)}
    keys = {"image_token_id": IMAGE, "scale_factor": 3}
    return replace(known, model="SmolVLMForConditionalGeneration", config="SmolVLMConfig", keys=keys, parts=parts)


def _qwen3_omni() -> Case:
    """With images beside the sounds, since what the vision transformer has is in no text without them."""
    known = CASES["qwen3_omni_moe_thinker"]
    keys = {"vision_start_token_id": VISION_START, "vision_end_token_id": 1, "audio_start_token_id": AUDIO_START}
    return replace(known, keys={**known.keys, **keys}, inputs="text_with_sound_and_patches")


LARGER_CLASSES: dict[str, Case] = {
    "qwen3_5 without its tower": text_of("qwen3_5", "qwen_next"),
    "qwen3_5_moe without its tower": text_of("qwen3_5_moe", "qwen_next"),
    "minimax_m3_vl without its tower": text_of("minimax_m3_vl", "minimax_m3"),
    "gemma4 without its tower": text_of("gemma4 with pictures", "gemma4"),
    "gemma4_unified without towers": _gemma4_unified(),
    "kimi_k25 without its tower": text_of("kimi_k25", "deepseek"),
    "qwen4_exp without its tower": _qwen4_exp(),
    "glm5_next without its tower": _glm5_next(),
    "inkling_mm_model without towers": _inkling(),
}
SWEEP_CASES: dict[str, Case] = {
    **CASES,
    **LARGER_CLASSES,
    "smolvlm, its newer name": _smolvlm(),
    "qwen3_omni_moe_thinker": _qwen3_omni(),
}
