"""On a GPU: attention over chosen blocks by tiles, forward and backward, against masks of all keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from mt_core.nn.attention import AttentionPattern, sdpa_attention
from mt_models.blocks.block_sparse_attention import narrowed
from mt_models.blocks.block_sparse_flex import BlockSparseFlex
from mt_models.blocks.key_blocks import Selection, choose_blocks, key_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PUBLISHED = Selection(size=128, topk=16, local=1)


def inputs(length: int, heads: int, groups: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((heads, size), (groups, size), (groups, size), (groups, size))
    return tuple(torch.randn(1, length, *shape, device="cuda", generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_tiles_compute_what_masks_do(packed: bool, dtype: torch.dtype, rtol: float) -> None:
    length, selection = 1000, Selection(size=64, topk=4, local=1)
    *given, index = inputs(length, 8, 2, 64, dtype)
    segments = torch.arange(length, device="cuda")[None] // 650 if packed else None
    blocks = key_blocks(length, selection.size, segments, index.device)
    positions = torch.arange(length, device="cuda")[None]
    chosen = choose_blocks(index, index[:, :, 0], positions, blocks, selection)
    pattern = narrowed(AttentionPattern(segment_ids=segments), blocks, chosen, heads=8)
    found = []
    for core in (BlockSparseFlex(torch.compile(flex_attention), sdpa_attention), sdpa_attention):
        leaves = [x.clone().requires_grad_() for x in given]
        out = core(*leaves, pattern, 0.0)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=rtol * theirs.abs().max().item(), rtol=rtol)


def test_no_tensor_of_all_scores_is_made() -> None:
    """32,768 positions: the scores of one head alone are 2 GiB in bf16."""
    length = 32768
    q, k, v, index = inputs(length, 16, 4, 128, torch.bfloat16)
    positions = torch.arange(length, device="cuda")[None]
    blocks = key_blocks(length, PUBLISHED.size, None, q.device)
    chosen = choose_blocks(index, index[:, :, 0], positions, blocks, PUBLISHED)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    pattern = narrowed(AttentionPattern(), blocks, chosen, heads=16)
    flex = BlockSparseFlex(torch.compile(flex_attention), sdpa_attention)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flex(*leaves, pattern, 0.0).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * 2**30
