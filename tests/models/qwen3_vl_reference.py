"""A small Qwen3-VL of `transformers` with random weights, dense or with experts."""

from __future__ import annotations

from typing import Any

from tests.models.qwen_vl_reference import IMAGE, VIDEO, VOCAB

VISION = {
    "depth": 4, "hidden_size": 24, "num_heads": 2, "intermediate_size": 20, "patch_size": 3, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 36, "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
"""Cells of 6 pixels."""
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 10, "intermediate_size": 28, "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 1]},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 14}


def make_reference(*, sparse: bool = False, tied: bool = False, **text: Any) -> Any:
    import transformers

    kind = "Moe" if sparse else ""
    config = getattr(transformers, f"Qwen3VL{kind}Config")(
        vision_config=VISION,
        text_config={**TEXT, **(EXPERTS if sparse else {}), **text},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=tied,
    )
    config._attn_implementation = config._experts_implementation = "eager"
    return getattr(transformers, f"Qwen3VL{kind}ForConditionalGeneration")(config).float().eval()
