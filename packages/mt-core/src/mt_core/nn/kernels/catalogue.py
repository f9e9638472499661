"""Every implementation of every kernel. What a kernel computes, with shapes, is said by its `reference` function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mt_core.kinds import Lazy
from mt_core.nn.kernels.request import (
    KernelName,
    Supports,
    needs_apex,
    needs_liger,
    needs_te,
    supports_torch,
    supports_triton,
    supports_triton_adamw,
    supports_triton_index,
    supports_triton_rows,
    supports_triton_streams,
    supports_triton_taps,
)


@dataclass(frozen=True)
class Implementation:
    """function: imported when chosen; all implementations of a kernel take and return the same.

    fused: the kernel with the operations around it in one pass, backward too.
    - Of a norm, (x, branch, ...) -> (x + branch, the norm of it); without a branch (None): (x, the norm of x).
    - Of rotary, (qkv [B, S, G, N / G + 2, D], cos, sin, interleaved, norms) -> q [B, S, N, D], k and v [B, S, G, D],
      with q and k turned: a group of qkv has its query heads, its key head and its value head, as Megatron's
      linear_qkv. norms: HeadNorms of the reference, or None; what they give is not rounded before it is turned.
    - Of the activation, (x [R, F] or [R, 2F], weights [R], name) -> activation(x) times the weight of each row.
    - Of fp8_cast, the function itself: its casts compute the activations (Activated) that they are given.
    - Of causal_conv, (x [B, S, C], weight, bias, past [B, k - 1, C], silu) -> the same behind past, and the last k - 1
      inputs; without gradients.
    - Of hyper_connection, which reads the input of a block from streams, the sum of its output and the mixed streams.

    automatic: `auto` takes it. A kernel that has not run on a GPU is used where it is named.
    """

    name: str
    supports: Supports
    function: Lazy[Callable[..., Any]]
    fused: Lazy[Callable[..., Any]] | None = None
    automatic: bool = True


def _torch(reference: str) -> Implementation:
    return Implementation("torch", supports_torch, Lazy(f"mt_core.nn.kernels.reference.{reference}"))


def _triton(reference: str, supports: Supports = supports_triton) -> Implementation:
    return Implementation("triton", supports, Lazy(f"mt_core.nn.kernels.triton_kernels.{reference}"))


def _triton_norm(name: str) -> Implementation:
    fused: Lazy[Callable[..., Any]] = Lazy(f"mt_core.nn.kernels.triton_kernels.{name}:add_{name}")
    return replace(_triton(f"{name}:{name}", supports_triton_rows), fused=fused)


def _triton_fp8_cast() -> Implementation:
    cast = _triton("fp8_activations:TritonActivationCasts")
    # One class has both: its casts accept a Tensor or an Activated.
    return replace(cast, fused=cast.function)


def _external(package: str, function: str, supports: Supports) -> Implementation:
    return Implementation(package, supports, Lazy(f"mt_core.nn.kernels.external.{package}:{function}"))


def _torch_conv() -> Implementation:
    step: Lazy[Callable[..., Any]] = Lazy("mt_core.nn.kernels.reference.causal_conv:causal_conv_step")
    return replace(_torch("causal_conv:causal_conv"), fused=step)


def _triton_conv() -> Implementation:
    step: Lazy[Callable[..., Any]] = Lazy("mt_core.nn.kernels.triton_kernels.causal_conv:causal_conv_step")
    return replace(_triton("causal_conv:causal_conv", supports_triton_taps), fused=step, automatic=False)


def _mixed_streams(folder: str) -> Lazy[Callable[..., Any]]:
    return Lazy(f"mt_core.nn.kernels.{folder}.hyper_connection:mixed_streams")


_WEIGHTED_ACTIVATION: Lazy[Callable[..., Any]] = Lazy(
    "mt_core.nn.kernels.triton_kernels.activation:weighted_activation"
)

KERNELS: Mapping[KernelName, tuple[Implementation, ...]] = {
    "rms_norm": (
        _torch("layers:rms_norm"),
        _triton_norm("rms_norm"),
        # The arguments of needs_*: features that the package's kernel lacks.
        _external("te", "rms_norm", needs_te()),
        _external("apex", "rms_norm", needs_apex("zero_centered")),
        _external("liger", "rms_norm", needs_liger()),
    ),
    "layer_norm": (
        _torch("layers:layer_norm"),
        _triton_norm("layer_norm"),
        _external("te", "layer_norm", needs_te()),
        _external("apex", "layer_norm", needs_apex("zero_centered")),
        _external("liger", "layer_norm", needs_liger("zero_centered")),
    ),
    "rotary": (
        _torch("layers:rotary"),
        replace(_triton("rotary:rotary"), fused=Lazy("mt_core.nn.kernels.triton_kernels.rotary_of_qkv:rotary_of_qkv")),
        _external("apex", "rotary", needs_apex("interleaved", "batched_angles")),
        _external("liger", "rotary", needs_liger("interleaved", "partial")),
    ),
    "activation": (
        _torch("layers:activation"),
        replace(_triton("activation:activation"), fused=_WEIGHTED_ACTIVATION),
        _external("te", "activation", needs_te("bias", "geglu", "clamped_swiglu")),
        _external("liger", "activation", needs_liger("bias", "geglu", "clamped_swiglu")),
    ),
    "bias_dropout_add": (
        _torch("layers:bias_dropout_add"),
        _triton("residual:bias_dropout_add"),
    ),
    "softmax": (
        _torch("layers:scaled_masked_softmax"),
        _triton("softmax:scaled_masked_softmax", supports_triton_rows),
    ),
    "cross_entropy": (
        _torch("cross_entropy:cross_entropy"),
        _triton("cross_entropy:cross_entropy"),
        _external("te", "cross_entropy", needs_te()),
        _external("liger", "cross_entropy", needs_liger("parallel")),
    ),
    "linear_cross_entropy": (
        _torch("cross_entropy:linear_cross_entropy"),
        _triton("cross_entropy:linear_cross_entropy"),
    ),
    "linear_cross_entropy_sum": (
        _torch("cross_entropy:linear_cross_entropy_sum"),
        _triton("cross_entropy:linear_cross_entropy_sum"),
    ),
    "adamw": (
        _torch("adamw:TorchAdamW"),
        _triton("adamw:TritonAdamW", supports_triton_adamw),
    ),
    "fp8_cast": (
        Implementation("torch", supports_torch, Lazy("mt_core.nn.kernels.reference.fp8_casts:TorchCasts")),
        _triton_fp8_cast(),
    ),
    "causal_conv": (_torch_conv(), _triton_conv()),
    "index_scores": (
        _torch("index_scores:index_scores"),
        replace(_triton("index_scores:index_scores", supports_triton_index), automatic=False),
    ),
    "hyper_connection": (
        replace(_torch("hyper_connection:read_streams"), fused=_mixed_streams("reference")),
        replace(
            _triton("hyper_connection:read_streams", supports_triton_streams),
            fused=_mixed_streams("triton_kernels"),
            automatic=False,
        ),
    ),
}
