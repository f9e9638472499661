"""Questions, answered with passages in the prompt and as neighbours of chunks, and scored against right answers."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.errors import DataError
from mt_data.datasets.retro.config import NeighborKeys
from mt_data.datasets.retro_sft.dataset import RetroSFTDataConfig
from mt_data.datasets.retro_sft.prompts import NeighborShape, PassagePrompts
from mt_data.datasets.retro_sft.records import QARecord, passage_text, read_qa_records
from mt_data.datasets.sft.chat_templates import load_chat_template
from mt_data.datasets.sft.config import SFTDataConfig
from mt_data.preprocess.readers import expand_globs
from mt_eval.metrics.texts import exact_match, f1, normalized_answer
from mt_eval.tasks import Sample, weighted_mean
from mt_infer.in_order import complete
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

# -- comparison of answers, as in Megatron-LM's evaluation of InstructRetro --------------------------

NO_ANSWER = "no_passages_used"
"""A right answer of Megatron's files that stands for none."""
_CUE = re.compile(r"^\s*(?:the\s+)?(?:answer|a)\s*(?:is)?\s*:\s*", re.IGNORECASE)
_SPACES = str.maketrans(dict.fromkeys(string.punctuation, " "))


def prediction_of(text: str) -> str:
    """Generated text on one line, without a cue such as "Answer:" at its beginning."""
    return " ".join(_CUE.sub("", text).split())


def f1_of_first(prediction: str, answers: Sequence[str]) -> float | None:
    """F1 over words with the first right answer, from 0 to 1; punctuation separates words. None without an answer."""
    # Megatron-LM's script compares with the first answer only.
    answer = "" if answers[0] == NO_ANSWER else answers[0]
    right = _words(answer)
    if not right:
        # A question without a right answer is left out of the mean.
        return None
    predicted = _words(prediction)
    shared = sum((Counter(predicted) & Counter(right)).values())
    return 2 * shared / (len(predicted) + len(right))


def _words(text: str) -> list[str]:
    # Punctuation separates words here, in SQuAD's normalization it is removed ("New-York").
    return normalized_answer(text.translate(_SPACES)).split()


METRICS = ("exact_match", "f1", "f1_of_first")
QUESTIONS = 64
"""For which passages are retrieved at a time."""


def question_data(config: Config, keys: Mapping[str, Any]) -> RetroSFTDataConfig:
    """How questions become prompts: as in training, where that was on questions with passages; else with the template
    of its conversations, or plain. keys: in place of those."""
    data = config.data
    if isinstance(data, RetroSFTDataConfig):
        return RetroSFTDataConfig.model_validate(data.model_dump(exclude_unset=True) | dict(keys))
    # Keys of chunks and neighbours that the model was built with.
    shape = [key for key in NeighborKeys.model_fields if key.startswith("retro_") and hasattr(config.model, key)]
    known = {key: getattr(config.model, key) for key in shape}
    # Any multiple of the chunk length.
    known["seq_length"] = known.get("retro_chunk_length", 64)
    template = {"chat_template": "plain"}
    if isinstance(data, SFTDataConfig):
        template = data.model_dump(include={"chat_template", "chat_template_file", "eod_after_answer"})
    return RetroSFTDataConfig.model_validate(known | template | dict(keys))


class PassageRetriever(Protocol):
    """Finds passages for questions; plugins register it as a thing of the kind passage_retrievers of mt-retrieval."""

    def passages(self, questions: Sequence[str], k: int) -> list[list[tuple[str, str]]]:
        """For each question the (title, text) of k passages at most, the best first."""
        ...

    def description(self) -> Mapping[str, Any]:
        """JSON values that say what is searched, for results."""
        ...


