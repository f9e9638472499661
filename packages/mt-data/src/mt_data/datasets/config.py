"""Configuration keys shared by data sets that are cut from indexed token files."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from mt_core.config.fields import Section
from mt_core.config.schema import DataConfig
from mt_core.errors import ConfigError

DEFAULT_SPLIT = "969, 30, 1"


class BlendEntry(Section):
    """One data set of a blend; in TOML `{prefix = "wiki_text_document", weight = 0.3}` or just the prefix."""

    prefix: str
    """Path of the `.bin` and `.idx` files without the suffix, or of a file of raw text."""
    weight: PositiveFloat | None = None
    """Share of the samples; weights need not add up to 1. Given for all entries of a blend or for none."""
    samples: PositiveInt | None = None
    """Exact number of samples, in place of a weight; for the paths of one split only."""


def _from_prefix(value: Any) -> Any:
    return {"prefix": value} if isinstance(value, str) else value


Blend = list[Annotated[BlendEntry, BeforeValidator(_from_prefix)]]


class IndexedDataConfig(DataConfig):
    """Where indexed token files lie, which part of them belongs to a split, and how they are mixed.

    The files are named in one of four ways: data_path with split; train_data_path, valid_data_path (or
    valid_data_paths) and test_data_path; data_args_path with split; per_split_data_args_path.
    """

    data_path: Blend | None = None
    """Token files (or raw text) that `split` divides into train, validation and test."""
    split: str | None = None
    """Shares of train, validation and test of data_path or data_args_path. Default: "969, 30, 1"."""
    train_data_path: Blend | None = None
    """Token files for training only."""
    valid_data_path: Blend | None = None
    """Token files for validation only."""
    valid_data_paths: dict[str, Blend] | None = None
    """Several validation sets by name, each evaluated by itself, in place of valid_data_path."""
    test_data_path: Blend | None = None
    """Token files for the test only."""
    data_args_path: str | None = None
    """A file that holds what Megatron's --data-path takes: prefixes, or "weight prefix" pairs."""
    per_split_data_args_path: str | None = None
    """A JSON file as Megatron's: {"train": [...], "valid": [...], "test": [...]} of such lists."""
    data_cache_path: str | None = None
    """Folder for built indices, and for tokens of raw text. Default: `cache/mt` beside the first token file."""
    mmap_bin_files: bool = True
    """Map the arrays of `.idx` into memory, which the processes of a machine then share; false reads them. Tokens
    are read by the system either way, so that a file that shrinks, or a disk that fails, is an error."""
    verify_checksums: bool = True
    """Compare each block of 64 KiB of `.bin` at its first use, and each `.idx` as it is opened, with the checksums in
    its manifest. Files without a manifest, as Megatron writes them, have none."""
    mid_level_dataset_surplus: NonNegativeFloat = Field(0.005)
    """Each data set of a weighted blend is built for this much more than its share."""
    accept_tokenizer_mismatch: bool = False
    """Go on with token files whose manifest names another tokenizer than the configured one."""

    @model_validator(mode="after")
    def _check_sources(self) -> IndexedDataConfig:
        styles = {style: keys for style, keys in self._source_styles().items() if keys}
        if len(styles) > 1:
            sources = " and ".join(f"data.{keys[0]}" for keys in styles.values())
            raise ConfigError(f"{sources} are both given; keep one way of naming the data")
        if self.valid_data_path is not None and self.valid_data_paths is not None:
            raise ConfigError("data.valid_data_path and data.valid_data_paths are both given; keep one of them")
        if self.split is not None and styles and not {"whole", "file"} & styles.keys():
            raise ConfigError(
                f'data.split="{self.split}" divides data.data_path or data.data_args_path, and the data is '
                "given for each split by itself; remove data.split"
            )
        for key, entries in self._blends().items():
            check_blend(entries, f"data.{key}", counts=key != "data_path")
        return self

    def _source_styles(self) -> dict[str, list[str]]:
        keys = {
            "whole": ["data_path"],
            "split": ["train_data_path", "valid_data_path", "valid_data_paths", "test_data_path"],
            "file": ["data_args_path"],
            "split file": ["per_split_data_args_path"],
        }
        return {style: [key for key in names if getattr(self, key) is not None] for style, names in keys.items()}

    def _blends(self) -> dict[str, Blend]:
        keys = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
        blends = {key: getattr(self, key) for key in keys if getattr(self, key) is not None}
        return blends | {f"valid_data_paths.{name}": b for name, b in (self.valid_data_paths or {}).items()}


def check_blend(entries: Blend, key: str, *, counts: bool) -> None:
    """Raise ConfigError for a blend that is empty or mixes weights, counts and neither.

    counts: whether exact counts are allowed; they mean nothing where one list serves three splits.
    """
    if not entries:
        raise ConfigError(f"{key} is empty; name at least one prefix, or remove the key")
    kinds = {_kind(entry, key) for entry in entries}
    if len(kinds) > 1:
        raise ConfigError(
            f"{key} gives {' for some entries and '.join(sorted(kinds))} for others; "
            "give a weight to all of them, exact samples to all of them, or to none"
        )
    if "samples" in kinds and not counts:
        raise ConfigError(
            f"{key} gives exact samples, but it serves train, validation and test; "
            "use data.train_data_path, data.valid_data_path and data.test_data_path with samples"
        )


def _kind(entry: BlendEntry, key: str) -> str:
    if is_number(entry.prefix):
        raise ConfigError(
            f'{key} has the prefix "{entry.prefix}", which looks like a weight; write {{prefix = "...", '
            f"weight = {entry.prefix}}}, or put Megatron's list into a file and name it with data.data_args_path"
        )
    if entry.weight is not None and entry.samples is not None:
        raise ConfigError(f"{key}: {entry.prefix} has both a weight and samples; give one of them")
    return "a weight" if entry.weight is not None else "samples" if entry.samples is not None else "nothing"


def is_number(text: str) -> bool:
    """Whether Megatron would take the text for a weight."""
    try:
        float(text)
    except ValueError:
        return False
    return True
