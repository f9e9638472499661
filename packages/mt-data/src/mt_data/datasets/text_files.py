"""Data sets that read and encode text files themselves, in place of indexed token files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import model_validator

from mt_core.config.schema import DataConfig
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Dataset, Split, SplitRequest, Tokenizer
from mt_data.datasets.blend import build_blend
from mt_data.datasets.cache import IndexCache
from mt_data.datasets.config import BlendEntry, IndexedDataConfig
from mt_data.datasets.opening import BuiltSplit, SplitSources, cache_folder, split_sources
from mt_data.datasets.splits import WHOLE, SplitFractions

Encode = Callable[[str], list[int]]
STREAM_KEYS = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
"""Keys that mean something only where samples are cut from a stream of documents."""


def refuse_unused(config: DataConfig, unused: Mapping[str, Any], why: str) -> None:
    """Raise ConfigError for a key that has another value than the given one, which would be ignored."""
    for key, value in unused.items():
        if getattr(config, key) != value:
            raise ConfigError(
                f"data.{key}={getattr(config, key)} has no effect with data.dataset_type="
                f'"{config.dataset_type}", {why}; remove data.{key}'
            )


class TextDataConfig(IndexedDataConfig):
    """The `*_data_path` keys name text files or folders."""

    @model_validator(mode="after")
    def _check_unused(self) -> TextDataConfig:
        of_token_files = {"mmap_bin_files": True, "verify_checksums": True, "accept_tokenizer_mismatch": False}
        refuse_unused(self, of_token_files, "which reads text")
        refuse_unused(self, STREAM_KEYS, "which cuts no samples from a stream of documents")
        return self


@dataclass(frozen=True)
class TextSource:
    """What one entry of a blend names, and the split that is requested of it."""

    name: str
    fractions: SplitFractions
    split: Split
    cache: IndexCache

    def elements(self, count: int, what: str) -> range:
        """The elements of the split among `count` (`what`, for the message); DataError when there are none."""
        elements = self.fractions.range_of(self.split, count)
        if not elements:
            raise DataError(
                f'the {self.split} split of {self.name} is empty: data.split="{self.fractions.text}" gives it none '
                f"of {count} {what}; give {self.split} a larger share, or 0 to do without it"
            )
        return elements


class MakeTextDataset(Protocol):
    """Makes the data set of one entry; num_samples None means one epoch."""

    def __call__(self, source: TextSource, num_samples: int | None) -> Dataset: ...


def build_from_text(config: TextDataConfig, request: SplitRequest, make: MakeTextDataset) -> BuiltSplit:
    """The data set, or blend of data sets, of `request.split`; None for a split without data.

    With data.valid_data_paths the split "valid" is a mapping from name to data set.
    """

    def build(sources: SplitSources) -> Dataset:
        cache = IndexCache(cache_folder(config, sources.entries))

        def build_one(entry: BlendEntry, num_samples: int | None) -> Dataset:
            return make(TextSource(entry.prefix, sources.fractions, request.split, cache), num_samples)

        return build_blend(sources.entries, request, build_one, surplus=config.mid_level_dataset_surplus, cache=cache)

    if request.split == "valid" and config.valid_data_paths is not None:
        return {name: build(SplitSources(entries, WHOLE)) for name, entries in config.valid_data_paths.items()}
    sources = split_sources(config, request.split)
    return None if sources is None else build(sources)


def bare_encoder(tokenizer: Tokenizer) -> Encode:
    """`tokenizer.encode` without the ids that some tokenizers put around each text, such as BOS or CLS and SEP.

    Raises ConfigError when it is not clear which ids those are.
    """
    before, after = map(len, ids_around(tokenizer))
    if not before + after:
        return tokenizer.encode

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text)
        return ids[before : len(ids) - after]

    return encode


def ids_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and behind each text. Raises ConfigError as `bare_encoder`."""
    added = tokenizer.encode("")
    if not added:
        return [], []
    before = _ids_before(tokenizer, added)
    return added[:before], added[before:]


def _ids_before(tokenizer: Tokenizer, added: list[int]) -> int:
    # Two texts that share no character: ids that both have at the beginning or end were put there by the tokenizer.
    probes = [tokenizer.encode(text) for text in ("a", "1 b")]
    for before in range(len(added), -1, -1):
        head, tail = added[:before], added[before:]
        if all(ids[:before] == head and ids[len(ids) - len(tail) :] == tail for ids in probes):
            return before
    raise ConfigError(
        f"the tokenizer puts the ids {added} around each text in a way that cannot be distinguished from the text's "
        "own; set it up to add none (tokenizer.tokenizer_hf_no_include_special_tokens=true for HuggingFaceTokenizer)"
    )
