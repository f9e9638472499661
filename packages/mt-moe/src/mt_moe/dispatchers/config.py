"""Options of dispatchers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field, ValidationError

from mt_core.config.fields import PositiveInt, Section
from mt_core.config.messages import validation_message
from mt_core.errors import ConfigError
from mt_moe.config import MoeConfig

OPTIONS = "model.moe.moe_dispatcher_options"


class NoOptions(Section):
    """Options of dispatchers that have nothing to choose."""


class ExchangeConfig(Section):
    """Options of `alltoall` and `allgather`."""

    static_shape: bool = False
    """In training every rank has equally many tokens in each micro-batch, as ranks have that read fixed-length samples.
    Sizes are then computed, and not exchanged and read by the host."""
    expert_rank_capacity_factor: float | None = Field(default=None, gt=0)
    """With static_shape and without padding: room for the rows of a rank, over their mean. Default: for as many as
    there can be. More rows than there is room for stop the run."""


def read_options(config_type: type, values: Mapping[str, Any]) -> Any:
    """Parse `model.moe.moe_dispatcher_options` into the dispatcher's options type. Raises ConfigError."""
    try:
        return config_type.model_validate(dict(values))  # type: ignore[attr-defined]
    except ValidationError as error:
        raise ConfigError(validation_message(OPTIONS, config_type, error, dict.fromkeys(values, OPTIONS))) from None


# -- `flex`, and whether its library is installed ----------------------------------------------------

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
    """deepep: bytes of the buffer for ranks of one machine."""
    num_rdma_bytes: int = 0
    """deepep: bytes of the buffer for ranks of several machines; 0 serves one machine."""
    max_tokens_per_rank: PositiveInt | None = None
    """hybridep: tokens of a rank that its buffers hold. Default: those of the first micro-batch; it makes larger
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
