"""Opening token files, and building the data sets of a split from them."""

from __future__ import annotations

import functools
import glob
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Dataset, Split, SplitRequest, Tokenizer
from mt_core.paths import as_path
from mt_data.datasets.blend import build_blend
from mt_data.datasets.cache import IndexCache
from mt_data.datasets.config import DEFAULT_SPLIT, Blend, BlendEntry, IndexedDataConfig, check_blend, is_number
from mt_data.datasets.raw_text import RawTextOptions, is_raw_text, tokenized
from mt_data.datasets.splits import SPLITS, WHOLE, SplitFractions, parse_split
from mt_data.indexed.dataset import IndexedDataset
from mt_data.indexed.joined import JoinedReader
from mt_data.indexed.reader import SequenceReader
from mt_data.indexed.storage import is_remote
from mt_data.tokenizers.base import BaseTokenizer

log = logging.getLogger(__name__)

BuiltSplit = Dataset | Mapping[str, Dataset] | None
"""A data set, several by name, or nothing."""


@dataclass(frozen=True)
class OpenedTokens:
    """A token file (or several that are read as one) and the split that is requested of it."""

    reader: SequenceReader
    name: str
    """Name in the configuration: a prefix, or a file of raw text."""
    fractions: SplitFractions
    split: Split
    cache: IndexCache

    @property
    def num_tokens(self) -> int:
        """Tokens of all splits."""
        return int(self.reader.sequence_lengths.sum(dtype=np.int64))

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
    is_too_short: Callable[[OpenedTokens], bool] | None = None,
    is_indivisible: Callable[[OpenedTokens], bool] = lambda tokens: False,
) -> BuiltSplit:
    """The data set, or blend of data sets, of `request.split`; None for a split without data.

    With data.valid_data_paths the split "valid" is a mapping from name to data set.
    raw_text: how raw text is read; None takes token files only.
    is_too_short: whether a token file cannot give each split a sample. Where one of several without weights is, they
        are read as one file. It must not depend on `request.split`, so that splits stay apart.
    is_indivisible: whether a token file has no part for one of the splits, whichever is requested. Among others with
        weights it is used for training as a whole, and for nothing else.
    Raises ConfigError or DataError, which name the file and the key to change.
    """

    def build(sources: SplitSources) -> Dataset:
        folder = cache_folder(config, sources.entries)
        cache = IndexCache(folder)
        weighted = len(sources.entries) > 1 and sources.entries[0].weight is not None

        @functools.cache
        def open_one(name: str) -> OpenedTokens:
            # Raw text is tokenized here, once for all three splits: its entry of the cache does not depend on the
            # split.
            prefix = _token_file(name, config, tokenizer, raw_text, folder)
            reader = open_tokens(prefix, config, tokenizer)
            tokens = OpenedTokens(reader, name, sources.fractions, request.split, cache)
            is_whole = weighted and request.split == "train" and is_indivisible(tokens)
            return replace(tokens, fractions=WHOLE) if is_whole else tokens

        def build_one(entry: BlendEntry, num_samples: int | None) -> Dataset:
            return make(open_one(entry.prefix), num_samples)

        if is_too_short is not None and _could_be_one(sources.entries):
            opened = [open_one(entry.prefix) for entry in sources.entries]
            if short := [tokens.name for tokens in opened if is_too_short(tokens)]:
                return make(_joined(opened, short), request.num_samples)
        entries, surplus = sources.entries, config.mid_level_dataset_surplus
        if weighted and sources.fractions is not WHOLE:
            entries = _divided(entries, [open_one(entry.prefix) for entry in entries], is_indivisible)
        return build_blend(entries, request, build_one, surplus=surplus, cache=cache)

    if request.split == "valid" and config.valid_data_paths is not None:
        return {name: build(SplitSources(entries, WHOLE)) for name, entries in config.valid_data_paths.items()}
    sources = split_sources(config, request.split)
    return None if sources is None else build(sources)


def _could_be_one(entries: Sequence[BlendEntry]) -> bool:
    return len(entries) > 1 and all(entry.weight is None and entry.samples is None for entry in entries)


def _joined(opened: Sequence[OpenedTokens], short: Sequence[str]) -> OpenedTokens:
    """The token files one after another, as the files of a folder are; `short` are the names that are too short."""
    names = [tokens.name for tokens in opened]
    # Once for a corpus: its other splits are read in the same way.
    if opened[0].split == "train" or opened[0].fractions is WHOLE:
        log.warning(
            "%s: too short to give each split a sample, so that the %d data sets without weights are read as one text",
            _listed(short),
            len(names),
        )
    reader = JoinedReader([tokens.reader for tokens in opened], names)
    return replace(opened[0], reader=reader, name=_listed(names))


def _divided(
    entries: Sequence[BlendEntry], opened: Sequence[OpenedTokens], is_indivisible: Callable[[OpenedTokens], bool]
) -> Sequence[BlendEntry]:
    """The data sets of a blend with weights that have a part for the split that `opened` is of."""
    whole = [tokens.name for tokens in opened if tokens.fractions is WHOLE]
    if whole:  # of the training split
        log.warning(
            "%s: too short to divide, so that training takes all of it and validation has the others", _listed(whole)
        )
    divided = [entry for entry, tokens in zip(entries, opened, strict=True) if not is_indivisible(tokens)]
    return divided or entries  # where none can be divided, the first one is refused


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"


