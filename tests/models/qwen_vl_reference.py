"""A small Qwen2.5-VL of `transformers` with random weights, and texts with images in the forms of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IMAGE, VIDEO, VOCAB = 100, 99, 101
VISION = {
    "depth": 3, "hidden_size": 24, "num_heads": 2, "intermediate_size": 20, "patch_size": 3, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "window_size": 13, "fullatt_block_indexes": [1], "out_hidden_size": 32,
    "initializer_range": 0.02,
}  # fmt: skip
"""Cells of 6 pixels, windows of 2 x 2 cells."""
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 28, "rms_norm_eps": 1e-6, "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
}  # fmt: skip
SIDE = 6
GRIDS = [[(3, 5)], [(2, 2), (1, 3)], []]
"""Rows and columns of cells of the images of three texts."""
LENGTH = 24


def make_reference(**text: Any) -> Any:
    import transformers

    tied = text.pop("tie_word_embeddings", False)
    config = transformers.Qwen2_5_VLConfig(
        vision_config=VISION,
        text_config={**TEXT, "bos_token_id": None, "eos_token_id": None, **text},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=tied,
    )
    config._attn_implementation = "eager"
    return transformers.Qwen2_5_VLForConditionalGeneration(config).float().eval()


def texts_with_images() -> Tensor:
    """[3, LENGTH]: an image in the middle, two with a word between them, none."""
    tokens = torch.randint(1, VIDEO, (3, LENGTH), generator=torch.Generator().manual_seed(5))
    tokens[0, 4 : 4 + 15] = IMAGE
    tokens[1, 1 : 1 + 4] = IMAGE
    tokens[1, 6 : 6 + 3] = IMAGE
    return tokens


def cells_of(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows * columns, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def image_batch(grids: list[list[tuple[int, int]]] = GRIDS) -> tuple[Tensor, Tensor]:
    """images [B, M, 3, SIDE, SIDE] and image_grids [B, K, 2], padded by numbers that nothing may read, and by zeros."""
    images = torch.full((len(grids), 15, 3, SIDE, SIDE), 1e9)
    shapes = torch.zeros(len(grids), 3, 2, dtype=torch.long)
    for row, own in enumerate(grids):
        cells = [cells_of(*grid, 10 * row + number) for number, grid in enumerate(own)]
        if cells:
            images[row, : sum(map(len, cells))] = torch.cat(cells)
            shapes[row, : len(own)] = torch.tensor(own)
    return images, shapes


def as_reference_inputs(tokens: Tensor, images: Tensor, grids: Tensor) -> dict[str, Tensor]:
    """What `transformers` takes: patches of two equal frames, in the order of its processor."""
    texts = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if not grids.any():
        return texts
    counts = grids.prod(-1).sum(1)
    cells = torch.cat([row[:count] for row, count in zip(images, counts.tolist(), strict=True)])
    # [V, C, m, p, m, p] -> [V, m, m, C, p, p], each frame twice
    patches = cells.reshape(-1, 3, 2, 3, 2, 3).permute(0, 2, 4, 1, 3, 5)
    flat = patches[:, :, :, :, None].expand(-1, -1, -1, -1, 2, -1, -1).reshape(len(cells) * 4, -1)
    real = grids[grids.any(-1)]
    thw = torch.cat([torch.ones_like(real[:, :1]), 2 * real], dim=1)
    return {
        **texts,
        "pixel_values": flat,
        "image_grid_thw": thw,
        "mm_token_type_ids": (tokens == IMAGE).int(),
    }
