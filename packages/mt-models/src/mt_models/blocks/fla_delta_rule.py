"""The gated delta rule by the Triton kernels of flash-linear-attention (package `fla`), where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from mt_models.blocks.gated_delta_rule import DeltaInputs


def can_run_fla() -> bool:
    """Whether the package is installed and there is a GPU for its kernels."""
    return find_spec("fla") is not None and torch.cuda.is_available()


def fla_delta_rule(
    inputs: DeltaInputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `recurrent_delta_rule`. Kernels take sequences of unequal lengths in one row: documents are such
    sequences."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta = inputs
    if segment_ids is None:
        o, last = _call(chunk_gated_delta_rule, q, k, v, g, beta, state, None)
        return o, last
    if state is not None:
        raise ValueError("a state before the first of several documents is not supported by the kernels of fla")
    batch, length = segment_ids.shape
    q, k, v_row, g, beta = (x.reshape(1, batch * length, *x.shape[2:]) for x in (q, k, v, g, beta))
    o, _ = _call(chunk_gated_delta_rule, q, k, v_row, g, beta, None, document_bounds(segment_ids))
    return o.view_as(v), v.new_zeros(0)


def _call(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    bounds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return kernel(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=bounds is None, use_qk_l2norm_in_kernel=True,
        cu_seqlens=bounds,
    )  # fmt: skip


def document_bounds(segment_ids: Tensor) -> Tensor:
    """[B, S] -> [documents + 1] int32: where each document begins in the sequences laid end to end, and the end of
    all."""
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.cat((starts, starts.new_tensor([segment_ids.numel()]))).to(torch.int32)
