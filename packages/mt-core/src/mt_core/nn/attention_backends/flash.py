"""FlashAttention 2 (package flash_attn) and 3 (module flash_attn_interface, Hopper), where they are installed.

Dao, "FlashAttention-2" (2023); Shah et al., "FlashAttention-3" (2024). Both take [B, S, N, D] with fewer key heads,
and align causal queries to the last keys, as the patterns here do. Version 4 (distribution
flash-attn-4, module flash_attn.cute) is in the second part.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.interfaces import AttentionRequest
from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.attention_backends.patterns import Documents, PerPattern, find_documents, is_packed, window_sides


class FlashAttention:
    """An AttentionCore. attend and attend_packed: the package's functions, of one length and of many."""

    def __init__(self, attend: Callable[..., Any], attend_packed: Callable[..., Any], options: dict[str, Any]) -> None:
        self._attend = attend
        self._attend_packed = attend_packed
        self._options = options
        self._documents: PerPattern[Documents] = PerPattern()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float) -> Tensor:
        _require_served(pattern, q.shape[1], k.shape[1])
        options = self._options_for(pattern, dropout)
        if is_packed(pattern, q.shape[1], k.shape[1]):
            return self._packed(q, k, v, pattern, options)
        return _first(self._attend(q, k, v, **options))

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, options: dict[str, Any]) -> Tensor:
        segment_ids = pattern.segment_ids
        assert segment_ids is not None
        documents = self._documents.get(pattern, None, lambda: find_documents(segment_ids))
        rows = [x.flatten(0, 1) for x in (q, k, v)]  # [B * S, heads, D]
        # Queries and keys are the same documents.
        bounds = (documents.starts, documents.starts, documents.longest, documents.longest)
        return _first(self._attend_packed(*rows, *bounds, **options)).unflatten(0, q.shape[:2])

    def _options_for(self, pattern: AttentionPattern, dropout: float) -> dict[str, Any]:
        # By pattern, not once: layers of a model may differ in windows and causality.
        options = {**self._options, "causal": pattern.causal, "window_size": window_sides(pattern)}
        # Passed only if used: versions 3 and 4 have no such argument.
        if dropout > 0:
            options["dropout_p"] = dropout
        if pattern.alibi_slopes is not None:
            options["alibi_slopes"] = pattern.alibi_slopes.float()
        return options


def _require_served(pattern: AttentionPattern, queries: int, keys: int) -> None:
    """Raise ConfigError for what only the batch shows, rather than leave it out of the scores."""
    unserved = [name for name in ("bias", "key_padding") if getattr(pattern, name) is not None]
    if pattern.segment_ids is not None and not is_packed(pattern, queries, keys):
        unserved.append("documents with a bias or with other queries than keys")
    if unserved:
        raise ConfigError(
            f"model.attention_backend=flash_attn_*: this model's attention has {' and '.join(unserved)}, which "
            "FlashAttention does not take; use flex, sdpa or eager"
        )


def _first(result: Any) -> Tensor:
    """Some releases return (out, lse)."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


# -- registration ----------------------------------------------------------------------------------


def supports_flash_2(request: AttentionRequest) -> bool | str:
    spec = find_spec("flash_attn")
    if spec is None or spec.origin is None:  # without an origin it is the bare folder that version 4 is in
        return "flash-attn is not installed"
    if request.bias and not request.causal:
        return "its ALiBi is for causal attention"
    if request.logit_softcap is not None and request.dropout > 0:
        return "it has no dropout beside a soft cap on the scores"
    return supports_shape(request, head_dim=256)


def supports_flash_3(request: AttentionRequest) -> bool | str:
    if find_spec("flash_attn_interface") is None:
        return "FlashAttention 3 (module flash_attn_interface) is not installed"
    if request.bias:
        return "it adds no bias to the scores"
    if request.dropout > 0:
        return "it has no dropout"
    answer = supports_shape(request, head_dim=256)
    if answer is True and torch.cuda.get_device_capability() < (9, 0):
        return "it needs a Hopper GPU (compute capability 9.0)"
    return answer


def supports_shape(request: AttentionRequest, head_dim: int) -> bool | str:
    """What all versions require. head_dim: the widest head."""
    if request.sinks:
        return "the log-sum-exp of its scores, to which a sink adds a term, has no gradient"
    if request.device_type != "cuda":
        return f"it runs on cuda, not on {request.device_type}"
    if request.dtype not in ("float16", "bfloat16"):
        return f"it computes in float16 and bfloat16, not in {request.dtype}"
    if request.head_dim % 8 or request.head_dim > head_dim:
        return f"its heads are multiples of 8 up to {head_dim} wide, not {request.head_dim}"
    return True


def build_flash_2(request: AttentionRequest, *, softmax_in_fp32: bool = True) -> AttentionCore:
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    return FlashAttention(flash_attn_func, flash_attn_varlen_func, _options(request))


def build_flash_3(request: AttentionRequest, *, softmax_in_fp32: bool = True) -> AttentionCore:
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    return FlashAttention(flash_attn_func, flash_attn_varlen_func, _options(request))


def _options(request: AttentionRequest) -> dict[str, Any]:
    options: dict[str, Any] = {"deterministic": request.deterministic}
    if request.logit_softcap is not None:
        options["softcap"] = request.logit_softcap
    return options


# -- FlashAttention 4 (distribution flash-attn-4, module flash_attn.cute): Hopper, and Blackwell, for which it is made
#
# It is written in CuTe's Python DSL and compiles a kernel at the first call of each kind. Its functions are those of
# version 3 but for keywords: the sides of a window are None where they have no end, and what it returns begins with
# the result.

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
