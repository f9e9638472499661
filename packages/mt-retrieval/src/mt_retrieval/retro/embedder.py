"""What gives chunks vectors, near each other for similar chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mt_core.specs import Tokenizer
from mt_retrieval.retro.blocks import Share
from mt_retrieval.retro.hashed_ngrams import HashedNgrams
from mt_retrieval.retro.options import BATCH_SIZE


class ChunkEmbedder(Protocol):
    """name: as the user gave it. fingerprint: SHA-256 of all that changes the vectors but `settings`."""

    name: str
    fingerprint: str
    settings: dict[str, int | str]
    share: Share

    def vectors(self, chunks: Sequence[NDArray[np.int64]], on_rows: Callable[[int], None]) -> NDArray[np.float32]:
        """[chunks, dim] of their tokens. Collective over the processes that share a model."""
        ...


def open_embedder(
    name: str,
    tokenizer: Tokenizer,
    *,
    batch_size: int = BATCH_SIZE,
    device: str = "auto",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> ChunkEmbedder:
    """By the name of a registered one, or a run directory or checkpoint of any format of a BERT or a biencoder.

    tokenizer: of the chunks. device, settings: as of `Encoder.load`; with "parallel" in them collective.
    Raises ConfigError for a model that embeds no text.
    """
    if name == HashedNgrams.name:
        return HashedNgrams()
    from mt_retrieval.encoder import Encoder
    from mt_retrieval.retro.encoder_embedder import FRAME, EncoderEmbedder

    encoder = Encoder.load(Path(name), device=device, settings=settings, seq_length=FRAME)
    return EncoderEmbedder(str(Path(name).absolute()), encoder, tokenizer, batch_size)