class QuestionAnswering:
    """A task (mt_eval.tasks.Task) whose samples are records of the data set retro_sft.

    Any decoder answers: one without chunks has passages in the prompt only. keys: of the data set, in place of those of
    training. with_passages: False leaves all passages out. retriever: finds top_k passages, in place of those of the
    files. Raises DataError for files without records, and for a record that cannot be used.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        generator: TextGenerator,
        *,
        keys: Mapping[str, Any],
        sampling: SamplingParameters,
        with_passages: bool = True,
        retriever: PassageRetriever | None = None,
        top_k: int = 5,
        limit: int | None = None,
    ) -> None:
        self.patterns, self.sampling, self.limit = list(patterns), sampling, limit
        self.name = "qa" if with_passages else "qa without passages"
        self.with_passages, self.retriever, self.top_k = with_passages, retriever, top_k
        self.data = question_data(generator.config, keys)
        self.shape: NeighborShape | None = None
        # Models that take no neighbours get passages in the prompt alone.
        if "neighbor_tokens" in generator.prompts.conditioned_by:
            self.shape = NeighborShape(
                self.data.retro_chunk_length, self.data.retro_num_neighbors, self.data.retrieved_length
            )
        template = load_chat_template(
            self.data.chat_template, self.data.chat_template_file, generator.tokenizer, self.data.eod_after_answer
        )
        self.template_hash = template.fingerprint()
        # The prompt is padded so that the answer begins with a chunk, whose neighbours are then known.
        chunk_length = self.data.retro_chunk_length if self.shape is not None else 1
        self.prompts = PassagePrompts(generator.tokenizer, template, chunk_length)
        records = (record for path in expand_globs(self.patterns) for record in read_qa_records(path))
        self.records = list(islice(records, limit))
        if not self.records:
            raise DataError(f"{', '.join(patterns)} has no record")

    @property
    def settings(self) -> Mapping[str, Any]:
        content = [(record.messages, record.answers, record.passages) for record in self.records]
        return {
            "task": self.name,
            "data": self.patterns,
            "data_hash": sha256(repr(content).encode()).hexdigest(),
            "template_hash": self.template_hash,
            "ft_neighbours": self.data.ft_neighbours,
            "neighbors": [self.data.neighbor_passages.start, self.data.neighbor_passages.stop],
            "retriever": None if self.retriever is None else {**self.retriever.description(), "top_k": self.top_k},
            "max_tokens": self.sampling.max_tokens,
            "stop": list(self.sampling.stop),
            "limit": self.limit,
        }

    def __len__(self) -> int:
        return len(self.records)

    def samples(self, generator: TextGenerator, skip: int) -> Iterator[Sample]:
        """Each generated answer with its scores. A record without a right answer, or too long for the model, is a
        sample with an error."""
        # In batches: a retriever answers many questions faster than one by one.
        for start in range(skip, len(self.records), QUESTIONS):
            records = self.records[start : start + QUESTIONS]
            requests = [
                self._request(record, passages, generator.longest)
                for record, passages in zip(records, self._passages(records), strict=True)
            ]
            usable = (request for request in requests if request.error is None)
            answers = complete(generator, ((request.tokens, self.sampling, request.inputs) for request in usable))
            for request in requests:
                # next: `answers` has an entry for each usable request, in order.
                yield request.failed if request.error is not None else request.answered(next(answers).text)

    def metrics(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        return {metric: weighted_mean(samples, metric) for metric in METRICS}

    def _passages(self, records: Sequence[QARecord]) -> list[Sequence[str]]:
        if not self.with_passages:
            return [()] * len(records)
        if self.retriever is None:
            return [record.passages for record in records]
        retrieved = self.retriever.passages([record.question for record in records], self.top_k)
        return [[passage_text(title, text) for title, text in passages] for passages in retrieved]

    def _request(self, record: QARecord, passages: Sequence[str], longest: int) -> Request:
        if not record.answers:
            return Request(record, error="it has no answers to compare with")
        # Positions are kept free for the answer, and the passages are cut to what is left.
        answer = self.sampling.max_tokens or 0
        tokens = self.prompts.prompt(record, passages[: self.data.ft_neighbours], longest - answer)
        if (needed := len(tokens) + answer) > longest:
            return Request(record, error=f"{needed} positions, and the model has {longest}")
        return Request(record, tokens, self._neighbors(passages, needed), len(passages))

    def _neighbors(self, passages: Sequence[str], positions: int) -> dict[str, Tensor]:
        """Fields with the neighbours of every chunk of the prompt and of the answer."""
        wanted = passages[self.data.neighbor_passages]
        if self.shape is None or not wanted:
            return {}
        names = ("neighbor_tokens", "neighbor_mask")
        # The same passages for every chunk: [neighbours, length] -> [1, chunks, neighbours, length].
        of_chunk = self.shape.tokens(wanted, self.prompts.encode)
        every = (torch.from_numpy(self.shape.of_every_chunk(array, positions))[None] for array in of_chunk)
        return dict(zip(names, every, strict=True))


@dataclass(frozen=True)
class Request:
    """A record as a prompt; or why it cannot be one. passages: how many it has."""

    record: QARecord
    tokens: list[int] = field(default_factory=list)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    passages: int = 0
    error: str | None = None

    @property
    def failed(self) -> Sample:
        return Sample(self.record.where, error=self.error)

    def answered(self, text: str) -> Sample:
        prediction, right = prediction_of(text), self.record.answers
        scores = {"exact_match": exact_match(prediction, right), "f1": f1(prediction, right)}
        first = f1_of_first(prediction, right)
        values = scores if first is None else scores | {"f1_of_first": first}
        details = {"prediction": prediction, "answers": list(right), "passages": self.passages}
        return Sample(self.record.where, values, details=details)
