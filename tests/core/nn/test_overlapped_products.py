"""Tensor-parallel products in parts, with torch's operators as it computes them without symmetric memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core import _torch_compat
from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn import linear
from mt_core.nn.embedding import VocabParallelOutput
from mt_core.nn.layout import initialize, normal
from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train.build import build_context, require_peer_access


def written_out(counts: dict[str, int]) -> None:
    """The operators in parts are CUDA's alone; these are torch's own definitions of them."""
    import torch.distributed._symmetric_memory as symmetric_memory

    def gather_matmul(x: Tensor, matrix: Tensor, dim: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        counts["gathers"] += 1
        whole, (out,) = symmetric_memory._fused_all_gather_matmul_fallback(x, [matrix], dim, group.group_name)
        return whole, out

    def matmul_reduce_scatter(x: Tensor, matrix: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        counts["scatters"] += 1
        return symmetric_memory._fused_matmul_reduce_scatter_fallback(x, matrix, "sum", dim, group.group_name)

    linear.gather_matmul, _torch_compat.matmul_reduce_scatter = gather_matmul, matmul_reduce_scatter


def differences(rank: int, world: int) -> tuple[dict[str, int], list[float]]:
    counts = {"gathers": 0, "scatters": 0}
    written_out(counts)
    found = []
    for overlap in (False, True):
        ctx = build_parallel_context(
            AxisSizes(tp=world), params_dtype=torch.float64, sequence_parallel=True, tp_comm_overlap=overlap
        )
        block = nn.Sequential(
            linear.ColumnParallelLinear(6, 8, ctx, bias=True, init=normal(0.5)),
            nn.GELU(),
            linear.RowParallelLinear(8, 6, ctx, bias=True, init=normal(0.5)),
            VocabParallelOutput(13, 6, ctx, init=normal(0.5), divisible_by=4),
        )
        initialize(block, 3, ctx)
        x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        out = block(x)
        found.append([out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *block.parameters()])])
    return counts, [(a - b).abs().max().item() for a, b in zip(*found, strict=True)]


@pytest.mark.dist
def test_overlapped_products_are_the_plain_ones() -> None:
    """Gathers: of the inputs of the first layer and the LM head, and of the second layer's gradient. The second rank
    has 5 ids and 3 rows of padding, and multiplies all as the first does."""
    for counts, found in run_ranks(2, differences):
        assert counts == {"gathers": 3, "scatters": 1}
        assert len(found) == 7
        assert max(found) < 1e-12


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], r"tp_comm_overlap=true cannot be: symmetric memory is that of GPUs, and this run is on cpu"),
        (["parallel.sequence_parallel=false"], r"tp_comm_overlap .*would be ignored.*sequence_parallel"),
    ],
)
def test_where_products_cannot_be_overlapped(more: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=words):
        _context(more)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((4, 5), None),
        ((3, 4), r"ranks 3, 4 are on 2 hosts, .*; set it to false"),
        ((5, 6), r"GPU 1 has no peer access to the memory of GPU 2"),
    ],
)
def test_ranks_that_do_not_share_memory_are_refused(ranks, words, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of four GPUs, in pairs that have access to each other."""
    variables = {
        "WORLD_SIZE": 8,
        "RANK": 4,
        "LOCAL_WORLD_SIZE": 4,
        "LOCAL_RANK": 0,
        "MASTER_PORT": 1,
        "MASTER_ADDR": "localhost",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one // 2 == other // 2)
    with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        require_peer_access(ranks)


def _context(more: list[str]) -> Any:
    keys = ("tp_comm_overlap=true", "sequence_parallel=true", "tensor_model_parallel_size=2")
    overrides = [*(f"parallel.{key}" for key in keys), *more]
    config = load_config(preset="gpt-tiny", overrides=overrides, host=load_plugins()).config
    return build_context(config, torch.device("cpu"))
