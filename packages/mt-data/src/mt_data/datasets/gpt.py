"""Samples for causal language models, cut from indexed token files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Split, SplitRequest, Tokenizer
from mt_core.wording import counted
from mt_data.datasets.cache import index_progress
from mt_data.datasets.config import IndexedDataConfig
from mt_data.datasets.gpt_index import GPTIndex, GPTIndexPlan, Progress, build_gpt_index
from mt_data.datasets.opening import BuiltSplit, MakeDataset, OpenedTokens, build_from_files
from mt_data.datasets.raw_text import RawTextOptions
from mt_data.datasets.samples import SampleRules, causal_sample
from mt_data.datasets.splits import WHOLE, SplitFractions, TokenRange, divides_documents, range_of_split
from mt_data.indexed.joined import JoinedReader
from mt_data.indexed.reader import SequenceReader
from mt_data.preprocess.encodings import check_encodings

# -- builder of the index: NumPy, or loops that numba compiles; the arrays are the same --------------

IndexEngine = Literal["auto", "numpy", "numba"]
WORTH_COMPILING = 20_000_000
"""Documents times epochs from which on the time that numba saves is more than the time that it takes to start."""


def build_index(
    engine: IndexEngine,
    elements: range,
    sequence_lengths: NDArray[np.int32],
    plan: GPTIndexPlan,
    progress: Progress | None = None,
) -> GPTIndex:
    """`gpt_index.build_gpt_index` by the engine; "auto" takes numba where it is installed and worth it, and says so.

    Raises ConfigError for "numba" where it is not installed.
    """
    chosen = _resolved(engine, len(elements) * plan.epochs)
    if chosen == "numpy":
        return build_gpt_index(elements, sequence_lengths, plan, progress)
    # Imports numba, which is an extra of mt-data and slow to import.
    from mt_data.datasets.compiled_index import build_compiled_index

    return build_compiled_index(elements, sequence_lengths, plan, progress)


def _resolved(engine: IndexEngine, count: int) -> Literal["numpy", "numba"]:
    installed = find_spec("numba") is not None
    if engine == "numba" and not installed:
        raise ConfigError(
            'data.index_engine="numba" needs numba: pip install "mt-data[fast]", or set "auto" or "numpy"'
        )
    if engine != "auto":
        return engine
    # Beyond 32 bits the compiled shuffle does not go.
    chosen: Literal["numpy", "numba"] = "numba" if installed and WORTH_COMPILING <= count <= 1 << 32 else "numpy"
    if count >= WORTH_COMPILING:
        log.info(
            'data.index_engine="auto" is %s for %d documents%s',
            chosen,
            count,
            "" if installed else ' (pip install "mt-data[fast]" for a faster one)',
        )
    return chosen


log = logging.getLogger(__name__)


class GPTDataConfig(IndexedDataConfig):
    """Windows of seq_length tokens over the shuffled documents, in Megatron's order for the same seed.

    A name in data_path that ends in .jsonl, .json, .ndjson, .txt, .md, .rst or .parquet (or one of these with .gz or
    .zst), a folder, or a pattern such as "notes/**/*.md" is raw text: it is tokenized first, once, into the cache
    folder.
    """

    dataset_type: str = "gpt"
    add_extra_token_to_sequence: bool = True
    """Read one token more than seq_length, so that the last position has its label. False predicts padding
    there, and no token is read twice."""
    drop_last_partial_validation_sequence: bool = True
    """False keeps the last validation sample, which padding fills up."""
    allow_ambiguous_pad_tokens: bool = False
    """Mask labels equal to the padding id although it is another special id too."""
    json_key: str = "text"
    """Field (or Parquet column) of raw text that holds the document."""
    input_format: Literal["auto", "jsonl", "text", "text-lines", "parquet"] = "auto"
    """Format of raw text. `auto`: by the ending of each file; any other is that of all files, whatever they are
    called."""
    encodings: list[str] = Field(["utf-8"])
    """Encodings of raw text, tried in turn on each file (on each line of JSON). A byte order mark goes before them.
    Name those of one byte a character, such as `cp1252`, last: nearly any file can be read in them."""
    tokenize_workers: PositiveInt | None = None
    """Processes that tokenize raw text. Default: the cores of this process, fewer for a small text. Does not change
    the tokens."""
    index_engine: IndexEngine = "auto"
    """What builds the index: `numpy`, `numba` (a third of the time, `pip install "mt-data[fast]"`), or `auto`: numba
    where it is installed and there are millions of documents. The arrays are the same."""

    @model_validator(mode="after")
    def _check_encodings(self) -> GPTDataConfig:
        check_encodings(self.encodings, "data.encodings")
        return self

    def raw_text_options(self) -> RawTextOptions:
        return RawTextOptions(self.json_key, self.tokenize_workers, tuple(self.encodings), self.input_format)


def build_gpt(config: GPTDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of CAUSAL_LM_SAMPLE for `request.split`; None when it has no data.

    A single data set has all samples of the epochs that hold num_samples, as Megatron's; a blend has about
    as many as requested. Raises ConfigError and DataError.
    """
    rules = SampleRules.of(config, tokenizer, config.allow_ambiguous_pad_tokens)

    def make(tokens: OpenedTokens, num_samples: int | None) -> GPTDataset:
        return gpt_over_file(tokens, num_samples, config, rules, request)

    return build_gpt_files(config, tokenizer, request, make)


