"""Questions with passages as samples of RETRO (RETRO_SAMPLE): one record in each, its answer counted in the loss."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt

from mt_core.errors import DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.cache import IndexCache, combined, file_checksum
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.retro.config import NeighborKeys
from mt_data.datasets.retro_sft.prompts import NeighborShape, PassagePrompts
from mt_data.datasets.retro_sft.records import QARecord, read_qa_records
from mt_data.datasets.sft.chat_templates import load_chat_template
from mt_data.datasets.sft.config import ChatTemplateKeys
from mt_data.datasets.sft.encoding import BadLines
from mt_data.datasets.splits import epoch_order
from mt_data.datasets.text_files import TextSource, build_from_text
from mt_data.preprocess.readers import expand_globs

# -- tokens, encoded once and kept in the index cache ------------------------------------------------


# -- configuration -----------------------------------------------------------------------------------


class RetroSFTDataConfig(NeighborKeys, ChatTemplateKeys):
    """Questions with answers and passages in JSON lines, or in JSON arrays as Megatron's `NAME_QA_train.json`."""

    dataset_type: str = "retro_sft"
    ft_neighbours: NonNegativeInt = 1
    """Passages in the prompt, before the question."""
    encode_passages: bool = True
    """Passages are neighbours of every chunk too, which the encoder reads; false: no chunk has neighbours."""
    reuse_top: bool = True
    """The neighbours are the first passages; false: those behind the ft_neighbours passages of the prompt."""
    on_too_long: Literal["truncate", "error"] = "truncate"
    """Where a question and its answer do not fit into seq_length without any passage in the prompt, the answer is cut
    at its end (and the record left out when nothing of it remains), or it is an error."""
    on_error: Literal["raise", "skip"] = "raise"
    """skip: leave out records that cannot be used, with a warning that counts them and names the first."""

    @property
    def neighbor_passages(self) -> slice:
        """Which passages of a record are neighbours."""
        first = 0 if self.reuse_top else self.ft_neighbours
        return slice(first, first + self.retro_num_neighbors if self.encode_passages else first)


