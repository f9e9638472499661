"""`flex`: a library's kernels send tokens over NVLink and RDMA: DeepEP or HybridEP, if installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_moe.dispatchers.config import FlexConfig, not_installed
from mt_moe.dispatchers.exchange import gather_counts, gather_rows_of, sum_rows_to
from mt_moe.dispatchers.interface import Dispatched, Dispatcher, ExpertPlacement
from mt_moe.permutation import Routing, RowOrder, first_positions, permute_numbers, sort_by, sort_by_expert

# -- HybridEP: sends tokens, and permutes them into the order of experts on arrival ------------------
#
# The calls are deep_ep.HybridEPBuffer's `dispatch_with_permute` and `combine_with_unpermute`. A routing map [T, E]
# marks the experts of each token, a tensor of the same shape has their weights. Tokens are bf16 on CUDA devices.


class _HybridEPDispatch(torch.autograd.Function):
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


class _HybridEPCombine(torch.autograd.Function):
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
        rows, row_weights, counts = _HybridEPDispatch.apply(tokens, chosen, weights, place.num_local, route)
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
        return _HybridEPCombine.apply(sum_rows_to(expert_output, self.placement.etp, state.shared), state.route)

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


@dataclass
class Route:
    """The library's buffer, and its handle of one dispatch, which combine needs."""

    buffer: Any
    handle: Any = None


@dataclass(frozen=True)
class State:
    """shared: tokens (DeepEP) or rows (HybridEP) that each etp rank received."""

    route: Route
    shared: list[int]


# -- DeepEP ------------------------------------------------------------------------------------------
#
# Each token is sent once to every rank that has some of its experts. The receiving rank permutes the rows into the
# order of experts, and combine sums the partial outputs. A choice that was dropped by capacity is expert -1 and is not
# sent. Tokens are bf16 on CUDA devices.


class _DeepEPDispatch(torch.autograd.Function):
    """Tokens [T, H], experts (-1: none) and weights [T, k] -> the same for the tokens that have an expert here."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, experts: Tensor, weights: Tensor, num_experts: int, route: Route
    ) -> tuple[Tensor, Tensor, Tensor]:
        buffer = route.buffer
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(experts, num_experts)
        received, local_experts, local_weights, _, handle, _ = buffer.dispatch(
            tokens.contiguous(),
            topk_idx=experts,
            # DeepEP takes int64 expert numbers and fp32 weights.
            topk_weights=weights.float(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        route.handle = handle
        ctx.route, ctx.weights_dtype = route, weights.dtype
        # Of the received tokens: [tokens, k], numbered from 0 on this rank, -1 where the expert is elsewhere.
        ctx.mark_non_differentiable(local_experts)
        return received, local_experts, local_weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        tokens, _, weights = grads
        route: Route = ctx.route
        # The gradient of a token is the sum over the ranks that received it, which is what combine computes.
        dtokens, dweights, _ = route.buffer.combine(
            tokens.contiguous(), route.handle, topk_weights=weights.float().contiguous()
        )
        return dtokens, None, dweights.to(ctx.weights_dtype), None, None


class _DeepEPCombine(torch.autograd.Function):
    """Partial sums of the received tokens -> for each of the source rank's tokens the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, route: Route) -> Tensor:
        ctx.route = route
        combined, _, _ = route.buffer.combine(partial.contiguous(), route.handle)
        return combined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        route: Route = ctx.route
        # The same route as in forward: with a handle the layout is not exchanged again.
        received, *_ = route.buffer.dispatch(grads[0].contiguous(), handle=route.handle)
        return received, None


class DeepEPDispatcher:
    def __init__(self, placement: ExpertPlacement, buffer: Any) -> None:
        self.placement, self.buffer = placement, buffer

    def dispatch(self, tokens: Tensor, routing: Routing) -> Dispatched:
        place, route = self.placement, Route(self.buffer)
        chosen = routing.experts if routing.kept is None else routing.experts.masked_fill(~routing.kept, -1)
        received, experts, weights = _DeepEPDispatch.apply(tokens, chosen, routing.weights, routing.num_experts, route)
        # Ranks that share the experts' matrices (etp) all-gather what each received.
        shared = gather_counts(torch.tensor([len(received)], device=received.device), place.etp).flatten().tolist()
        received, experts, weights = (gather_rows_of(x, place.etp, shared) for x in (received, experts, weights))
        # -1 would be out of range; `kept` drops these choices.
        local = Routing(experts.clamp(min=0), weights, place.num_local, kept=experts >= 0)
        by_expert, counts = sort_by_expert(local, place.kernels)
        # A host wait, as in DeepEP's own dispatch, whose results have sizes that depend on the routing.
        by_expert = first_positions(by_expert, int(counts.sum()))
        order = RowOrder(by_expert, routing.topk)
        return Dispatched(received, permute_numbers(weights, by_expert), counts, State(route, shared), order)

    def combine(self, expert_output: Tensor, state: State) -> Tensor:
        return _DeepEPCombine.apply(sum_rows_to(expert_output, self.placement.etp, state.shared), state.route)


def build_flex(config: FlexConfig, placement: ExpertPlacement) -> Dispatcher:
    """Raises ConfigError without the library, or if the expert-parallel group has one rank only."""
    backend, group = config.moe_flex_dispatcher_backend, placement.ep.group
    try:
        if backend == "deepep":
            from deep_ep import Buffer
        else:
            from deep_ep import HybridEPBuffer
    except ImportError as error:
        raise ConfigError(f"{not_installed(backend)}: {error}") from error
    if group is None:
        raise ConfigError(
            "model.moe.moe_token_dispatcher_type=flex sends between ranks, and "
            "parallel.expert_model_parallel_size is 1; use alltoall or allgather"
        )
    if backend == "deepep":
        return DeepEPDispatcher(placement, Buffer(group, config.num_nvl_bytes, config.num_rdma_bytes))
    return HybridEPDispatcher(placement, HybridEPBuffer, config.max_tokens_per_rank)