def build_gpt_files(
    config: GPTDataConfig, tokenizer: Tokenizer, request: SplitRequest, make: MakeDataset
) -> BuiltSplit:
    """`build_from_files` for data sets whose `make` uses `gpt_over_file`."""

    def is_too_short(tokens: OpenedTokens) -> bool:
        return not _gives_each_split_a_sample(tokens, _tokens_of_a_sample(config, request))

    def is_indivisible(tokens: OpenedTokens) -> bool:
        return _split_without_documents(tokens, _tokens_of_a_sample(config, request)) is not None

    raw_text = config.raw_text_options()
    return build_from_files(
        config, tokenizer, request, make, raw_text=raw_text, is_too_short=is_too_short, is_indivisible=is_indivisible
    )


def gpt_over_file(
    tokens: OpenedTokens, num_samples: int | None, config: GPTDataConfig, rules: SampleRules, request: SplitRequest
) -> GPTDataset:
    """The samples of one token file; its sequences are what Megatron's GPT data set calls documents."""
    reader, source = tokens.reader, _part_of_split(tokens, config, request)
    lengths = source.sequence_lengths
    elements = source.elements if isinstance(source, TokenRange) else tokens.elements(len(lengths), "sequences")
    # Only the lengths of the split's own sequences: tokens_per_epoch, and with it the number of epochs, is the split's.
    plan = plan_index(
        lengths[elements.start : elements.stop],
        name=tokens.name,
        split=request.split,
        sequence_length=request.sequence_length,
        num_samples=num_samples,
        seed=request.seed,
        extra=int(config.add_extra_token_to_sequence),
        drop_last_partial=config.drop_last_partial_validation_sequence,
    )
    _warn_of_repeated_text(plan, tokens)

    def build() -> dict[str, NDArray[np.integer]]:
        # Two units a document: one for its step of the shuffle, one for the walk that cuts samples.
        with index_progress(
            f"GPT index of {tokens.name}, {request.split}", 2 * len(elements) * plan.epochs
        ) as progress:
            return build_index(config.index_engine, elements, lengths, plan, progress).arrays()

    # The engine is not part of the key: both give the same arrays.
    part = {"tokens": [source.begin, source.end]} if isinstance(source, TokenRange) else {}
    key = tokens.cache_key("gpt", elements, **plan.key(), **part)
    index = GPTIndex(**tokens.cache.get(key, build))
    return GPTDataset(source, index, plan, rules, tokens.name, lambda number: _document(reader, number))


def _part_of_split(tokens: OpenedTokens, config: GPTDataConfig, request: SplitRequest) -> TokenSource:
    """The token file, whose documents are divided as Megatron divides them; or the split's part of its tokens, where
    that would leave training or validation without a sample: of one long document, or a few short ones."""
    reader, fractions = tokens.reader, tokens.fractions
    shortest = _tokens_of_a_sample(config, request)
    if fractions is WHOLE or divides_documents(reader, fractions, shortest):
        _check_that_documents_can_be_divided(tokens, config, shortest)
        return reader
    part = range_of_split(reader, fractions, tokens.split)
    log.warning(
        '%s: %s, too few or too short for data.split="%s"; tokens are divided, %s has tokens %d to %d',
        tokens.name,
        counted(reader.num_documents, "document"),
        fractions.text,
        tokens.split,
        part.begin,
        part.end,
    )
    return part


