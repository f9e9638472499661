"""Fewer and wider positions: neighbouring patches side by side in one vector."""

from __future__ import annotations

from torch import Tensor


def pixel_shuffle(x: Tensor, grid: tuple[int, int], factor: int) -> Tensor:
    """[N, P, W] -> [N, P / factor^2, factor^2 W]: squares of factor by factor patches, row by row within each.

    grid: rows and columns of the P patches, which factor divides. The order of InternVL (Chen et al., *How Far Are We
    to GPT-4V?*, 2024) and Idefics3; torch's pixel_unshuffle has the width W in front of the square.
    """
    rows, columns = grid
    # [N, rows / f, f, columns / f, f, W] -> [N, rows / f, columns / f, f, f, W]
    squares = x.unflatten(1, (rows // factor, factor, columns // factor, factor))
    return squares.transpose(2, 3).flatten(3).flatten(1, 2)
