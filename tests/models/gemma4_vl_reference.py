"""A small Gemma 4 of `transformers` with pictures and random weights, and texts with images in the forms of both."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.qwen_vl_reference import GRIDS, IMAGE, LENGTH, SIDE, VOCAB, image_batch, texts_with_images
from torch import Tensor

VISION = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 20, "patch_size": 3, "pooling_kernel_size": 2, "position_embedding_size": 12,
    "rms_norm_eps": 1e-3,
}  # fmt: skip
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "global_head_dim": 12, "intermediate_size": 28, "max_position_embeddings": 128, "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "rms_norm_eps": 1e-3, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 30.0, "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "eos_token_id")),
}  # fmt: skip
SMALL = {"hidden_size_per_layer_input": 6, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
LARGE = {
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision",
    "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "per-layer embeddings, bounds": (SMALL, {"use_clipped_linears": True}),
    "images that see themselves, experts": (LARGE, {"standardize": True}),
}


def make_reference(case: str) -> Any:
    import transformers

    text, vision = CASES[case]
    config = transformers.Gemma4Config(
        vision_config=transformers.Gemma4VisionConfig(**VISION, **vision),
        text_config=transformers.Gemma4TextConfig(**{**TEXT, **text}),
        audio_config=None,
        image_token_id=IMAGE,
        **dict.fromkeys(("video_token_id", "audio_token_id"), 10_000),
    )
    config._attn_implementation = config._experts_implementation = "eager"
    return transformers.Gemma4ForConditionalGeneration(config).float().eval()


def randomize_buffers(reference: Any) -> None:
    """Bounds that cut, and statistics of channels."""
    generator = torch.Generator().manual_seed(3)
    for name, buffer in reference.named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.fill_((-1.0 if name.endswith("_min") else 1.0) * (0.5 + torch.rand((), generator=generator)))
        elif "std_" in name:
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator) + (1.0 if "scale" in name else 0.0))


def as_reference_inputs(tokens: Tensor, images: Tensor, grids: Tensor) -> dict[str, Tensor]:
    """What `transformers` takes: the patches of each image row by row, colours side by side, padded to the most."""
    texts = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    patches, positions = [], []
    for row, own in zip(images, grids.tolist(), strict=True):
        first = 0
        for rows, columns in (grid for grid in own if grid[0]):
            cells = row[first : first + rows * columns].unflatten(0, (rows, columns))
            first += rows * columns
            # [rows, columns, C, side, side] -> [C, rows side, columns side], colours back from (x - 0.5) / 0.5
            whole = cells.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2) * 0.5 + 0.5
            found = whole.unfold(1, 3, 3).unfold(2, 3, 3)  # [C, rows m, columns m, p, p]
            patches.append(found.permute(1, 2, 3, 4, 0).flatten(2).flatten(0, 1))
            y, x = torch.meshgrid(torch.arange(rows * 2), torch.arange(columns * 2), indexing="ij")
            positions.append(torch.stack([x, y], -1).flatten(0, 1))
    if not patches:
        return {**texts, "mm_token_type_ids": torch.zeros_like(tokens)}
    most = max(map(len, patches))
    return {
        **texts,
        "pixel_values": torch.stack([_padded(x, most, 0) for x in patches]),
        "image_position_ids": torch.stack([_padded(x, most, -1) for x in positions]),
        "mm_token_type_ids": (tokens == IMAGE).int(),
    }


def _padded(x: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, length - len(x)), value=value)


__all__ = ["GRIDS", "IMAGE", "LENGTH", "SIDE", "image_batch", "texts_with_images"]
