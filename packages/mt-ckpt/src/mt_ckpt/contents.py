"""What is in an open checkpoint of any format, whether it is whole, and the hash that names it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from mt_ckpt.files.checksum import BLOCK_BYTES
from mt_ckpt.files.checksum_file import CHECKSUMS
from mt_ckpt.files.dtypes import format_name
from mt_ckpt.locate import resolve_run
from mt_ckpt.model import expected_parameters, model_config
from mt_ckpt.native.manifest import MANIFEST_NAME
from mt_ckpt.native.read import NativeReader
from mt_core.checkpoint_base import OverBase
from mt_core.checkpoint_lookup import MODEL, open_checkpoint, open_with
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, CheckpointLoaderSpec, CheckpointReader
from mt_core.errors import CheckpointError
from mt_core.plugins import PluginHost
from mt_core.train.checkpoint.state import require_fit

AUTO = "auto"
ITERATION = re.compile(r"iter_([0-9]{7,})")
RANKS = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
}
"""Argument of Megatron's -> the axis it is the size of."""


@dataclass(frozen=True)
class Opened:
    """path: of the checkpoint itself, or of the folder whose tracker names it. loader: of its format."""

    path: Path
    loader: CheckpointLoaderSpec
    reader: CheckpointReader


@dataclass(frozen=True)
class Entry:
    """A tensor. dtype: as safetensors call it. place: the file that holds it, where the format has one for each."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    place: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def open_any(path: Path, host: PluginHost, loader: str = AUTO) -> Opened:
    """Open a checkpoint, or a run directory's latest one. loader: a format's name, or "auto" to ask the files.

    Raises CheckpointError for what is missing, damaged, or of no known format, and PluginError for an unknown name.
    """
    checkpoint = resolve_run(path)
    if loader != AUTO:
        spec = host[CHECKPOINT_LOADERS].get(loader, key="--loader")
        return Opened(checkpoint, spec, open_with(spec, checkpoint, host))
    reader = open_checkpoint(checkpoint, host)
    # `open_checkpoint` returns the reader alone: its format is found by the same question, put to the same loaders.
    spec = next(spec for spec in host[CHECKPOINT_LOADERS] if spec.detect.load()(checkpoint))
    return Opened(checkpoint, spec, reader)


def entries(reader: CheckpointReader) -> Iterator[Entry]:
    """The tensors in the order of the checkpoint."""
    dtypes = reader.dtypes()
    for name, shape in reader.shapes().items():
        dtype = dtypes[name]
        num_bytes = math.prod(shape) * dtype.itemsize
        yield Entry(name, format_name(dtype) or str(dtype), tuple(shape), num_bytes, _place(reader, name))


def _place(reader: CheckpointReader, name: str) -> str:
    """The file that holds a tensor; of one in pieces the first, and how many there are."""
    if isinstance(reader, OverBase):
        in_difference = name in reader.difference.shapes()
        return (
            _place(reader.difference, name)
            if in_difference
            else f"{reader.base_path} {_place(reader.base, name)}".rstrip()
        )
    if not isinstance(reader, NativeReader):
        return ""
    first, *others = sorted({piece.shard for piece in reader.manifest.tensors[name].pieces})
    return f"{first} and {len(others)} more" if others else first


def files_of(opened: Opened) -> dict[str, int]:
    """Bytes of each file of the checkpoint, by its path."""
    path, reader = opened.path, opened.reader
    if isinstance(reader, OverBase):
        reader = reader.difference
    if isinstance(reader, NativeReader):  # has them read, so that an object store is not accessed
        return {**reader.manifest.sizes, MANIFEST_NAME: (path / MANIFEST_NAME).stat().st_size}
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file): file.stat().st_size for file in files}


def rank_layout(metadata: Mapping[str, Any]) -> str | None:
    """How Megatron's files are cut over ranks, such as "tensor 2, pipeline 4"; None for other formats."""
    arguments = (metadata.get("megatron") or {}).get("args")
    if arguments is None:
        return None
    sizes = {axis: arguments.get(key) or 1 for key, axis in RANKS.items()}
    if sizes["expert"] > 1:  # else it is not said, or repeats that of the other layers
        sizes["expert tensor"] = arguments.get("expert_tensor_parallel_size") or sizes["tensor"]
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "one rank"


def iterations_beside(path: Path) -> list[int]:
    """The iterations in the folder of a run: `path` itself or the one above it."""
    folder = path.parent if ITERATION.fullmatch(path.name) else path
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := ITERATION.fullmatch(name)))


# -- completeness, as far as the format can tell -----------------------------------------------------

WITH_CHECKSUMS = {".bin", ".pt", ".pth"}
"""Archives of torch.save, whose members have a CRC-32 that is compared on reading."""


def find_problems(
    opened: Opened, tensors: list[Entry], host: PluginHost, progress: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """One sentence for each: tensors that are not those of the configuration, and those that cannot be read.

    `progress` is called with the number of bytes just read.
    """
    reader = opened.reader
    problems = _misfits(reader, host)
    for entry in tensors:
        # One damaged tensor does not end the check: all are listed.
        try:
            value = reader.read(entry.name)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            if tuple(value.shape) != entry.shape:
                problems.append(f"{entry.name}: read as {list(value.shape)}, listed as {list(entry.shape)}")
        progress(entry.num_bytes)
    return problems


def configuration_problems(path: Path, host: PluginHost, loader: str) -> list[str]:
    """What is wrong with the names and shapes of the checkpoint at `path`, of which no tensor is read.

    Nothing is checked of a format that no installed loader reads, unless one is named.
    """
    if loader == AUTO and not any(spec.detect.load()(path) for spec in host[CHECKPOINT_LOADERS]):
        return []
    return _misfits(open_any(path, host, loader).reader, host)


def _misfits(reader: CheckpointReader, host: PluginHost) -> list[str]:
    try:
        parameters = expected_parameters(model_config(reader, host), host)
        require_fit(reader, {name: layout.shape for name, layout in parameters.items()}, MODEL)
    except CheckpointError as error:
        return [str(error)]
    return []


def has_checksums(opened: Opened) -> bool:
    """Whether the weights' files have checksums, so that changed values would have been seen."""
    # Only the suffixes of files with weights count. A .pt beside safetensors says nothing of those.
    weights = {Path(file).suffix for file in files_of(opened)} & {*WITH_CHECKSUMS, ".safetensors", ".gguf", ".distcp"}
    return bool(weights) and weights <= WITH_CHECKSUMS


# -- fingerprint -------------------------------------------------------------------------------------


def checkpoint_fingerprint(path: Path) -> str:
    """XXH3 (128 bits, hexadecimal) of the names and contents of a checkpoint's files.

    A manifest or checksum file, which holds the checksums of the others, stands for them.
    """
    digest = xxhash.xxh3_128()
    for file in _files(path):
        # NUL cannot be in a name and the size has a fixed width, so that no two lists of files give the same bytes.
        digest.update(str(file.relative_to(path)).encode() + b"\0" + file.stat().st_size.to_bytes(8, "little"))
        _update(digest, file)
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    listed = [path / name for name in (MANIFEST_NAME, CHECKSUMS) if (path / name).is_file()]
    # The manifest of the native format comes before the checksums that `mt convert` writes.
    return listed[:1] or sorted(file for file in path.rglob("*") if file.is_file())


def _update(digest: xxhash.xxh3_128, file: Path) -> None:
    with file.open("rb") as content:
        while block := content.read(BLOCK_BYTES):
            digest.update(block)
