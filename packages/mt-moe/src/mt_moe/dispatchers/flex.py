"""`flex`: a library's kernels send tokens over NVLink and RDMA: DeepEP or HybridEP, if installed."""

from __future__ import annotations

from mt_core.errors import ConfigError
from mt_moe.dispatchers.deepep import DeepEPDispatcher
from mt_moe.dispatchers.flex_config import FlexConfig, not_installed
from mt_moe.dispatchers.hybridep import HybridEPDispatcher
from mt_moe.dispatchers.interface import Dispatcher, ExpertPlacement


def build_flex(config: FlexConfig, placement: ExpertPlacement) -> Dispatcher:
    """Raises ConfigError without the library, or if the expert-parallel group has one rank only."""
    backend, group = config.moe_flex_dispatcher_backend, placement.ep.group
    try:
        if backend == "deepep":
            from deep_ep import Buffer
        else:
            from deep_ep import HybridEPBuffer
    except ImportError as error:
        raise ConfigError(f"{not_installed(backend)}: {error}") from error
    if group is None:
        raise ConfigError(
            "model.moe.moe_token_dispatcher_type=flex sends between ranks, and "
            "parallel.expert_model_parallel_size is 1; use alltoall or allgather"
        )
    if backend == "deepep":
        return DeepEPDispatcher(placement, Buffer(group, config.num_nvl_bytes, config.num_rdma_bytes))
    return HybridEPDispatcher(placement, HybridEPBuffer, config.max_tokens_per_rank)
