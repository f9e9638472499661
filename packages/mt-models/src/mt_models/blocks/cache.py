"""KV cache: keys and values of previous positions, so that decoding computes each position once."""

from __future__ import annotations

from torch import Tensor


class LayerCache:
    """Keys and values of one layer: [batch, capacity, groups, head_dim], filled from the left."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new positions [B, S, G, D]; returns all so far [B, T, G, D]."""
        if self._keys is None or self._values is None:
            shape = (keys.shape[0], self.capacity, *keys.shape[2:])
            self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        end = self.length + keys.shape[1]
        self._keys[:, self.length : end] = keys
        self._values[:, self.length : end] = values
        self.length = end
        return self._keys[:, :end], self._values[:, :end]


class KeyValueCache:
    """One LayerCache a layer; `capacity` is the longest sequence, prompt included."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Positions seen so far."""
        return self.layers[0].length
