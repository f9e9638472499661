"""torch's scaled_dot_product_attention with cuDNN preferred, and cuDNN's variable-length kernel for packed documents.

On Hopper cuDNN's kernel is about twice as fast as the flash kernel that torch puts first. What it cannot do torch
gives to the next in the order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mt_core._torch_compat import packed_attention
from mt_core.interfaces import AttentionRequest
from mt_core.nn.attention import AttentionCore, AttentionPattern, sdpa_attention
from mt_core.nn.attention_backends.patterns import Documents, PerPattern, find_documents, is_packed, window_sides

ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_HOPPER = (9, 0)


class CudnnAttention:
    """An AttentionCore."""

    def __init__(self) -> None:
        self._documents: PerPattern[Documents] = PerPattern()
        self._attend_packed = packed_attention()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float) -> Tensor:
        pattern = pattern.over(k.shape[1])
        if is_packed(pattern, q.shape[1], k.shape[1]) and dropout == 0:
            return self.packed_with_lse(q, k, v, pattern)[0]
        # In this order, not as a set: torch tries the next one where a kernel does not serve.
        with sdpa_kernel(ORDER, set_priority=True):
            return sdpa_attention(q, k, v, pattern, dropout)

    def packed_with_lse(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> tuple[Tensor, Tensor]:
        """Packed documents, forward and backward: -> out [B, S, N, D] and lse [N, B * S] in fp32."""
        segment_ids = pattern.segment_ids
        assert segment_ids is not None
        documents = self._documents.get(pattern, None, lambda: find_documents(segment_ids))
        rows = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        # rows: [B * S, heads, D] each
        out, lse = self._attend_packed(*rows, documents.starts, documents.longest, window_sides(pattern))
        return out.unflatten(0, q.shape[:2]), lse


# -- registration ----------------------------------------------------------------------------------


def supports_cudnn(request: AttentionRequest) -> bool | str:
    if request.device_type != "cuda":
        return f"cuDNN runs on cuda, not on {request.device_type}"
    if request.dtype not in ("float16", "bfloat16"):
        return f"it computes in float16 and bfloat16, not in {request.dtype}"
    if request.deterministic:
        return "its backward adds in no fixed order; deterministic runs need eager"
    if request.logit_softcap is not None:
        return "it has no soft cap on the scores"
    if request.sinks:
        return "it does not return the log-sum-exp of its scores, to which a sink adds a term"
    if request.head_dim % 8 or request.head_dim > 128:
        return f"its heads are multiples of 8 up to 128 wide, not {request.head_dim}"
    if torch.cuda.get_device_capability() < _HOPPER:
        return "before Hopper (compute capability 9.0) torch's own order is faster; use sdpa"
    return True


def build_cudnn(request: AttentionRequest, *, softmax_in_fp32: bool = True) -> AttentionCore:
    return CudnnAttention()