FORMAT = 1
"""Raised when the same files give other arrays than before."""
KEYS = (
    "seq_length",
    "retro_chunk_length",
    "retro_num_neighbors",
    "retro_num_retrieved_chunks",
    "ft_neighbours",
    "encode_passages",
    "reuse_top",
    "on_too_long",
    "on_error",
)
"""Keys of the data section that change the arrays."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answers:
    """All records of some files that have something to learn, in order.

    tokens int32 [all tokens]: at most seq_length + 1 of a record; bounds int64 [records + 1]; first int64 [records]:
    place of the answer's first token in its record; neighbors int32 [records, K, r] and lengths int32 [records, K],
    without padding; file int32 and line int64 [records]: where each stands. left_out int64 [n, 2]: file and record of
    those without an answer within seq_length.
    """

    tokens: NDArray[np.int32]
    bounds: NDArray[np.int64]
    first: NDArray[np.int64]
    neighbors: NDArray[np.int32]
    lengths: NDArray[np.int32]
    file: NDArray[np.int32]
    line: NDArray[np.int64]
    left_out: NDArray[np.int64]
    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.first)

    def tokens_of(self, number: int) -> NDArray[np.int64]:
        return self.tokens[self.bounds[number] : self.bounds[number + 1]].astype(np.int64)

    def where(self, number: int) -> str:
        return f"{self.paths[self.file[number]]}, record {self.line[number]}"


def load_answers(
    pattern: str, config: RetroSFTDataConfig, tokenizer: Tokenizer, cache: IndexCache
) -> tuple[Answers, dict[str, Any]]:
    """The encoded records of the files that `pattern` names, and the cache key that stands for them.

    Raises DataError for missing files, for files in which nothing can be learned and, unless data.on_error is "skip",
    for the first record that cannot be used.
    """
    paths = expand_globs([pattern])
    template = load_chat_template(config.chat_template, config.chat_template_file, tokenizer, config.eod_after_answer)
    key = {
        "retro_sft": FORMAT,
        "files": [file_checksum(path) for path in paths],
        "tokenizer": tokenizer.fingerprint(),
        "template": template.fingerprint(),
        **{name: getattr(config, name) for name in KEYS},
    }
    prompts = PassagePrompts(tokenizer, template, config.retro_chunk_length)
    answers = Answers(**cache.get(key, lambda: _encode_files(paths, config, prompts)), paths=paths)
    if count := len(answers.left_out):
        file, line = answers.left_out[0].tolist()
        log.warning("%d records are left out; the first is %s, record %d", count, paths[file], line)
    return answers, key


def shape_of(config: RetroSFTDataConfig) -> NeighborShape:
    return NeighborShape(config.retro_chunk_length, config.retro_num_neighbors, config.retrieved_length)


def _encode_files(paths: Sequence[Path], config: RetroSFTDataConfig, prompts: PassagePrompts) -> dict[str, Any]:
    bad, gathered = BadLines(config.on_error), _Gathered(config, prompts)
    for file, record in _read(paths, bad):
        try:
            gathered.add(record, file)
        except DataError as error:
            bad.add(file, record.line, error)
    if not gathered.places:
        raise DataError(
            f"{', '.join(map(str, paths))}: no record has an answer within data.seq_length={config.seq_length}; make "
            "it larger, or name other files"
        )
    return gathered.arrays(bad.places)


def _read(paths: Sequence[Path], bad: BadLines) -> Iterator[tuple[int, QARecord]]:
    for file, path in enumerate(paths):
        for record in read_qa_records(path, partial(bad.add, file)):
            yield file, record


class _Gathered:
    """Records on their way into flat arrays."""

    def __init__(self, config: RetroSFTDataConfig, prompts: PassagePrompts) -> None:
        self.config, self.prompts, self.shape = config, prompts, shape_of(config)
        self.tokens: list[NDArray[np.int32]] = []
        self.neighbors: list[NDArray[np.int32]] = []
        self.lengths: list[NDArray[np.int32]] = []
        self.places: list[tuple[int, int, int]] = []
        self.left_out: list[tuple[int, int]] = []

    def add(self, record: QARecord, file: int) -> None:
        """Raises DataError for a record without an answer, and with on_too_long "error" for one that is too long."""
        config, positions = self.config, self.config.seq_length
        if not record.answers:
            self.left_out.append((file, record.line))
            return
        # One token more than positions, as the last token is a label alone.
        encoded = self.prompts.with_answer(record, record.passages[: config.ft_neighbours], positions + 1)
        if len(encoded.tokens) > positions + 1 and config.on_too_long == "error":
            raise DataError(
                f"{record.where}: question and answer have {len(encoded.tokens)} tokens, more than data.seq_length="
                f'{positions} and the last; make it larger, or cut such ones with data.on_too_long="truncate"'
            )
        # The answer's first token would be behind the last label.
        if encoded.first > positions:
            self.left_out.append((file, record.line))
            return
        self.tokens.append(np.array(encoded.tokens[: positions + 1], np.int32))
        ids, mask = self.shape.tokens(record.passages[config.neighbor_passages], self.prompts.encode)
        # [K, r] in int32, half of what samples hold; padding is restored from `lengths`.
        self.neighbors.append(ids.astype(np.int32))
        self.lengths.append(mask.sum(1, dtype=np.int32))
        self.places.append((encoded.first, file, record.line))

    def arrays(self, bad: list[tuple[int, int]]) -> dict[str, NDArray[Any]]:
        first, files, lines = np.array(self.places, np.int64).T
        sizes = [len(tokens) for tokens in self.tokens]
        return {
            "tokens": np.concatenate(self.tokens),
            "bounds": np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)]),
            "first": first.copy(),
            "neighbors": np.stack(self.neighbors),
            "lengths": np.stack(self.lengths),
            "file": files.astype(np.int32),
            "line": lines.copy(),
            "left_out": np.array(sorted([*self.left_out, *bad]), np.int64).reshape(-1, 2),
        }


class RetroSFTDataset:
    """Sample k is record `order[k]`: filler, prompt, answer and padding in seq_length positions; every chunk has the
    record's passages as neighbours."""

    def __init__(
        self,
        answers: Answers,
        order: NDArray[np.int64],
        shape: NeighborShape,
        *,
        sequence_length: int,
        pad: int,
        name: str,
        content: Mapping[str, Any],
    ) -> None:
        self.answers, self.order, self.shape = answers, order, shape
        self.sequence_length, self.pad = sequence_length, pad
        self.name, self.content = name, content

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        number = self._record(index)
        tokens = self.answers.tokens_of(number)
        # Positions, and the token at which the answer begins; it is the label of position first - 1.
        count, first = len(tokens) - 1, int(self.answers.first[number])
        sample: dict[str, np.ndarray] = {
            "tokens": np.full(self.sequence_length, self.pad, np.int64),
            "labels": np.full(self.sequence_length, self.pad, np.int64),
            "loss_mask": np.zeros(self.sequence_length, np.float32),
            "position_ids": np.arange(self.sequence_length, dtype=np.int64),
        }
        sample["tokens"][:count] = tokens[:-1]
        sample["labels"][:count] = tokens[1:]
        sample["loss_mask"][first - 1 : count] = 1.0
        return sample | self._neighbors(number)

    def fingerprint(self) -> str:
        """The content of the files, and how they become tokens."""
        return combined([self.content])

    def describe(self, index: int) -> str:
        return self.answers.where(self._record(index))

    def _neighbors(self, number: int) -> dict[str, NDArray[np.int64]]:
        ids = self.answers.neighbors[number].astype(np.int64)
        mask = (np.arange(ids.shape[1]) < self.answers.lengths[number][:, None]).astype(np.int64)
        every = {"neighbor_tokens": ids, "neighbor_mask": mask}
        # [chunks, K, r] from [K, r]
        return {name: self.shape.of_every_chunk(values, self.sequence_length) for name, values in every.items()}

    def _record(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self)} samples")
        return int(self.order[index])


def build_retro_sft(config: RetroSFTDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of RETRO_SAMPLE, in whole epochs; None for a split without data. Raises DataError as `load_answers`."""

    def make(source: TextSource, num_samples: int | None) -> RetroSFTDataset:
        answers, key = load_answers(source.name, config, tokenizer, source.cache)
        within = source.elements(len(answers), "records")
        order = within.start + epoch_order(len(within), num_samples, request.seed)
        special = tokenizer.special
        return RetroSFTDataset(
            answers,
            order,
            shape_of(config),
            sequence_length=request.sequence_length,
            pad=next((token for token in (special.pad, special.eod) if token is not None), 0),
            name=source.name,
            content=key,
        )

    return build_from_text(config, request, make)
