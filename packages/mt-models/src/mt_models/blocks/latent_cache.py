"""The cache of latent attention: one latent and one rotated key per position, shared by all heads."""

from __future__ import annotations

from torch import Tensor

from mt_models.blocks.cache import KeyValueCache, LayerCache


class LatentLayerCache(LayerCache):
    """Of one layer: [batch, capacity, channels], filled from the left."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._latents: Tensor | None = None

    def extend_latents(self, latents: Tensor) -> Tensor:
        """Add new positions [B, S, C]; returns all so far [B, T, C]."""
        if self._latents is None:
            self._latents = latents.new_empty(latents.shape[0], self.capacity, latents.shape[2])
        end = self.length + latents.shape[1]
        self._latents[:, self.length : end] = latents
        self.length = end
        return self._latents[:, :end]


class LatentCache(KeyValueCache):
    """One LatentLayerCache a layer; `capacity` is the longest sequence, prompt included."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.layers = [LatentLayerCache(capacity) for _ in range(num_layers)]
