"""Caches for decoding in models with layers of several kinds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mt_models.blocks.cache import KeyValueCache, LayerCache


class StateCache:
    """Cache of a Mamba layer; its size does not depend on the length of the sequence.

    conv_inputs: the last k - 1 inputs of the three convolutions, each [B, k - 1, channels]. state: [B, H, P, N] in
    fp32. Both None until the first positions have been seen.
    """

    def __init__(self) -> None:
        self.length = 0
        self.conv_inputs: tuple[Tensor, ...] | None = None
        self.state: Tensor | None = None


class MixedCache(KeyValueCache):
    """One cache a layer, None for layers that keep nothing; `capacity` is the longest sequence, prompt included."""

    layers: Sequence[LayerCache | StateCache | None]  # type: ignore[assignment]

    def __init__(self, layers: Sequence[LayerCache | StateCache | None], capacity: int) -> None:
        super().__init__(0, capacity)
        self.layers = layers

    @property
    def length(self) -> int:
        """Positions seen so far."""
        return next((layer.length for layer in self.layers if layer is not None), 0)
