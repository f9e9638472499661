"""Vectors of chunks by a BERT or a biencoder, as Megatron's Retro makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mt_core.specs import Tokenizer
from mt_data.datasets.text_files import bare_encoder
from mt_retrieval.encoder import Encoder
from mt_retrieval.retro.blocks import Share

LONGEST = 256
"""Tokens of the encoder that a chunk is cut to; Megatron's bert-max-chunk-length."""
FRAME = 3
"""CLS, a token and SEP; the sequences are made here."""


class EncoderEmbedder:
    """Chunks are decoded to text, which is encoded with the encoder's tokenizer and cut; the vector is the mean of the
    last hidden states without those of CLS and SEP. A chunk without a token has the pad token."""

    def __init__(self, name: str, encoder: Encoder, tokenizer: Tokenizer, batch_size: int) -> None:
        self.name, self._encoder, self._tokenizer = name, encoder, tokenizer
        self.fingerprint = encoder.fingerprint
        self._batch_size, self._longest = batch_size, min(LONGEST, encoder.longest)
        self._encode = bare_encoder(encoder.tokenizer)
        self.settings: dict[str, int | str] = {
            "batch_size": batch_size,
            "seq_length": self._longest,
            "precision": encoder.config.precision.dtype,
        }
        ctx = encoder.ctx
        # Replicas (dp) embed different blocks; ranks of tp compute the same ones together, and the first of them
        # writes.
        self.share = Share(ctx.dp.rank, ctx.dp.size, writes=ctx.axis("model").rank == 0)

    def vectors(self, chunks: Sequence[NDArray[np.int64]], on_rows: Callable[[int], None]) -> NDArray[np.float32]:
        """Chunks of about the same length share a batch, so that little is padding."""
        sequences = [self._sequence(chunk) for chunk in chunks]
        # Within a block, which one replica embeds as a whole: batches do not depend on the number of ranks.
        order = np.argsort([len(sequence) for sequence in sequences], kind="stable")
        parts = []
        for first in range(0, len(order), self._batch_size):
            batch = order[first : first + self._batch_size]
            parts.append(self._encoder.mean_states([sequences[number] for number in batch]))
            on_rows(first + len(batch))
        # The inverse permutation puts the vectors back into the order of the chunks.
        return np.concatenate(parts)[np.argsort(order, kind="stable")]

    def _sequence(self, chunk: NDArray[np.int64]) -> list[int]:
        pairs, eod = self._encoder.pairs, self._tokenizer.special.eod
        text = self._tokenizer.decode([token for token in chunk.tolist() if token != eod])
        # Room for CLS and SEP. The mean of no state would be NaN: the pad token stands for an empty text.
        inner = self._encode(text)[: self._longest - 2] or [pairs.pad]
        return [pairs.cls, *inner, pairs.sep]