def _check_that_documents_can_be_divided(tokens: OpenedTokens, config: GPTDataConfig, shortest: int) -> None:
    """Raise DataError for a text of no more than a sample, of which a split gets no document."""
    if (empty := _split_without_documents(tokens, shortest)) is not None:
        raise DataError(
            f"{tokens.name} has {tokens.num_tokens} tokens, no more than one sequence of "
            f"data.seq_length={config.seq_length} takes ({shortest}), and cannot be divided: the {empty} split is "
            'empty; add text, make data.seq_length smaller, or do without validation (data.split="1")'
        )


def _split_without_documents(tokens: OpenedTokens, shortest: int) -> Split | None:
    """A split that gets no document of a text of no more than a sample; None for a text that can be divided."""
    if not 0 < tokens.num_tokens <= shortest:
        return None
    count = len(tokens.reader.sequence_lengths)
    return next((split for split in _wanted(tokens.fractions) if not tokens.fractions.range_of(split, count)), None)


def _wanted(fractions: SplitFractions) -> list[Split]:
    splits: tuple[Split, ...] = ("train", "valid")
    return [split for split in splits if not fractions.is_zero(split)]


def _tokens_of_a_sample(config: GPTDataConfig, request: SplitRequest) -> int:
    """Fewest tokens of which training and validation can cut a sample."""
    extra = int(config.add_extra_token_to_sequence)
    return (request.sequence_length if config.drop_last_partial_validation_sequence else 1) + extra


def _gives_each_split_a_sample(tokens: OpenedTokens, shortest: int) -> bool:
    """Whether training and validation, where they have a share, get `shortest` tokens each."""
    fractions, total = tokens.fractions, tokens.num_tokens
    if fractions is WHOLE:
        return total >= shortest
    if total > shortest and divides_documents(tokens.reader, fractions, shortest):
        return True
    return all(len(fractions.range_of(split, total)) >= shortest for split in _wanted(fractions))


def _warn_of_repeated_text(plan: GPTIndexPlan, tokens: OpenedTokens) -> None:
    """Warn of a text that does not fill one sequence, whose samples all repeat it."""
    length = plan.sequence_length + plan.extra
    if plan.tokens_per_epoch >= length or plan.epochs == 1:
        return
    can_be_larger = tokens.split != "train" and tokens.fractions is not WHOLE
    share = f", or give {tokens.split} a larger share (data.split)" if can_be_larger else ""
    log.warning(
        "the %s split of %s has %d tokens, fewer than one sequence (data.seq_length=%d, which takes %d): it is "
        "repeated %d times in the %d samples of this run; add text, or make data.seq_length smaller%s",
        tokens.split,
        tokens.name,
        plan.tokens_per_epoch,
        plan.sequence_length,
        length,
        plan.epochs,
        plan.num_samples,
        share,
    )


def _document(reader: SequenceReader, sequence: int) -> str:
    if isinstance(reader, JoinedReader):
        part, number = reader.locate(sequence)
        return f"{reader.names[part]} {_document(reader.readers[part], number)}"
    # The document before the first boundary beyond the sequence; empty documents have no sequence.
    return f"document {int(np.searchsorted(reader.document_indices, sequence, side='right')) - 1}"


