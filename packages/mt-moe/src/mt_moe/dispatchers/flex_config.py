"""Options of the `flex` dispatcher, and whether its library is here. Imports no torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from mt_core.config.schema import PositiveInt, Section
from mt_core.errors import ConfigError
from mt_moe.config import MoeConfig


class FlexConfig(Section):
    """Kernels that move tokens over NVLink and RDMA."""

    backend: Literal["deepep"] = "deepep"
    """deepep is DeepSeek's DeepEP (module deep_ep)."""
    num_nvl_bytes: PositiveInt = 1 << 30
    """Buffer for ranks of one machine."""
    num_rdma_bytes: int = 0
    """Buffer for ranks of several machines; 0 serves one machine."""


def check_flex(moe: MoeConfig) -> None:
    """Raises ConfigError when the library is missing, or for what it does not do."""
    key = "model.moe.moe_token_dispatcher_type=flex"
    if find_spec("deep_ep") is None:
        raise ConfigError(
            f"{key} needs DeepEP (module deep_ep, built for your GPUs), which is not installed; "
            "use alltoall or allgather"
        )
    if moe.moe_expert_capacity_factor is not None:
        raise ConfigError(
            f"{key} drops no token; model.moe.moe_expert_capacity_factor={moe.moe_expert_capacity_factor} needs "
            "alltoall or allgather"
        )
