"""The recurrence of RWKV-7 by the Triton kernels of flash-linear-attention (package `fla`), where it is installed.

Its kernels compute S <- diag(exp(w)) S + b (a^T S) + k v^T and o = S^T r: with a = -z and b = z times the rates of
removal that is the recurrence of `mt_models.blocks.rwkv7_rule`. States [D, V] are in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mt_models.blocks.fla_delta_rule import document_bounds
from mt_models.blocks.rwkv7_rule import Rwkv7Inputs

Kernel = Callable[..., tuple[Tensor, Tensor]]


def fla_rwkv7_rule(
    inputs: Rwkv7Inputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `recurrent_rwkv7_rule`."""
    from fla.ops.rwkv7 import chunk_rwkv7

    return _sequences(chunk_rwkv7, inputs, state, segment_ids)


def fla_rwkv7_step(
    inputs: Rwkv7Inputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same one position after the other, without gradients."""
    from fla.ops.rwkv7 import fused_recurrent_rwkv7

    return _sequences(fused_recurrent_rwkv7, inputs, state, segment_ids)


def _sequences(
    kernel: Kernel, inputs: Rwkv7Inputs, state: Tensor | None, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Kernels take sequences of unequal lengths in one row: documents are such sequences."""
    if segment_ids is None:
        return _call(kernel, inputs, None if state is None else state.float(), None)
    if state is not None:
        raise ValueError("a state before the first of several documents is not supported by the kernels of fla")
    row = Rwkv7Inputs(*(x.reshape(1, segment_ids.numel(), *x.shape[2:]) for x in inputs))
    o, _ = _call(kernel, row, None, document_bounds(segment_ids))
    return o.view_as(inputs.v), inputs.v.new_zeros(0)


def _call(kernel: Kernel, inputs: Rwkv7Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    # Products take tensors of one dtype; the logarithms of decays are summed in fp32.
    r, k, v, z, b = (
        x.to(inputs.v.dtype).contiguous() for x in (inputs.r, inputs.k, inputs.v, inputs.z, inputs.z * inputs.a)
    )
    return kernel(
        r, inputs.w.float().contiguous(), k, v, -z, b, scale=1.0, initial_state=state,
        output_final_state=bounds is None, cu_seqlens=bounds,
    )  # fmt: skip
