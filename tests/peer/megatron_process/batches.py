"""How each of Megatron's models is called with a row of tokens. Masks are True where attention is not allowed."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Batch(Protocol):
    @staticmethod
    def forward(model: Any, row: dict[str, Tensor], labels: bool) -> Any:
        """Losses of tokens [1, sequence] with labels, else logits [1, sequence, part of the vocabulary]."""


def _causal(length: int) -> Tensor:
    return torch.ones(1, 1, length, length).tril() < 0.5


class Decoder:
    """tokens, labels: [1, sequence]."""

    @staticmethod
    def forward(model: Any, row: dict[str, Tensor], labels: bool) -> Any:
        tokens = row["tokens"]
        positions = torch.arange(tokens.shape[1])[None]
        return model(tokens, positions, _causal(tokens.shape[1]), labels=row["labels"] if labels else None)


class Encoder:
    """tokens, labels, types: [1, sequence]. Every token is attended to."""

    @staticmethod
    def forward(model: Any, row: dict[str, Tensor], labels: bool) -> Any:
        tokens = row["tokens"]
        return model(tokens, torch.ones_like(tokens), row.get("types"), lm_labels=row["labels"] if labels else None)


class EncoderDecoder:
    """tokens: [1, sequence] of the encoder; decoder_tokens, labels: [1, sequence]."""

    @staticmethod
    def forward(model: Any, row: dict[str, Tensor], labels: bool) -> Any:
        tokens, decoder_tokens = row["tokens"], row["decoder_tokens"]
        length, decoder_length = tokens.shape[1], decoder_tokens.shape[1]
        return model(
            tokens,
            decoder_tokens,
            torch.zeros(1, 1, length, length, dtype=torch.bool),
            _causal(decoder_length),
            torch.zeros(1, 1, decoder_length, length, dtype=torch.bool),
            lm_labels=row["labels"] if labels else None,
        )


BATCHES: dict[str, type[Batch]] = {
    "gpt": Decoder,
    "hybrid": Decoder,
    "local_hybrid": Decoder,
    "bert": Encoder,
    "t5": EncoderDecoder,
}
