"""DeepEP backend of `flex`: kernels that send tokens over NVLink and RDMA.

Each token is sent once to every rank that has some of its experts. The receiving rank permutes the rows into the
order of experts, and combine sums the partial outputs. A choice that was dropped by capacity is expert -1 and is not
sent. Tokens are bf16 on CUDA devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_moe.dispatchers.interface import Dispatched, ExpertPlacement
from mt_moe.exchange import gather_counts, gather_rows_of, sum_rows_to
from mt_moe.permutation import RowOrder, first_positions, permute_numbers, sort_by_expert
from mt_moe.routing.result import Routing


class _Dispatch(torch.autograd.Function):
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


class _Combine(torch.autograd.Function):
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


@dataclass
class Route:
    """DeepEP's buffer, and its handle of one dispatch, which combine needs."""

    buffer: Any
    handle: Any = None


@dataclass(frozen=True)
class State:
    """shared: tokens that each etp rank received."""

    route: Route
    shared: list[int]


class DeepEPDispatcher:
    def __init__(self, placement: ExpertPlacement, buffer: Any) -> None:
        self.placement, self.buffer = placement, buffer

    def dispatch(self, tokens: Tensor, routing: Routing) -> Dispatched:
        place, route = self.placement, Route(self.buffer)
        chosen = routing.experts if routing.kept is None else routing.experts.masked_fill(~routing.kept, -1)
        received, experts, weights = _Dispatch.apply(tokens, chosen, routing.weights, routing.num_experts, route)
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
        return _Combine.apply(sum_rows_to(expert_output, self.placement.etp, state.shared), state.route)
