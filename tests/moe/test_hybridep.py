"""`flex` over HybridEP: its calls as the library documents them, answered by a small module over gloo."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.moe.moe_cases import EXPERTS, build_layer, options, tokens_of
from tests.moe.test_ranks import DROPPING, run_layer
from torch import Tensor

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_moe.dispatchers.config import FlexConfig
from mt_moe.dispatchers.flex import HybridEPDispatcher, build_flex
from mt_moe.dispatchers.interface import ExpertPlacement
from mt_moe.layer import build_dispatcher


class HybridEPBuffer:
    """The parameters of deep_ep.HybridEPBuffer. Its handle is the map of every rank."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
    ) -> None:
        assert not use_fp8
        self.group, self.hidden, self.most, self.local = (
            group,
            hidden_dim,
            max_num_of_tokens_per_rank,
            num_local_experts,
        )
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        handle: Any = None,
        pad_multiple: int | None = None,
        num_permuted_tokens: int | None = None,
        non_blocking: bool = False,
    ) -> tuple[Any, ...]:
        assert hidden.shape[1] == self.hidden
        assert len(hidden) <= self.most
        assert num_of_experts_per_rank in (None, self.local)
        assert probs is None or probs.dtype == torch.float32
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, (hidden, routing_map, probs), group=self.group)
        maps = handle if handle is not None else [chosen for _, chosen, _ in everyone]
        places = self._rows(maps, self.rank)
        rows = torch.stack([everyone[rank][0][token] for rank, token, _ in places])
        assert num_permuted_tokens in (None, len(rows))
        own = range(self.rank * self.local, (self.rank + 1) * self.local)
        counts = torch.tensor([sum(e == expert for *_, e in places) for expert in own])
        weights = None
        if probs is not None:
            weights = torch.stack([everyone[rank][2][token, expert] for rank, token, expert in places])
        return rows, weights, None, counts, maps

    def combine_with_unpermute(
        self, *, hidden: Tensor, probs: Tensor | None = None, handle: Any = None, pad_multiple: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, (hidden, probs), group=self.group)
        chosen = handle[self.rank]
        total = hidden.new_zeros(len(chosen), self.hidden)
        weights = None if probs is None else torch.zeros(chosen.shape)
        for holder, (rows, row_weights) in enumerate(everyone):
            for place, (rank, token, expert) in enumerate(self._rows(handle, holder)):
                if rank == self.rank:
                    total[token] += rows[place]
                    if weights is not None:
                        weights[token, expert] += row_weights[place]
        return total, weights

    def _rows(self, maps: list[Tensor], holder: int) -> list[tuple[int, int, int]]:
        """(rank, token, expert) of the rows on `holder`, expert after expert."""
        return [
            (rank, int(token), expert)
            for expert in range(holder * self.local, (holder + 1) * self.local)
            for rank in range(self.world)
            for token in maps[rank][:, expert].nonzero()[:, 0]
        ]


def through_hybridep(rank: int, world: int, sizes: AxisSizes, keys: dict[str, Any]) -> tuple[str, list[float]]:
    library = ModuleType("deep_ep")
    library.HybridEPBuffer = HybridEPBuffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = library
    try:
        ctx, x = build_parallel_context(sizes), tokens_of(2, 8, torch.float32, seed=rank)
        layer, reference = (build_layer(options(**keys), ctx) for _ in range(2))
        chosen = {"moe_flex_dispatcher_backend": "hybridep"}
        config = options(moe_token_dispatcher_type="flex", moe_dispatcher_options=chosen)
        layer.dispatcher = build_dispatcher(config, ctx, load_plugins())
        pairs = zip(run_layer(layer, x), run_layer(reference, x), strict=True)
        differences = [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]
        return type(layer.dispatcher).__name__, differences
    finally:
        del sys.modules["deep_ep"]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "sizes", "keys"),
    [(2, AxisSizes(ep=2), {}), (4, AxisSizes(ep=2, etp=2), {}), (2, AxisSizes(ep=2), DROPPING)],
    ids=["ep", "ep and etp", "capacity"],
)
def test_flex_keeps_to_hybrideps_interface(world, sizes, keys) -> None:
    """Outputs and every gradient are those of alltoall."""
    for name, differences in run_ranks(world, through_hybridep, sizes, keys):
        assert name == HybridEPDispatcher.__name__
        assert max(differences) < 1e-5, differences


MODEL = ("model.family=mixtral", "model.num_layers=2", "model.hidden_size=16", "model.num_attention_heads=2")
FLEX = ("model.moe.num_experts=4", "model.moe.moe_token_dispatcher_type=flex", "train.train_iters=1")
BACKEND = "model.moe.moe_dispatcher_options.moe_flex_dispatcher_backend"


def test_a_missing_library_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    words = r"flex needs HybridEP \(deep_ep.HybridEPBuffer and .*not installed; use alltoall or allgather"
    with pytest.raises(ConfigError, match=words):
        load_config(overrides=[*MODEL, *FLEX, f"{BACKEND}=hybridep"])
    with pytest.raises(ConfigError, match=words):
        build_flex(FlexConfig(moe_flex_dispatcher_backend="hybridep"), ExpertPlacement(EXPERTS))


def test_deepep_alone_is_no_hybridep(monkeypatch) -> None:
    """A build of deep_ep without the second library."""
    library = ModuleType("deep_ep")
    library.__spec__ = sys.__spec__  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "deep_ep", library)
    with pytest.raises(ConfigError, match="flex needs HybridEP"):
        load_config(overrides=[*MODEL, *FLEX, f"{BACKEND}=hybridep"])
    with pytest.raises(ConfigError, match="flex needs HybridEP .* cannot import name 'HybridEPBuffer'"):
        build_flex(FlexConfig(moe_flex_dispatcher_backend="hybridep"), ExpertPlacement(EXPERTS))


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ((f"{BACKEND}=nccl",), "moe_flex_dispatcher_backend.*deepep.*hybridep"),
        (
            ("model.moe.moe_dispatcher_options.max_tokens_per_rank=64",),
            "max_tokens_per_rank would be ignored: .*moe_flex_dispatcher_backend is hybridep, and that is deepep",
        ),
        (
            (f"{BACKEND}=hybridep", "model.moe.moe_dispatcher_options.num_nvl_bytes=64"),
            "num_nvl_bytes would be ignored",
        ),
        (
            ("model.moe.moe_expert_capacity_factor=1.5", "model.moe.moe_pad_expert_input_to_capacity=true"),
            "flex sends tokens and no padding, .*set it to false, or use alltoall or allgather",
        ),
    ],
)
def test_wrong_options_are_refused(monkeypatch, further, words) -> None:
    for name in ("deep_ep", "hybrid_ep_cpp"):
        library = ModuleType(name)
        library.__spec__ = sys.__spec__  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, name, library)
    with pytest.raises(ConfigError, match=words):
        load_config(overrides=[*MODEL, *FLEX, *further])
