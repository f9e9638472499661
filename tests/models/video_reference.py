"""Videos of a batch in mt's form, and as the classes of `transformers` that have tokens of their own for them take
them: an image of one frame and views of a video in one text, a video alone in another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tests.models.qwen_vl_reference import IMAGE, SIDE, VIDEO
from torch import Tensor

LENGTH = 28
Grid = tuple[int, int, int]


def video_texts(rows: Sequence[Sequence[Grid]], videos: Sequence[Sequence[bool]]) -> tuple[Tensor, Tensor]:
    """Tokens [B, LENGTH] with the image token at all cells, and with that of videos at cells of views: each view two
    words behind the one before it."""
    tokens = torch.randint(1, VIDEO, (len(rows), LENGTH), generator=torch.Generator().manual_seed(9))
    theirs = tokens.clone()
    for row, (grids, of_video) in enumerate(zip(rows, videos, strict=True)):
        start = 1
        for (height, width, _), is_view in zip(grids, of_video, strict=True):
            cells = slice(start, start + height * width)
            tokens[row, cells], theirs[row, cells] = IMAGE, VIDEO if is_view else IMAGE
            start = cells.stop + 2
    return tokens, theirs


def video_batch(rows: Sequence[Sequence[Grid]], frames: int) -> tuple[Tensor, Tensor]:
    """images [B, M, 3 frames, SIDE, SIDE], padded by numbers that nothing may read, and image_grids [B, K, 3]."""
    counts = [sum(height * width for height, width, _ in grids) for grids in rows]
    images = torch.full((len(rows), max(counts) + 1, 3 * frames, SIDE, SIDE), 1e9)
    shapes = torch.zeros(len(rows), max(map(len, rows)) + 1, 3, dtype=torch.long)
    for row, grids in enumerate(rows):
        shape = (counts[row], *images.shape[2:])
        images[row, : counts[row]] = torch.randn(shape, generator=torch.Generator().manual_seed(row))
        shapes[row, : len(grids)] = torch.tensor(grids)
    return images, shapes