class TokenSource(Protocol):
    """What is read of an indexed dataset (mt_data.indexed); each sequence is a document."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]: ...

    def read(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...

    def fingerprint(self) -> str: ...


class GPTDataset:
    """Sample k is the k-th window of tokens in the order of `index`; see CAUSAL_LM_SAMPLE for its fields."""

    def __init__(
        self,
        source: TokenSource,
        index: GPTIndex,
        plan: GPTIndexPlan,
        rules: SampleRules,
        name: str,
        document_name: Callable[[int], str] = "document {}".format,
    ) -> None:
        self.source = source
        self.index = index
        self.plan = plan
        self.rules = rules
        self.name = name
        self._document_name = document_name

    def __len__(self) -> int:
        return len(self.index.shuffle_index)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return self.sample_of(self.window(index))

    def fingerprint(self) -> str:
        """The content of the token file."""
        return self.source.fingerprint()

    def sample_of(self, window: NDArray[np.int64]) -> dict[str, np.ndarray]:
        """The fields for a window [sequence_length + extra] of tokens."""
        if self.plan.extra:
            # Copies: causal_sample writes padding over into both, which as views of one window would overwrite each
            # other.
            return causal_sample(window[:-1].copy(), window[1:].copy(), self.rules)
        # Without the extra token the last label is outside of the window: padding, which the loss mask leaves out.
        labels = np.roll(window, -1)
        labels[-1] = self.rules.pad
        return causal_sample(window.copy(), labels, self.rules)

    def window(self, index: int) -> NDArray[np.int64]:
        """`tokens(index)`, padded at the end when the data is over: [sequence_length + extra]."""
        tokens = self.tokens(index)
        window = np.full(self.plan.sequence_length + self.plan.extra, self.rules.pad, np.int64)
        window[: len(tokens)] = tokens
        return window

    def tokens(self, index: int) -> NDArray[np.int64]:
        """The tokens of sample `index`: [sequence_length + extra], fewer when the data is over.

        Raises DataError for an id that the tokenizer does not have and for a file that is no longer what it was,
        and IndexError outside of [0, len).
        """
        parts = [self.source.read(*place) for place in self._places(index)]
        # [sequence_length + extra], from uint16 or int32
        tokens = np.concatenate(parts).astype(np.int64)
        # A whole document is read by its length in the file; longer than indexed means that the file was replaced.
        if len(tokens) > self.plan.sequence_length + self.plan.extra:
            raise DataError(
                f"sample {index} has {len(tokens)} tokens, more than its index says; {self.name} was written anew "
                "while it was read: start again"
            )
        # As unsigned numbers negative ids are the largest.
        if len(tokens) and tokens.view(np.uint64).max() >= self.rules.vocab_size:
            raise DataError(self._foreign_id(index, tokens))
        return tokens

    def _foreign_id(self, index: int, tokens: NDArray[np.int64]) -> str:
        place = int(np.flatnonzero(tokens.view(np.uint64) >= self.rules.vocab_size)[0])
        return (
            f"sample {index} has the id {tokens[place]} at position {place}, and the tokenizer has "
            f"{self.rules.vocab_size} ids; {self.describe(index)}. Configure the tokenizer that the data was made "
            "with, or preprocess the text again"
        )

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """(document, offset, length) of each piece of sample `index`, in order; empty ones are left out.

        Raises IndexError outside of [0, len).
        """
        lengths = self.source.sequence_lengths
        pieces = [
            (document, offset, int(lengths[document]) - offset if length is None else length)
            for document, offset, length in self._places(index)
        ]
        return [piece for piece in pieces if piece[2] > 0]

    def _places(self, index: int) -> list[tuple[int, int, int | None]]:
        """(document, offset, length) of each piece; length None is all the rest of the document."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self)} samples")
        # sample k -> row of sample_index -> two (position, offset) pairs -> positions of document_index -> (document,
        # offset).
        row = int(self.index.shuffle_index[index])
        (first, offset), (last, end) = self.index.sample_index[row : row + 2].tolist()
        documents = self.index.document_index[first : last + 1].tolist()
        # Row r + 1 says where the next sample starts, which is also read here as the last `extra` tokens of this one.
        if len(documents) == 1:
            return [(documents[0], offset, end - offset + self.plan.extra)]
        whole = [(document, 0, None) for document in documents[1:-1]]
        return [(documents[0], offset, None), *whole, (documents[-1], 0, end + self.plan.extra)]

    def describe(self, index: int) -> str:
        parts = [
            f"{self._document_name(document)} tokens {offset}..{offset + length - 1}"
            for document, offset, length in self.pieces(index)
        ]
        return f"{self.name}: {', '.join(parts)}"


def plan_index(
    lengths: NDArray[np.int32],
    *,
    name: str,
    split: Split,
    sequence_length: int,
    num_samples: int | None,
    seed: int,
    extra: int = 1,
    drop_last_partial: bool = True,
) -> GPTIndexPlan:
    """The plan for a split's documents; DataError when they hold too few tokens for a single sample."""
    tokens = int(lengths.sum(dtype=np.int64))
    if tokens == 0:
        raise DataError(
            f"the {split} split of {name} has {counted(len(lengths), 'document')} and no token at all; "
            "leave this data set out, or preprocess it again from documents that have text"
        )
    plan = GPTIndexPlan(
        tokens_per_epoch=tokens,
        sequence_length=sequence_length,
        num_samples=num_samples,
        seed=seed,
        extra=extra,
        drop_last_partial=drop_last_partial or split != "valid",
    )
    if plan.samples == 0:
        raise DataError(
            f"the {split} split of {name} has {tokens} tokens in {counted(len(lengths), 'document')}, too few for one "
            f"sample of data.seq_length={sequence_length} (which needs {sequence_length + extra}); "
            f'give {split} a larger share (data.split="80,20,0"), add text, or make data.seq_length smaller'
        )
    return plan
