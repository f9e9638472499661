"""Keys of decoders whose layers may be on several residual streams, and their rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config.fields import PositiveInt, used_when
from mt_core.config.schema import ModelConfig
from mt_core.errors import ConfigError


class StreamKeys(ModelConfig):
    """A decoder with one residual stream, or with hyper-connections between several."""

    enable_mhc_connections: bool = False
    """Several residual streams in place of one, which hyper-connections around the blocks of layers read, write and mix
    (mHC, DeepSeek, 2026, as Megatron-Core computes it)."""
    mhc_num_residual_streams: PositiveInt = used_when(4, enable_mhc_connections=True)
    """Residual streams."""
    mhc_sinkhorn_iterations: PositiveInt = used_when(20, enable_mhc_connections=True)
    """Iterations that make the sums of rows and columns of the matrices that mix streams 1."""
    mhc_init_gating_factor: float = used_when(0.01, enable_mhc_connections=True)
    """Initial factor of what depends on the token in the weights of streams."""


def check_streams(model: StreamKeys, without: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ConfigError for what does not go with several streams. without: key -> values that go with them."""
    if not model.enable_mhc_connections:
        return
    for key, values in without.items():
        if (value := getattr(model, key)) not in values:
            legal = " or ".join(_spelled(choice) for choice in values)
            raise ConfigError(
                f"model.{key}={_spelled(value)} cannot be combined with model.enable_mhc_connections=true; it can be "
                f"{legal}, or model.enable_mhc_connections=false"
            )


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def connection_flops(hidden_size: int, streams: int) -> float:
    """Forward FLOPs for each token of one connection: weights from all streams; streams into the block, its output out
    of it, and streams into streams."""
    return 2.0 * ((2 + streams) * streams * streams * hidden_size + (2 + streams) * streams * hidden_size)


def depth_flops(model: StreamKeys, hidden_size: int, connections: int) -> float:
    """Forward FLOPs for each token of what a depth of multi-token prediction has more than one without streams: its
    connections, the sum of its streams, and the product of each stream but the first with h_proj."""
    if not model.enable_mhc_connections:
        return 0.0
    others = model.mhc_num_residual_streams - 1
    return stream_flops(model, hidden_size, connections) + 2.0 * others * hidden_size**2


def stream_flops(model: StreamKeys, hidden_size: int, connections: int) -> float:
    """Forward FLOPs for each token of the connections of a model and of the sum of its streams."""
    if not model.enable_mhc_connections:
        return 0.0
    streams = model.mhc_num_residual_streams
    head = 2.0 * (streams * streams * hidden_size + streams * hidden_size)
    return connections * connection_flops(hidden_size, streams) + head
