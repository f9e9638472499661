"""Vectors of texts, from encoders and from causal language models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer
from mt_core.nn.model import SupportsEmbedding, as_embedder, contract
from mt_core.train.trained_model import TrainedModel
from mt_data.datasets.text_files import bare_encoder
from mt_infer.engine import evaluating
from mt_infer.text import TextGenerator

InputType = Literal["query", "document"]


class TextEmbedder:
    """Embeds texts as the model was trained on them: an encoder's as CLS, text, SEP; a language model's as a prompt.

    encode: a text -> its ids; None: as an encoder reads it. longest: tokens of a text; None: the model's.
    """

    def __init__(
        self,
        model: SupportsEmbedding,
        tokenizer: Tokenizer,
        device: torch.device,
        vocab_size: int,
        *,
        encode: Callable[[str], list[int]] | None = None,
        longest: int | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._device, self._vocab_size = device, vocab_size
        self._bare, self._encode = bare_encoder(tokenizer), encode or self._framed
        self._longest = longest or model.max_sequence_length

    @classmethod
    def of_trained(cls, trained: TrainedModel) -> TextEmbedder:
        """Raises ConfigError for a model that is no encoder."""
        if contract(trained.model).continues_text:
            # Its texts are prompts, which begin as the tokenizer of a generator has them (of_generator).
            raise ConfigError(
                f"model.family={trained.config.model.family} is a language model and no encoder; mt serve embeds texts "
                "with it (/v1/embeddings), this takes bert, modernbert or biencoder"
            )
        size = trained.config.model.vocab_size or trained.tokenizer.vocab_size
        return cls(as_embedder(trained.model), trained.tokenizer, trained.ctx.device, size)

    @classmethod
    def of_generator(cls, generator: TextGenerator) -> TextEmbedder:
        """With the weights of a language model that generates, between its steps. Raises ConfigError for a model that
        embeds no text, and for several ranks."""
        engine = generator.engine.engine
        model = as_embedder(engine.model)
        if engine.ctx.world.size > 1:
            raise ConfigError("a language model embeds texts on one process; leave out --nproc and parallel.*")
        return cls(
            model,
            generator.tokenizer,
            engine.ctx.device,
            generator.vocab_size,
            encode=generator.prompt_tokens,
            longest=generator.longest,
        )

    @property
    def longest(self) -> int:
        """Tokens of a text, with those that are put around it."""
        assert self._longest is not None
        return self._longest

    def tokens(self, text: str | Sequence[int]) -> list[int]:
        """Ids are taken as they are. Raises ConfigError for more than the model takes, or for ids that it lacks."""
        ids = self._encode(text) if isinstance(text, str) else list(text)
        wrong = [token for token in ids if not 0 <= token < self._vocab_size]
        if wrong:
            raise ConfigError(f"the input has the token {wrong[0]}; ids go from 0 to {self._vocab_size - 1}")
        if not 0 < len(ids) <= self.longest:
            raise ConfigError(
                f"the input has {len(ids)} tokens with those around it; the model takes 1 to {self.longest}; shorten it"
            )
        return ids

    @torch.inference_mode()
    def vectors(self, texts: Sequence[Sequence[int]], input_type: InputType) -> Tensor:
        """[texts, P] fp32 on the device, of each text's tokens. input_type: for models with an encoder for each."""
        tokens, seen = self.padded(texts)
        # The model may be one that is being trained.
        with evaluating(self.model):  # type: ignore[arg-type]
            return self.model.embed(tokens, seen, input_type).float()

    def embed(self, texts: Sequence[Sequence[int]], input_type: InputType) -> list[list[float]]:
        """`vectors` as numbers."""
        vectors: list[list[float]] = self.vectors(texts, input_type).tolist()
        return vectors

    def _framed(self, text: str) -> list[int]:
        ids, special = self._bare(text), self.tokenizer.special
        before = [] if special.cls is None else [special.cls]
        after = [] if special.sep is None else [special.sep]
        return [*before, *ids, *after]

    def padded(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """tokens, mask: [B, S] int64; mask 1 for tokens, 0 for padding"""
        # Padded to the longest of this batch, on the right.
        width = max(map(len, texts))
        tokens = torch.zeros(len(texts), width, dtype=torch.int64)
        seen = torch.zeros_like(tokens)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(list(text))
            seen[row, : len(text)] = 1
        return tokens.to(self._device), seen.to(self._device)
