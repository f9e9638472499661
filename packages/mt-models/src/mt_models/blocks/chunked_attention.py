"""Self-attention within chunks of the sequence (Llama 4): a query sees the keys before it of its own chunk.

Chunks are of equal numbers of positions, counted from the first position of the text. Over a whole sequence they are
documents to the mask. In a cache no key further back than a chunk is read, and of these a key is in the query chunk if
the two chunks are both even or both odd: one more number for each position.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.cache import Cache, PositionState
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.rotary import RotaryAngles

DOCUMENTS = 2**24
"""More than the chunks of a sequence."""


class ChunkedPatterns:
    """The pattern of each forward pass, narrowed to chunks: one object for all layers, which share its mask."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self._of_pass: MutableMapping[RotaryAngles, AttentionPattern] = WeakKeyDictionary()

    def of_pass(self, pattern: AttentionPattern, angles: RotaryAngles, batch: int) -> AttentionPattern:
        if angles not in self._of_pass:
            chunks = (angles.position_ids // self.chunk).expand(batch, -1)
            documents = pattern.segment_ids
            ids = chunks if documents is None else documents.long() * DOCUMENTS + chunks
            self._of_pass[angles] = replace(pattern, segment_ids=ids, _mask=None, _within={})
        return self._of_pass[angles]


class ChunkedAttention(SelfAttention):
    """x -> linear_proj(core(q, k, v)): [batch, sequence, hidden] -> the same. window: the size of a chunk."""

    def __init__(self, *args: Any, patterns: ChunkedPatterns, **options: Any) -> None:
        super().__init__(*args, **options)
        self.patterns = patterns

    def forward(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None) -> Tensor:
        assert angles is not None
        assert self.window is not None
        q, k, v = self.project_and_rotate(x, angles)
        if cache is None:
            chunked = self.patterns.of_pass(pattern, angles, x.shape[0])
            return self.linear_proj(self.attend(q, k, v, chunked).flatten(2))

        def attend(q: Tensor, k: Tensor, v: Tensor, parity: Tensor) -> Tensor:
            return self.attend(q, k, v, AttentionPattern(segment_ids=parity[..., 0].round().long(), window=self.window))

        parity = (angles.position_ids // self.window % 2)[..., None].to(k.dtype)
        return self.linear_proj(cache.attend(self, attend, (q,), (k, v, parity)).flatten(2))

    def cached_state(self) -> PositionState:
        """Keys and values of this rank's groups, and whether the position's chunk is odd."""
        shape = (max(self.query_groups // self.tp.size, 1), self.head_dim)
        return PositionState((shape, shape, (1,)), self.linear_qkv.weight.dtype, self.window)
