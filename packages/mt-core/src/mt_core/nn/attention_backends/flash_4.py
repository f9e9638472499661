"""FlashAttention 4 (distribution flash-attn-4, module flash_attn.cute): Hopper, and Blackwell, for which it is made.

It is written in CuTe's Python DSL and compiles a kernel at the first call of each kind. Its functions are those of
version 3 but for keywords: the sides of a window are None where they have no end, and what it returns begins with
the result.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionCore
from mt_core.nn.attention_backends.flash import FlashAttention, supports_shape
from mt_core.specs import AttentionRequest

DISTRIBUTION = "flash-attn-4"
WIDEST_HEAD = 128
HOPPER, BLACKWELL, AFTER = (9, 0), (10, 0), (12, 0)


def flash_attention_4(
    attend: Callable[..., Any], attend_packed: Callable[..., Any], *, deterministic: bool
) -> FlashAttention:
    """attend, attend_packed: flash_attn.cute's flash_attn_func and flash_attn_varlen_func."""

    def whole(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return attend(q, k, v, **_renamed(options))

    def packed(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        key_starts: Tensor,
        longest: int,
        key_longest: int,
        **options: Any,
    ) -> Any:
        return attend_packed(
            *(q, k, v),
            cu_seqlens_q=starts,
            cu_seqlens_k=key_starts,
            max_seqlen_q=longest,
            max_seqlen_k=key_longest,
            **_renamed(options),
        )

    return FlashAttention(whole, packed, {"deterministic": deterministic})


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    before, after = options["window_size"]  # -1: no end
    # Beside causality a window to the left is enough; without either, both sides have no end.
    return {**options, "window_size": (None if before < 0 else before, None if after < 0 else after)}


# -- registration ----------------------------------------------------------------------------------


def supports_flash_4(request: AttentionRequest) -> bool | str:
    if not is_installed():
        return f"FlashAttention 4 ({DISTRIBUTION}) is not installed"
    if request.bias:
        return "it adds no bias to the scores"
    if request.dropout > 0:
        return "it has no dropout"
    if request.logit_softcap is not None:
        return "its backward pass has no soft cap on the scores"
    answer = supports_shape(request, WIDEST_HEAD)
    return _supports_device(request) if answer is True else answer


def _supports_device(request: AttentionRequest) -> bool | str:
    capability = torch.cuda.get_device_capability()
    if not HOPPER <= capability < AFTER:
        return (
            f"it needs a Hopper or a data-centre Blackwell GPU (compute capability 9 to 11), not {capability[0]}."
            f"{capability[1]}"
        )
    if capability >= BLACKWELL:
        return True
    if request.deterministic:
        return "its backward pass adds in no fixed order before Blackwell; deterministic runs need eager"
    if request.window is not None:
        return "its backward pass has no window before Blackwell; use flash_attn_3"
    return True


def is_installed() -> bool:
    try:
        version(DISTRIBUTION)
    except PackageNotFoundError:
        return False
    return True


def build_flash_4(request: AttentionRequest, *, softmax_in_fp32: bool = True) -> AttentionCore:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    return flash_attention_4(flash_attn_func, flash_attn_varlen_func, deterministic=request.deterministic)
