"""Samples for the inverse cloze task: a sentence as the query, the block of text around it as its context.

Blocks and their order are those of Megatron's REALM data set for the same seed. Which sentence is the query,
and whether it stays in its block, depends on the seed and the number of the sample only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from mt_core.config.fields import Probability
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.cache import combined
from mt_data.datasets.config import IndexedDataConfig
from mt_data.datasets.opening import BuiltSplit, OpenedTokens, build_from_files, open_tokens
from mt_data.datasets.pair_encoding import special_ids
from mt_data.datasets.sentences import BlockIndexPlan, SentenceDataset, SentenceSamples, build_block_index
from mt_data.datasets.text_files import STREAM_KEYS, refuse_unused
from mt_data.indexed.reader import SequenceReader

SPECIAL_PLACES = 3
"""CLS, and SEP after title and block."""
SENTENCES, TITLES = "_text_sentence", "_title_document"
"""Endings of what preprocessing with --json-keys text --split-sentences and with --json-keys title writes."""


class ICTDataConfig(IndexedDataConfig):
    """Blocks of sentences with the title of their document, and a sentence of each as the query."""

    dataset_type: str = "ict"
    titles_data_path: str | None = None
    """Token files of the titles, one for each document. Default: each data set's prefix with
    `_title_document` in place of `_text_sentence`."""
    query_in_block_prob: Probability = 0.1
    """How often the query stays in its block; otherwise it is taken out of it."""
    use_one_sent_docs: bool = False
    """Take documents and blocks of a single sentence too; such a block keeps its query."""

    @model_validator(mode="after")
    def _check_unused(self) -> ICTDataConfig:
        refuse_unused(self, STREAM_KEYS, "whose samples hold one document each")
        return self

    def titles_of(self, name: str) -> str:
        """The prefix of the titles of the data set `name`."""
        if self.titles_data_path is not None:
            return self.titles_data_path
        if not name.endswith(SENTENCES):
            raise ConfigError(
                f"data.titles_data_path must name the titles of {name}, whose name does not end in {SENTENCES}"
            )
        return name.removesuffix(SENTENCES) + TITLES


class Titles:
    """The title of each document: the sequences of one document, one after the other."""

    def __init__(self, source: SequenceReader, name: str) -> None:
        self.source = source
        self.name = name

    def __len__(self) -> int:
        return len(self.source.document_indices) - 1

    def __getitem__(self, document: int) -> NDArray[np.int64]:
        first, end = self.source.document_indices[document : document + 2].tolist()
        parts = [self.source.read(number).astype(np.int64) for number in range(first, end)]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def lengths(self) -> NDArray[np.int64]:
        """[documents]: tokens of each title."""
        before = np.concatenate([[0], np.cumsum(self.source.sequence_lengths, dtype=np.int64)])
        return np.diff(before[self.source.document_indices])


@dataclass(frozen=True)
class ICTRules:
    """query_in_block_prob: how often the query stays in its block."""

    sequence_length: int
    query_in_block_prob: float
    seed: int
    cls: int
    sep: int
    pad: int


class ICTDataset(SentenceDataset):
    """Sample k is made of row k of the block index (first, end, document, block)."""

    def __init__(self, samples: SentenceSamples, titles: Titles, rules: ICTRules) -> None:
        super().__init__(samples)
        self.titles = titles
        self.rules = rules

    def fingerprint(self) -> str:
        """The content of the two token files."""
        return combined([self.samples.fingerprint(), self.titles.source.fingerprint()])

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        row = self.samples.row(index)
        block = self.samples.sentences(index)
        random = sample_random(self.rules.seed, index)
        chosen = int(random.randint(0, len(block)))
        query = block[chosen]
        # A block of one sentence keeps it: without it there would be nothing to find.
        if random.random_sample() >= self.rules.query_in_block_prob and len(block) > 1:
            del block[chosen]
        return {
            **self._sequence("query", [query[: self.rules.sequence_length - 2]]),
            **self.context(block, row[2]),
            "block_data": np.array(row, np.int64),
            "loss_mask": np.array(1, np.float32),
        }

    def context(self, block: list[NDArray[np.int64]], document: int) -> dict[str, NDArray[np.int64]]:
        """The context_* fields of a block of sentences of `document`."""
        title = self.titles[document]
        # At least 1: _checked_title_lengths has refused longer titles.
        room = self.rules.sequence_length - SPECIAL_PLACES - len(title)
        return self._sequence("context", [title, np.concatenate(block)[:room]])

    def _sequence(self, name: str, parts: list[NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
        """CLS, then each part with a SEP after it, padded."""
        rules = self.rules
        joined = [rules.cls]
        for part in parts:
            # At most sequence_length: query and block were cut by the callers.
            joined += [*part.tolist(), rules.sep]
        tokens = np.full(rules.sequence_length, rules.pad, np.int64)
        tokens[: len(joined)] = joined
        return {
            f"{name}_tokens": tokens,
            f"{name}_tokentype_ids": np.zeros(rules.sequence_length, np.int64),
            f"{name}_padding_mask": (np.arange(rules.sequence_length) < len(joined)).astype(np.int64),
        }


def sample_random(seed: int, index: int) -> np.random.RandomState:
    """The random state of one sample. NumPy keeps the numbers of RandomState the same for ever."""
    # A list seeds by all of its 32-bit words, so neighbouring seeds and samples do not share streams.
    return np.random.RandomState([seed % 2**32, index % 2**32, index // 2**32])


def build_ict(config: ICTDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of ICT_SAMPLE; None for a split without data.

    Raises ConfigError for a tokenizer without CLS, SEP or PAD, DataError for titles that do not fit the
    documents or leave a block no room.
    """
    ids = special_ids(tokenizer, ("cls", "sep", "pad"), config.dataset_type)
    rules = ICTRules(request.sequence_length, config.query_in_block_prob, request.seed, **ids)

    def make(tokens: OpenedTokens, num_samples: int | None) -> ICTDataset:
        name = config.titles_of(tokens.name)
        titles = Titles(open_tokens(name, config, tokenizer), name)
        rows = _block_index(tokens, titles, config, request, num_samples)
        return ICTDataset(SentenceSamples(tokens.reader, rows, tokenizer.vocab_size, tokens.name), titles, rules)

    return build_from_files(config, tokenizer, request, make)


