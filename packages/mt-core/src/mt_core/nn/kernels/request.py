"""Requests for kernels, and which of them each implementation supports.

Imports no torch, so that configurations can be checked without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

KernelName = Literal[
    "rms_norm",
    "layer_norm",
    "rotary",
    "activation",
    "bias_dropout_add",
    "softmax",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_cross_entropy_sum",
    "adamw",
    "fp8_cast",
    "causal_conv",
    "index_scores",
    "hyper_connection",
]

Feature = Literal[
    "zero_centered",
    "bias",
    "interleaved",
    "partial",
    "batched_angles",
    "dropout",
    "mask",
    "causal",
    "parallel",
    "remainders",
    "moments_16bit",
    "swiglu",
    "geglu",
    "geglu_tanh",
    "clamped_swiglu",
    "squared_relu",
]


@dataclass(frozen=True, kw_only=True)
class KernelRequest:
    """One use of a kernel in a model.

    dtype: of the activations, or of the weights for the optimizer ("float32", "bfloat16", "float16", "float64").
    width: the size that the kernel works on as a whole, where it has one: the normalized dimension, the head size,
    keys of a softmax, ids of this rank's vocabulary, taps of a convolution, channels of an indexer,
    residual streams.
    """

    device_type: str
    dtype: str
    width: int = 0
    features: frozenset[Feature] = frozenset()

    def __str__(self) -> str:
        words = [self.device_type, self.dtype, *([f"width {self.width}"] if self.width else []), *sorted(self.features)]
        return ", ".join(words)


# -- support: True, or the reason why not. Packages are looked for, never imported. ---------------------

Supports = Callable[[KernelRequest], bool | str]

_HALF_AND_SINGLE = frozenset({"float32", "bfloat16", "float16"})
WIDEST_ROW = 32768
"""Forward passes hold a row in the registers of one program; wider ones spill."""


def supports_torch(request: KernelRequest) -> bool | str:
    return True


def supports_triton(request: KernelRequest) -> bool | str:
    """Any of ours: on a GPU, or on a CPU in triton's interpreter (for tests)."""
    if not _installed("triton"):
        return "triton is not installed"
    if request.device_type not in ("cuda", "cpu"):
        return f"it runs on cuda, not on {request.device_type}"
    if request.device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on cpu it runs in triton's interpreter only (TRITON_INTERPRET=1, for tests)"
    return _dtype(request, _HALF_AND_SINGLE)


def supports_triton_rows(request: KernelRequest) -> bool | str:
    """Ours that hold a row at a time."""
    if request.width > WIDEST_ROW:
        return f"its rows are at most {WIDEST_ROW} wide, not {request.width}"
    return supports_triton(request)


def supports_triton_adamw(request: KernelRequest) -> bool | str:
    if request.dtype == "float16":
        return "its weights are float32, or bfloat16 with 16-bit remainders"
    return supports_triton(request)


MOST_TAPS = 4
"""Taps of the convolution whose backward pass fits into registers."""


def supports_triton_taps(request: KernelRequest) -> bool | str:
    """Ours that computes a short convolution."""
    if request.width > MOST_TAPS:
        return f"it has at most {MOST_TAPS} taps, not {request.width}"
    return supports_triton(request)


WIDEST_INDEX = 128
"""Channels of an indexer's queries that its kernels take."""


def supports_triton_index(request: KernelRequest) -> bool | str:
    """Ours that computes the scores of an indexer and their gradients."""
    if request.width > WIDEST_INDEX:
        return f"its queries have at most {WIDEST_INDEX} channels, not {request.width}"
    if request.dtype != "bfloat16":
        return f"it computes in bfloat16, not in {request.dtype}"
    return supports_triton(request)


CONNECTED_STREAMS = (2, 4, 8)
"""Numbers of residual streams that the kernels of hyper-connections take."""


def supports_triton_streams(request: KernelRequest) -> bool | str:
    """Ours that computes hyper-connections."""
    if request.width not in CONNECTED_STREAMS:
        return f"it takes {', '.join(map(str, CONNECTED_STREAMS))} streams, not {request.width}"
    return supports_triton(request)


def needs_te(*lacks: Feature) -> Supports:
    return _needs("transformer_engine", "pytorch", "Transformer Engine", lacks)


def needs_apex(*lacks: Feature) -> Supports:
    # The package called apex on the Python index is another one; NVIDIA's has multi_tensor_apply.
    return _needs("apex", "multi_tensor_apply", "NVIDIA Apex", lacks)


def needs_liger(*lacks: Feature) -> Supports:
    return _needs("liger_kernel", "ops", "liger-kernel", lacks)


def _needs(module: str, part: str, package: str, lacks: tuple[Feature, ...]) -> Supports:
    def supports(request: KernelRequest) -> bool | str:
        if not _installed(module, part):
            return f"{package} is not installed"
        if request.device_type != "cuda":
            return f"it runs on cuda, not on {request.device_type}"
        missing = sorted(request.features.intersection(lacks))
        if missing:
            return f"{package} has no form of it with {' or '.join(missing)}"
        return _dtype(request, _HALF_AND_SINGLE)

    return supports


def _dtype(request: KernelRequest, known: frozenset[str]) -> bool | str:
    return True if request.dtype in known else f"it computes in {', '.join(sorted(known))}, not in {request.dtype}"


def _installed(module: str, part: str = "") -> bool:
    """Whether a top-level module can be found, with this part in its folder. Nothing is imported."""
    spec = find_spec(module)
    if spec is None:
        return False
    # A module, a package or a compiled extension: the name is followed by .py, nothing or .so.
    return not part or any(
        next(Path(folder).glob(f"{part}*"), None) for folder in spec.submodule_search_locations or ()
    )
