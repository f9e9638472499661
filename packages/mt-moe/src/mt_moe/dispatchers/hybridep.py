"""HybridEP backend of `flex`: its kernels send tokens, and permute them into the order of experts on arrival.

The calls are deep_ep.HybridEPBuffer's `dispatch_with_permute` and `combine_with_unpermute`. A routing map [T, E]
marks the experts of each token, a tensor of the same shape has their weights. Tokens are bf16 on CUDA devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_moe.dispatchers.interface import Dispatched, ExpertPlacement
from mt_moe.exchange import gather_counts, gather_rows_of, sum_rows_to
from mt_moe.permutation import RowOrder, permute_numbers, sort_by
from mt_moe.routing.result import Routing


@dataclass
class Route:
    """The buffer, and its handle of one dispatch, which combine needs."""

    buffer: Any
    handle: Any = None


class _Dispatch(torch.autograd.Function):
    """Tokens [T, H], routing map and weights [T, E] -> rows [R, H] in the order of this rank's experts, their weights
    [R], and the number of rows of each expert."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, routing_map: Tensor, weights: Tensor, num_local: int, route: Route
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, row_weights, _, counts, route.handle = route.buffer.dispatch_with_permute(
            hidden=tokens.contiguous(),
            routing_map=routing_map,
            probs=weights,
            scaling_factor=None,
            num_of_experts_per_rank=num_local,
        )
        counts = counts.to(device=tokens.device, dtype=torch.int64)
        ctx.route = route
        ctx.mark_non_differentiable(counts)
        return rows, row_weights, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        route: Route = ctx.route
        dtokens, dweights = route.buffer.combine_with_unpermute(
            hidden=grads[0].contiguous(), probs=grads[1].contiguous(), handle=route.handle
        )
        return dtokens, None, dweights, None, None


class _Combine(torch.autograd.Function):
    """Rows [R, H] as they arrived -> for each of the source rank's tokens [T, H] the sum of its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route, ctx.rows = route, len(rows)
        combined, _ = route.buffer.combine_with_unpermute(hidden=rows.contiguous(), handle=route.handle)
        return combined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        route: Route = ctx.route
        rows, *_ = route.buffer.dispatch_with_permute(
            hidden=grads[0].contiguous(), scaling_factor=None, handle=route.handle, num_permuted_tokens=ctx.rows
        )
        return rows, None


@dataclass(frozen=True)
class State:
    """shared: rows that each etp rank received."""

    route: Route
    shared: list[int]


class HybridEPDispatcher:
    """make_buffer: deep_ep.HybridEPBuffer. The buffer is created at the first dispatch, when the sizes are known."""

    def __init__(self, placement: ExpertPlacement, make_buffer: Callable[..., Any], max_tokens: int | None) -> None:
        self.placement, self._make_buffer, self._max_tokens = placement, make_buffer, max_tokens
        self._buffer: Any = None

    def dispatch(self, tokens: Tensor, routing: Routing) -> Dispatched:
        place, route = self.placement, Route(self._buffer_for(tokens))
        kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
        zeros = torch.zeros(len(tokens), routing.num_experts, device=tokens.device)
        # [T, E] bool; False where a choice was dropped.
        chosen = zeros.bool().scatter(1, routing.experts, kept)
        # [T, E]; differentiable through scatter.
        weights = zeros.scatter(1, routing.experts, routing.weights.float().masked_fill(~kept, 0.0))
        rows, row_weights, counts = _Dispatch.apply(tokens, chosen, weights, place.num_local, route)
        # [etp, experts of this rank]
        by_rank = gather_counts(counts, place.etp)
        if place.etp.size == 1:
            return Dispatched(rows, row_weights, counts, State(route, [len(rows)]))
        # Ranks that share the experts' matrices (etp) all-gather what each received.
        shared = by_rank.sum(1).tolist()
        rows, row_weights = (gather_rows_of(x, place.etp, shared) for x in (rows, row_weights))
        experts = torch.arange(place.num_local, device=tokens.device).repeat(place.etp.size)
        by_local = sort_by(experts.repeat_interleave(by_rank.flatten(), output_size=sum(shared)), place.kernels)
        weights_by_local = permute_numbers(row_weights, by_local)
        return Dispatched(rows, weights_by_local, by_rank.sum(0), State(route, shared), RowOrder(by_local))

    def combine(self, expert_output: Tensor, state: State) -> Tensor:
        return _Combine.apply(sum_rows_to(expert_output, self.placement.etp, state.shared), state.route)

    def _buffer_for(self, tokens: Tensor) -> Any:
        if self._buffer is None:
            place = self.placement
            # All ranks of the group have to make buffers of one size.
            sizes = gather_counts(torch.tensor([len(tokens)], device=tokens.device), place.ep)
            self._buffer = self._make_buffer(
                group=place.ep.group,
                hidden_dim=tokens.shape[1],
                max_num_of_tokens_per_rank=self._max_tokens or max(int(sizes.max()), 1),
                num_local_experts=place.num_local,
                use_fp8=False,
            )
        return self._buffer
