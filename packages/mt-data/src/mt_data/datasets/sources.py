"""From configuration to the token files of a split."""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import ConfigError, DataError
from mt_core.specs import Split
from mt_data.datasets.config import DEFAULT_SPLIT, Blend, BlendEntry, IndexedDataConfig, check_blend, is_number
from mt_data.datasets.splits import SPLITS, WHOLE, SplitFractions, parse_split
from mt_data.indexed.storage import is_remote


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
    own = _entries_of_split(config, split)
    return SplitSources(own, WHOLE) if own else None


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
