"""Opening token files, and building the data sets of a split from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mt_core.errors import DataError
from mt_core.specs import Dataset, Split, SplitRequest, Tokenizer
from mt_data.datasets.blend import build_blend
from mt_data.datasets.config import BlendEntry, IndexedDataConfig
from mt_data.datasets.index_cache import IndexCache
from mt_data.datasets.raw_text import RawTextOptions, is_raw_text, tokenized
from mt_data.datasets.sources import SplitSources, cache_folder, split_sources
from mt_data.datasets.splits import WHOLE, SplitFractions
from mt_data.indexed.dataset import IndexedDataset
from mt_data.tokenizers.base import BaseTokenizer

BuiltSplit = Dataset | Mapping[str, Dataset] | None
"""A data set, several by name, or nothing."""


@dataclass(frozen=True)
class OpenedTokens:
    """A token file and the split that is requested of it."""

    reader: IndexedDataset
    name: str
    """As the configuration names it: a prefix, or a file of raw text."""
    fractions: SplitFractions
    split: Split
    cache: IndexCache

    def elements(self, count: int, what: str) -> range:
        """The elements of the split among `count` documents or sequences (`what`, for the message).

        Raises DataError when there are none.
        """
        # Contiguous, in the order of the file: Megatron shuffles only after the split.
        elements = self.fractions.range_of(self.split, count)
        if len(elements) == 0:
            shares = self.fractions
            raise DataError(
                f'the {self.split} split of {self.name} is empty: data.split="{shares.text}" gives it '
                f"{what} {elements.start} to {elements.stop} of {count}. Give {self.split} a larger share, add "
                f"{what}, or give it the share 0 and do without it"
                if count
                else f"{self.name} has no {what} at all"
            )
        return elements

    def cache_key(self, kind: str, elements: range, **parameters: Any) -> Mapping[str, Any]:
        """What decides an index over `elements`: the content of the file and the parameters."""
        return {
            "kind": kind,
            "data": self.reader.fingerprint(),
            "elements": [elements.start, elements.stop],
            **parameters,
        }


class MakeDataset(Protocol):
    """Makes the data set of one token file; num_samples None means one epoch."""

    def __call__(self, tokens: OpenedTokens, num_samples: int | None) -> Dataset: ...


def build_from_files(
    config: IndexedDataConfig,
    tokenizer: Tokenizer,
    request: SplitRequest,
    make: MakeDataset,
    *,
    raw_text: RawTextOptions | None = None,
) -> BuiltSplit:
    """The data set, or blend of data sets, of `request.split`; None for a split without data.

    With data.valid_data_paths the split "valid" is a mapping from name to data set.
    raw_text: how raw text is read; None takes token files only.
    Raises ConfigError or DataError, which name the file and the key to change.
    """

    def build(sources: SplitSources) -> Dataset:
        folder = cache_folder(config, sources.entries)
        cache = IndexCache(folder)

        def build_one(entry: BlendEntry, num_samples: int | None) -> Dataset:
            # Raw text is tokenized here, once for all three splits: its entry of the cache does not depend on the
            # split.
            prefix = _token_file(entry.prefix, config, tokenizer, raw_text, folder)
            reader = open_tokens(prefix, config, tokenizer)
            return make(OpenedTokens(reader, entry.prefix, sources.fractions, request.split, cache), num_samples)

        surplus = config.mid_level_dataset_surplus
        return build_blend(sources.entries, request, build_one, surplus=surplus, cache=cache)

    if request.split == "valid" and config.valid_data_paths is not None:
        return {name: build(SplitSources(entries, WHOLE)) for name, entries in config.valid_data_paths.items()}
    sources = split_sources(config, request.split)
    return None if sources is None else build(sources)


def _token_file(
    name: str, config: IndexedDataConfig, tokenizer: Tokenizer, raw_text: RawTextOptions | None, folder: Path
) -> str:
    """The prefix itself, or that of the tokens of a file of raw text."""
    if not is_raw_text(name, "auto" if raw_text is None else raw_text.input_format):
        return name
    if raw_text is None:
        raise DataError(
            f'{name} is raw text, which data.dataset_type="{config.dataset_type}" does not take; '
            "make token files of it with mt data preprocess and name their prefix"
        )
    return str(tokenized(name, raw_text, tokenizer, folder))


def open_tokens(prefix: str, config: IndexedDataConfig, tokenizer: Tokenizer) -> IndexedDataset:
    """Open a token file. Raises DataError when it is damaged or was made with another tokenizer."""
    reader = IndexedDataset(prefix, mmap=config.mmap_bin_files, verify_checksums=config.verify_checksums)
    if not config.accept_tokenizer_mismatch:
        _check_tokenizer(reader, tokenizer)
    return reader


def _check_tokenizer(reader: IndexedDataset, tokenizer: Tokenizer) -> None:
    manifest = reader.manifest()
    made_with = (manifest.tokenizer or {}) if manifest else {}
    # Files of Megatron record no tokenizer: nothing can be compared, and ids out of range are found when they are read.
    recorded = made_with.get("fingerprint")
    if recorded is None or recorded == tokenizer.fingerprint():
        return
    if not (isinstance(tokenizer, BaseTokenizer) and tokenizer.is_extension_of(recorded)):
        raise DataError(
            f"{reader.prefix} was tokenized with {made_with.get('tokenizer_type', 'a tokenizer')} (fingerprint "
            f"{recorded[:16]}, {made_with.get('vocab_size', '?')} ids), and the configured tokenizer is "
            f"{type(tokenizer).__name__} (fingerprint {tokenizer.fingerprint()[:16]}, {tokenizer.vocab_size} ids); "
            f"set the tokenizer section to the first one{_keys(made_with)}, preprocess the text again, or set "
            "data.accept_tokenizer_mismatch=true if the ids mean the same"
        )


def _keys(made_with: Mapping[str, Any]) -> str:
    """The keys that the recorded tokenizer was configured with; others had their default."""
    given = {"tokenizer_type": made_with.get("tokenizer_type"), **(made_with.get("config") or {})}
    keys = [f"tokenizer.{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    return f" ({', '.join(keys)}, and its other keys not set)" if made_with.get("config") else ""
