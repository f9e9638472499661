"""LAMBADA (Paperno et al. 2016): whether a model predicts the last word of a passage, as Megatron-LM's task did it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from mt_core.errors import DataError
from mt_core.interfaces import Tokenizer
from mt_data.datasets.text_files import bare_encoder, ids_around
from mt_data.preprocess.readers import iter_records
from mt_eval.scoring import Continuation, cut_to, score
from mt_eval.tasks import Sample, weighted_mean
from mt_infer.text import TextGenerator


class Lambada:
    """A task (mt_eval.tasks.Task) whose samples are lines {"text": passage with its last word}.

    is_strict: the word is what follows the last white space, with all of its tokens; else only the last token of the
    passage is to be predicted. length: positions of the model; of a longer passage the end is used, and it counts as
    truncated. Raises DataError for a file that cannot be read, a line without a text or of one word alone; in `samples`
    for a word of more tokens than the model has positions.
    """

    name = "lambada"

    def __init__(
        self, path: Path, tokenizer: Tokenizer, length: int, *, is_strict: bool = True, limit: int | None = None
    ) -> None:
        self.path, self.length, self.is_strict, self.limit = path, length, is_strict, limit
        self._encode, (self._start, _) = bare_encoder(tokenizer), ids_around(tokenizer)
        self.passages = list(islice(_passages(path), limit))
        if not self.passages:
            raise DataError(f"{path} has no passage")

    @property
    def settings(self) -> Mapping[str, Any]:
        digest = sha256("\n".join(self.passages).encode()).hexdigest()
        return {
            "task": self.name,
            "data": str(self.path),
            "data_hash": digest,
            "strict": self.is_strict,
            "seq_length": self.length,
            "limit": self.limit,
        }

    def __len__(self) -> int:
        return len(self.passages)

    def samples(self, generator: TextGenerator, skip: int) -> Iterator[Sample]:
        """accuracy: 1 if each token of the word is the likeliest one; log_likelihood of the word."""
        left = [cut_to(self.length, self._continuation(number)) for number in range(skip, len(self))]
        scores = score(generator, (continuation for continuation, _ in left))
        for number, ((_, truncated), scored) in enumerate(zip(left, scores, strict=True), start=skip + 1):
            values = {"accuracy": float(all(scored.is_greedy)), "log_likelihood": sum(scored.logprobs)}
            yield Sample(f"line {number}", values, truncated=truncated)

    def metrics(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        return {metric: weighted_mean(samples, metric) for metric in ("accuracy", "log_likelihood")}

    def _continuation(self, number: int) -> Continuation:
        """Continuation of passage `number`, counted from 0. The last word's tokens are those that the passage has
        behind its context, as lm-evaluation-harness divides them. Raises DataError for a word without tokens, or with
        too many."""
        passage = self.passages[number]
        if not self.is_strict:
            tokens = [*self._start, *self._encode(passage)]
            return Continuation(tokens, len(tokens) - 1)
        word = passage.split()[-1]
        # strip: the white space before the word belongs to the word's first token.
        context = passage[: passage.rindex(word)].strip()
        # The whole passage is encoded once; encoding the word alone may give other tokens.
        tokens = [*self._start, *self._encode(f"{context} {word}")]
        # len(context) tokens are the context's only if no token joins both, as lm-evaluation-harness assumes too.
        first = len(self._start) + len(self._encode(context))
        if not 1 <= len(tokens) - first <= self.length:
            raise DataError(
                f"{self.path}, line {number + 1}: the last word has {len(tokens) - first} tokens; it must have from 1 "
                f"to {self.length}, which the model has positions for"
            )
        return Continuation(tokens, first)


def _passages(path: Path) -> Iterator[str]:
    for record in iter_records(path, input_format="jsonl"):
        text = record.value.get("text")
        if not isinstance(text, str) or len(text.split()) < 2:
            raise DataError(f'{record.file}, line {record.line}: needs "text", a passage of two words or more')
        yield text
