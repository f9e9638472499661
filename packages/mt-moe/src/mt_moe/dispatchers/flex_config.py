"""Options of the `flex` dispatcher, and whether its library is installed. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal

from mt_core.config.schema import PositiveInt, Section
from mt_core.errors import ConfigError
from mt_moe.config import MoeConfig
from mt_moe.dispatchers.config import OPTIONS

Backend = Literal["deepep", "hybridep"]
DISPATCHER = "model.moe.moe_token_dispatcher_type=flex"
MODULES: Mapping[Backend, tuple[str, ...]] = {"deepep": ("deep_ep",), "hybridep": ("deep_ep", "hybrid_ep_cpp")}
"""What has to be importable for a backend. HybridEP is part of some builds of deep_ep."""
OF_BACKEND: Mapping[str, Backend] = {
    "num_nvl_bytes": "deepep",
    "num_rdma_bytes": "deepep",
    "max_tokens_per_rank": "hybridep",
}


class FlexConfig(Section):
    """Kernels that move tokens over NVLink and RDMA."""

    moe_flex_dispatcher_backend: Backend = "deepep"
    """deepep is DeepSeek's DeepEP (module deep_ep), hybridep NVIDIA's HybridEP (deep_ep.HybridEPBuffer)."""
    num_nvl_bytes: PositiveInt = 1 << 30
    """Of deepep: buffer for ranks of one machine."""
    num_rdma_bytes: int = 0
    """Of deepep: buffer for ranks of several machines; 0 serves one machine."""
    max_tokens_per_rank: PositiveInt | None = None
    """Of hybridep: tokens of a rank that its buffers hold. Default: those of the first micro-batch; it makes larger
    ones when more come."""


def check_flex(moe: MoeConfig, options: FlexConfig) -> None:
    """Raises ConfigError if the library is missing, or for options that the backend does not have."""
    backend = options.moe_flex_dispatcher_backend
    if any(find_spec(module) is None for module in MODULES[backend]):
        raise ConfigError(not_installed(backend))
    for key, owner in OF_BACKEND.items():
        if key in options.model_fields_set and owner != backend:
            raise ConfigError(
                f"{OPTIONS}.{key} would be ignored: it only counts when {OPTIONS}.moe_flex_dispatcher_backend is "
                f"{owner}, and that is {backend}"
            )
    if moe.moe_pad_expert_input_to_capacity:
        raise ConfigError(
            f"{DISPATCHER} sends tokens and no padding, so that model.moe.moe_pad_expert_input_to_capacity=true cannot "
            "be; set it to false, or use alltoall or allgather"
        )


def not_installed(backend: Backend) -> str:
    if backend == "deepep":
        needs = "DeepEP (module deep_ep, built for your GPUs)"
    else:
        needs = "HybridEP (deep_ep.HybridEPBuffer and hybrid_ep_cpp, of a build of deep_ep with it)"
    return f"{DISPATCHER} needs {needs}, which is not installed; use alltoall or allgather"