def _block_index(
    tokens: OpenedTokens, titles: Titles, config: ICTDataConfig, request: SplitRequest, num_samples: int | None
) -> NDArray[np.unsignedinteger]:
    reader = tokens.reader
    elements = tokens.elements(reader.num_documents, "documents")
    lengths = _checked_title_lengths(titles, tokens, request.sequence_length)
    plan = BlockIndexPlan(
        max_length=request.sequence_length - SPECIAL_PLACES,
        min_sentences=1 if config.use_one_sent_docs else 2,
        num_samples=num_samples,
        seed=request.seed,
    )

    def build() -> dict[str, NDArray[np.unsignedinteger]]:
        within = slice(elements.start, elements.stop)
        bounds = reader.document_indices[elements.start : elements.stop + 1]
        rows = build_block_index(bounds, reader.sequence_lengths, lengths[within], plan)
        # Documents are counted from the first of the file.
        rows[:, 2] += rows.dtype.type(elements.start)
        return {"blocks": rows}

    key = tokens.cache_key("blocks", elements, titles=titles.source.fingerprint(), **asdict(plan))
    return tokens.cache.get(key, build)["blocks"]


def _checked_title_lengths(titles: Titles, tokens: OpenedTokens, sequence_length: int) -> NDArray[np.int64]:
    documents = tokens.reader.num_documents
    if len(titles) != documents:
        raise DataError(
            f"{titles.name} has {len(titles)} titles and {tokens.name} has {documents} documents; make both "
            "from the same file: mt data preprocess --json-keys text --split-sentences, and again with --json-keys "
            "title alone"
        )
    lengths = titles.lengths()
    longest = int(lengths.argmax()) if len(lengths) else 0
    if len(lengths) and lengths[longest] >= sequence_length - SPECIAL_PLACES:
        raise DataError(
            f"{titles.name}, document {longest}: the title has {lengths[longest]} tokens, which leaves its blocks "
            f"nothing of data.seq_length={sequence_length} (three places are for CLS and SEP); make "
            "data.seq_length larger, or shorten the title"
        )
    return lengths
