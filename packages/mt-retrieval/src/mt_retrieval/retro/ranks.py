"""The ranks of the world as writers of blocks."""

from __future__ import annotations

import torch.distributed as dist

from mt_retrieval.retro.blocks import Share


def share_of_world() -> Share:
    """Where each process computes on its own."""
    return Share(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Share()