def _token_file(
    name: str, config: IndexedDataConfig, tokenizer: Tokenizer, raw_text: RawTextOptions | None, folder: Path
) -> str:
    """The prefix itself, or that of the tokens of a file of raw text."""
    if not is_raw_text(name, "auto" if raw_text is None else raw_text.input_format):
        _refuse_unknown_text(name, raw_text)
        return name
    if raw_text is None:
        raise DataError(
            f'{name} is raw text, which data.dataset_type="{config.dataset_type}" does not take; '
            "make token files of it with mt data preprocess and name their prefix"
        )
    return str(tokenized(name, raw_text, tokenizer, folder))


def _refuse_unknown_text(name: str, raw_text: RawTextOptions | None) -> None:
    """Raises DataError for a file that is no token file and whose ending does not say that it is text."""
    if as_path(name).is_file() and not as_path(f"{name}.idx").exists():
        how = "make token files of it with mt data preprocess --input-format text"
        if raw_text is not None:
            how = 'set data.input_format="text" (or jsonl, text-lines, parquet)'
        raise DataError(
            f"{name} is a file whose ending does not say its format; {how}, or name a prefix of token files"
        )


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
    entries = {"tokenizer_type": made_with.get("tokenizer_type"), **(made_with.get("config") or {})}
    keys = [f"tokenizer.{key}={json.dumps(value)}" for key, value in entries.items() if value is not None]
    return f" ({', '.join(keys)}, and its other keys not set)" if made_with.get("config") else ""


# -- token files of a split, from the configuration --------------------------------------------------


@dataclass(frozen=True)
class SplitSources:
    """The data sets of a split and the part of each one's documents that belongs to it."""

    entries: Sequence[BlendEntry]
    fractions: SplitFractions


def split_sources(config: IndexedDataConfig, split: Split) -> SplitSources | None:
    """Where the documents of `split` lie; None when the configuration gives it no data.

    Sets named by data.valid_data_paths are not among them. Raises ConfigError when no data is named at all,
    DataError for an unreadable list.
    """
    if config.data_path is not None or config.data_args_path is not None:
        fractions = parse_split(config.split or DEFAULT_SPLIT)
        entries: Sequence[BlendEntry] = config.data_path or _read_args_file(Path(str(config.data_args_path)))
        return None if fractions.is_zero(split) else SplitSources(entries, fractions)
    split_entries = _entries_of_split(config, split)
    return SplitSources(split_entries, WHOLE) if split_entries else None


def _entries_of_split(config: IndexedDataConfig, split: Split) -> Sequence[BlendEntry]:
    if config.per_split_data_args_path is not None:
        return _read_split_file(Path(config.per_split_data_args_path)).get(split, [])
    blends: dict[Split, Blend | None] = {
        "train": config.train_data_path,
        "valid": config.valid_data_path,
        "test": config.test_data_path,
    }
    if not any(blends.values()) and not config.valid_data_paths:
        raise ConfigError(
            f'data.dataset_type="{config.dataset_type}" needs data; set data.data_path, data.train_data_path, '
            "data.data_args_path or data.per_split_data_args_path"
        )
    return blends[split] or []


def parse_args_list(items: Sequence[str], key: str) -> Blend:
    """Megatron's --data-path: prefixes, or weight and prefix in turn when every first of two is a number."""
    # Megatron-LM: get_blend_from_list. A list of even length whose even places are no numbers is prefixes alone.
    weights, prefixes = items[::2], items[1::2]
    if len(items) % 2 == 0 and all(map(is_number, weights)):
        entries = [_weighted(weight, prefix, key) for weight, prefix in zip(weights, prefixes, strict=True)]
    else:
        entries = [BlendEntry(prefix=item) for item in items]
    check_blend(entries, key, counts=False)
    return entries


def _weighted(weight: str, prefix: str, key: str) -> BlendEntry:
    if not float(weight) > 0:
        raise ConfigError(f"{key} gives {prefix} the weight {weight}; weights are positive, leave it out instead")
    return BlendEntry(prefix=prefix, weight=float(weight))


def _read_args_file(path: Path) -> Blend:
    return parse_args_list(_read_text(path, "data.data_args_path").split(), f"data.data_args_path={path}")


def _read_split_file(path: Path) -> dict[str, Blend]:
    key = f"data.per_split_data_args_path={path}"
    try:
        content = json.loads(_read_text(path, "data.per_split_data_args_path"))
    except json.JSONDecodeError as error:
        raise DataError(f"{key} line {error.lineno}, column {error.colno}: not JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{key} cannot be read: {error}") from error
    if not isinstance(content, dict) or not content or not set(content) <= set(SPLITS):
        raise DataError(f"{key} must hold one object with some of the keys {', '.join(SPLITS)}")
    return {split: _split_entries(value, f"{key}, {split}") for split, value in content.items() if value}


def _split_entries(value: Any, key: str) -> Blend:
    if isinstance(value, str):
        return parse_args_list(value.split(), key)
    if isinstance(value, list):
        return parse_args_list([str(item) for item in value], key)
    raise DataError(f"{key} must be a string or a list of weights and prefixes, got {type(value).__name__}")


def _read_text(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{key}={path} cannot be read: {error}") from error


def cache_folder(config: IndexedDataConfig, entries: Sequence[BlendEntry]) -> Path:
    """Where indices and tokens of raw text are kept: data.data_cache_path, else beside the first data set."""
    if config.data_cache_path is not None:
        return Path(config.data_cache_path)
    first = entries[0].prefix
    # An index is written and mapped as files, which a store does not offer.
    return Path.home() / ".cache" / "mt" / "data" if is_remote(first) else _folder_of(first) / "cache" / "mt"


def _folder_of(name: str) -> Path:
    """The folder that a file, a folder or a prefix lies in; of a pattern the one in which it is looked for."""
    parents = Path(name).parents
    # A name may hold characters of patterns and exist all the same.
    return next((parent for parent in parents if parent.is_dir() or not glob.has_magic(str(parent))), parents[-1])
