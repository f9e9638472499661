"""Delta rules by the Triton kernels of flash-linear-attention (package `fla`), where it is installed.

Its kernels take the logarithm of the decay, divide queries and keys by their lengths (`use_qk_l2norm_in_kernel`, with
1e-6 added to the sum of squares), multiply scores by 1 / sqrt(D), and have states [D, V] in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from mt_models.blocks.gated_delta_rule import DeltaInputs

Kernel = Callable[..., tuple[Tensor, Tensor]]


def can_run_fla(module: str = "fla") -> bool:
    """Whether the package is installed with this module, and there is a GPU for its kernels."""
    # The package first: looking for a module imports what it is in.
    return torch.cuda.is_available() and find_spec("fla") is not None and find_spec(module) is not None


def fla_delta_rule(
    inputs: DeltaInputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `recurrent_delta_rule`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return _sequences(chunk_gated_delta_rule, inputs, state, segment_ids)


def fla_delta_step(
    inputs: DeltaInputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same one position after the other, without gradients."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return _sequences(fused_recurrent_gated_delta_rule, inputs, state, segment_ids)


def fla_kimi_rule(
    inputs: DeltaInputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `recurrent_kimi_rule`."""
    from fla.ops.kda import chunk_kda

    return _sequences(chunk_kda, inputs, state, segment_ids)


def fla_kimi_step(
    inputs: DeltaInputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same one position after the other, without gradients."""
    from fla.ops.kda import fused_recurrent_kda

    return _sequences(fused_recurrent_kda, inputs, state, segment_ids)


def _sequences(
    kernel: Kernel, inputs: DeltaInputs, state: Tensor | None, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Kernels take sequences of unequal lengths in one row: documents are such sequences."""
    if segment_ids is None:
        return _call(kernel, inputs, None if state is None else state.float(), None)
    if state is not None:
        raise ValueError("a state before the first of several documents is not supported by the kernels of fla")
    batch, length = segment_ids.shape
    row = DeltaInputs(*(x.reshape(1, batch * length, *x.shape[2:]) for x in inputs))
    o, _ = _call(kernel, row, None, document_bounds(segment_ids))
    return o.view_as(inputs.v), inputs.v.new_zeros(0)


def _call(kernel: Kernel, inputs: DeltaInputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    # Contiguous: some of its kernels take the strides of a tensor for granted.
    q, k, v, g, beta = (x.contiguous() for x in inputs)
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
