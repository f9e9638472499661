"""Multimodal rotary positions: three numbers for each position of a text with images, in time, height and width."""

from __future__ import annotations

import torch
from torch import Tensor


def multimodal_positions(places: Tensor, grids: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Positions [3, B, S] in time, height and width (Qwen2-VL, Wang et al., 2024, section 2.1).

    places: [B, S] bool, where tokens of images are. grids: int64 [B, K, 2], rows and columns of merged patches of the
    images, in the order of their tokens; rows of zeros are padding. position_ids: [B, S] of a text, which start at 0
    with each segment; default 0, 1, ....

    A word has one number three times. An image that begins behind position p has p + 1 as its time, p + 1 + row and
    p + 1 + column; the word behind it has the largest of them plus one. Tokens of images that no grid has left are
    words. No value is read by the host.
    """
    if position_ids is None:
        position_ids = torch.arange(places.shape[1], device=places.device).expand_as(places)
    # Example: 2 words, an image of 2 x 2 cells, 1 word.
    #   index    0  1  2  3  4  5  6
    #   time     0  1  2  2  2  2  4
    #   height   0  1  2  2  3  3  4
    #   width    0  1  2  3  2  3  4
    # The image's 4 tokens take max(2, 2) = 2 numbers, so the word behind it has 6 - (4 - 2) = 4.
    rows, columns = grids.to(places.device).unbind(-1)  # [B, K]
    sizes = rows * columns
    ends = sizes.cumsum(1)
    # Image tokens that a model has generated have no grid, and are words.
    places = places & (places.cumsum(1) <= ends[:, -1:])
    before = places.cumsum(1) - places.long()  # tokens of images before each position, [B, S]
    image = torch.searchsorted(ends, before, right=True)  # images that have ended, which is the number of the current
    # At a token of an image: what a word there would have, by the images before this one.
    words = position_ids - _skipped(image, sizes - torch.maximum(rows, columns), position_ids)
    # Behind the last image `image` is K, one too many to gather with; there the words are chosen below.
    image = image.clamp(max=ends.shape[1] - 1)
    within = before - (ends - sizes).gather(1, image)
    # 1 for padding, whose grid has 0 columns, by which nothing may be divided.
    width = columns.gather(1, image).clamp(min=1)
    offsets = torch.stack([torch.zeros_like(within), within // width, within % width])
    return torch.where(places, words - within + offsets, words)


def _skipped(ended: Tensor, saved: Tensor, position_ids: Tensor) -> Tensor:
    """[B, S]: by how much positions are smaller than in a text without images, in the same segment.

    ended: [B, S], images that have ended before. saved: [B, K], what each image takes less than its tokens.
    """
    # [B, K + 1], by number of ended images, -> [B, S]
    total = torch.nn.functional.pad(saved.cumsum(1), (1, 0)).gather(1, ended)
    # The index at which a position's segment begins: images of earlier segments do not count.
    first = torch.arange(ended.shape[1], device=ended.device) - position_ids
    return total - total.gather(1, first)
