"""Perplexity of a text in windows, for each token, byte and word."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer
from mt_eval.perplexity.texts import TextSet, read_documents
from mt_eval.scoring import Continuation, score
from mt_eval.tasks import Sample, weighted_mean
from mt_infer.text import TextGenerator

LARGEST_EXPONENT = 20.0
"""Megatron-LM's bound of a perplexity: exp(20)."""
LOG_LIKELIHOOD = "log_likelihood"


class Perplexity:
    """A task (mt_eval.tasks.Task) whose samples are windows.

    length: positions of the model. stride: see `windows`; default: no overlap. limit: the first windows only.
    Raises DataError and ConfigError for a text that cannot be read.
    """

    def __init__(
        self, texts: TextSet, tokenizer: Tokenizer, length: int, *, stride: int | None = None, limit: int | None = None
    ) -> None:
        self.texts, self.length, self.stride, self.limit = texts, length, stride or length, limit
        self.documents, self.data_hash = read_documents(texts, tokenizer)

    @property
    def name(self) -> str:
        return self.texts.name

    @property
    def settings(self) -> Mapping[str, Any]:
        return {
            "task": "perplexity",
            "data": self.texts.path,
            "data_hash": self.data_hash,
            "detokenizer": self.texts.detokenizer,
            "seq_length": self.length,
            "overlapping_eval": self.stride,
            "limit": self.limit,
        }

    def __len__(self) -> int:
        return len(self._windows)

    @cached_property
    def _windows(self) -> list[tuple[int, Window]]:
        """With the number of the document."""
        every = (
            (number, window)
            for number, document in enumerate(self.documents)
            for window in windows(len(document.tokens), self.length, self.stride)
        )
        return list(islice(every, self.limit))

    def samples(self, generator: TextGenerator, skip: int) -> Iterator[Sample]:
        """The log-likelihood of a token of each window, weighted by the number of its targets."""
        left = self._windows[skip:]
        scores = score(generator, (self._continuation(number, window) for number, window in left))
        for (number, window), scored in zip(left, scores, strict=True):
            # Per token and weighted by the tokens, so that the weighted mean over windows is that over tokens.
            mean = math.fsum(scored.logprobs) / window.targets
            yield Sample(f"document {number}, token {window.first}", {LOG_LIKELIHOOD: mean}, window.targets)

    def _continuation(self, number: int, window: Window) -> Continuation:
        # The end is exclusive: the last token is a target and no input.
        tokens = self.documents[number].tokens[window.start : window.end].tolist()
        return Continuation(tokens, window.first - window.start)

    def metrics(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        """perplexity of a token, byte_perplexity and bits_per_byte, word_perplexity (of whitespace-separated words; for
        WikiText Megatron-LM's adjusted perplexity), token_ratio (tokens of a word). A limit leaves out those of bytes
        and words, whose numbers are of whole texts."""
        loss = -weighted_mean(samples, LOG_LIKELIHOOD)
        tokens = sum(sample.weight for sample in samples)
        of_tokens = {"loss": loss, "perplexity": bounded_exp(loss), "tokens": tokens}
        if self.limit is not None:
            return of_tokens
        num_bytes = sum(document.num_bytes for document in self.documents)
        words = sum(document.num_words for document in self.documents)
        return {
            **of_tokens,
            # loss * tokens is the log-likelihood of the whole text; it is divided by another unit.
            "byte_perplexity": bounded_exp(loss * tokens / max(1, num_bytes)),
            "bits_per_byte": loss * tokens / max(1, num_bytes) / math.log(2),
            "word_perplexity": bounded_exp(loss * tokens / max(1, words)),
            "token_ratio": tokens / max(1, words),
            "bytes": num_bytes,
            "words": words,
        }


def bounded_exp(loss: float) -> float:
    return math.exp(min(LARGEST_EXPONENT, loss))


# -- windows of a model's length, which predict each token once --------------------------------------


@dataclass(frozen=True)
class Window:
    """Numbers of tokens: the model is given those from `start` to `end` (exclusive), the last one as a target only, and
    predicts those from `first` on."""

    start: int
    first: int
    end: int

    @property
    def targets(self) -> int:
        return self.end - self.first


def windows(num_tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Over a text whose first token is not predicted.

    length: positions of the model. stride: targets of each window but the first, which has `length`; with stride ==
    length windows do not overlap. Window i begins at token i * stride, as in Megatron-LM's zero-shot tasks. Raises
    ConfigError for a stride above the length, which would leave tokens out.
    """
    if not 1 <= stride <= length:
        raise ConfigError(f"overlapping_eval={stride} must be from 1 to the window's {length} tokens")
    start, first = 0, 1
    while first < num_tokens:
        # length inputs and one more token, which is a target only.
        end = min(start + length + 1, num_tokens)
        # length 4, stride 2, 8 tokens: [0, 5) predicts 1 to 4, [2, 7) predicts 5 and 6, [4, 8) predicts 7.
        yield Window(start, first, end)
        start, first = start + stride, end
