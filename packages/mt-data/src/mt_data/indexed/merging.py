"""Several indexed datasets into one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import DataError
from mt_data.indexed.dataset import IndexedDataset
from mt_data.indexed.layout import Sizes
from mt_data.indexed.manifest import Manifest
from mt_data.indexed.storage import is_remote
from mt_data.indexed.writer import IndexedDatasetWriter

SUFFIXES = (".bin", ".idx")


@dataclass(frozen=True)
class Part:
    """One data set to be merged, its files checked."""

    prefix: str
    sizes: Sizes
    manifest: Manifest | None


def find_prefixes(inputs: Iterable[str]) -> list[str]:
    """Prefixes in `inputs`, in the order given; a folder stands for all pairs in it, sorted by name.

    Raises DataError for a folder without pairs, and for a file whose other half is missing.
    """
    prefixes: list[str] = []
    for name in inputs:
        prefixes += _pairs_in(Path(name)) if not is_remote(name) and os.path.isdir(name) else [name]
    if not prefixes:
        raise DataError("no data sets to merge were given; name prefixes or a folder with --input")
    return prefixes


def _pairs_in(folder: Path) -> list[str]:
    files = {path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file()}
    # Sorted by name: the order of directory entries differs between file systems, and the order of the merge decides
    # which samples a seed gives. preprocess numbers its outputs so that names sort in the order of the corpus.
    stems = sorted({path.with_suffix("") for path in files}, key=lambda stem: stem.name)
    for stem in stems:
        for suffix in SUFFIXES:
            if Path(f"{stem}{suffix}") not in files:
                raise DataError(f"{folder} has only one half of {stem.name}: {stem.name}{suffix} is missing")
    if not stems:
        raise DataError(f"{folder} holds no .bin and .idx pair")
    return [str(stem) for stem in stems]


def merge(
    inputs: Sequence[str],
    output_prefix: str,
    *,
    multimodal: bool = False,
    on_start: Callable[[Part], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Manifest:
    """Write all documents of the data sets `inputs` (prefixes), in this order, to `output_prefix`.

    Memory does not depend on the sizes. The manifest keeps the tokenizer that all inputs agree on. on_start and
    on_bytes follow the work. Raises DataError when inputs are damaged, differ in dtype, or were made with different
    tokenizers.
    """
    # All inputs are checked before the first byte is written: a mismatch in the last of 1000 shards costs no copy.
    parts = check_parts(inputs, output_prefix, multimodal)
    with IndexedDatasetWriter(output_prefix, parts[0].sizes.layout.dtype, multimodal=multimodal) as writer:
        for part in parts:
            if on_start is not None:
                on_start(part)
            writer.append(part.prefix, on_bytes=on_bytes)
        extra = _common([part.manifest.extra if part.manifest else {} for part in parts])
        return writer.finish(tokenizer=_common_tokenizer(parts), extra=extra)


def check_parts(inputs: Sequence[str], output_prefix: str, multimodal: bool) -> list[Part]:
    """The inputs with checked headers, sizes, dtypes and tokenizers; reads no tokens. Raises DataError as `merge`."""
    for prefix in inputs:
        if os.path.abspath(prefix) == os.path.abspath(output_prefix):
            raise DataError(f"{output_prefix} is both an input and the output; choose another --output-prefix")
    parts = [_part(prefix, multimodal) for prefix in inputs]
    if not parts:
        raise DataError("no data sets to merge were given")
    _check_same_dtype(parts)
    _common_tokenizer(parts)
    return parts


def _part(prefix: str, multimodal: bool) -> Part:
    dataset = IndexedDataset(prefix, multimodal=multimodal)
    return Part(prefix, dataset.sizes, dataset.manifest())


def _check_same_dtype(parts: list[Part]) -> None:
    first = parts[0]
    for part in parts:
        if part.sizes.layout.dtype != first.sizes.layout.dtype:
            raise DataError(
                f"{first.prefix} holds {first.sizes.layout.dtype.name} and "
                f"{part.prefix} {part.sizes.layout.dtype.name}; "
                "only data sets of one dtype can be merged: preprocess one of them again with the other's tokenizer"
            )


def _common_tokenizer(parts: list[Part]) -> dict[str, Any] | None:
    """The manifests' tokenizer; None when one of the parts does not say. DataError when two differ."""
    known = [(part.prefix, part.manifest.tokenizer) for part in parts if part.manifest and part.manifest.tokenizer]
    for prefix, tokenizer in known:
        if _identity(tokenizer) != _identity(known[0][1]):
            raise DataError(
                f"{known[0][0]} was made with tokenizer {_label(known[0][1])} and {prefix} with {_label(tokenizer)}; "
                "their ids mean different text, so they are not merged"
            )
    # A part without a record may have been made with another tokenizer; the merged manifest then claims none.
    return known[0][1] if len(known) == len(parts) else None


def _identity(tokenizer: Mapping[str, Any]) -> Any:
    # The fingerprint first: the same vocabulary under two paths is one tokenizer.
    return tokenizer.get("fingerprint") or dict(tokenizer)


def _label(tokenizer: Mapping[str, Any]) -> str:
    return f"{tokenizer.get('tokenizer_type')} (fingerprint {str(tokenizer.get('fingerprint'))[:12]})"


def _common(values: list[dict[str, Any]]) -> dict[str, Any]:
    """The entries on which all agree."""
    first = values[0]
    return {key: value for key, value in first.items() if all(key in v and v[key] == value for v in values)}
