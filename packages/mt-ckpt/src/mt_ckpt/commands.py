"""`mt ckpt`: what is in a checkpoint, and is it whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mt_ckpt.locate import find_checkpoint
from mt_ckpt.sizes import format_bytes
from mt_core.errors import CheckpointError

if TYPE_CHECKING:
    from mt_ckpt.native.manifest import Manifest, StoredTensor
    from mt_ckpt.native.read import NativeReader

app = typer.Typer(no_args_is_help=True, help="Inspect and verify checkpoints.")

CheckpointPath = Annotated[Path, typer.Argument(help="A checkpoint directory, or a run directory for its latest one.")]


@app.command()
def inspect(
    path: CheckpointPath,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
) -> None:
    """Show a checkpoint's metadata, sizes and tensors. Only its metadata is read."""
    from mt_ckpt.native.read import open_checkpoint

    reader = open_checkpoint(find_checkpoint(path))
    console = Console(markup=False)  # names and values are shown as they are
    console.print(_summary(reader))
    console.print(_tensor_table(reader.manifest) if tensors else _group_table(reader.manifest))


@app.command()
def verify(path: CheckpointPath) -> None:
    """Read every byte of a checkpoint and compare it with the stored checksums."""
    from rich.progress import Progress

    from mt_ckpt.native.manifest import read_manifest
    from mt_ckpt.native.verify import find_damage

    checkpoint = find_checkpoint(path)
    manifest = read_manifest(checkpoint)
    num_bytes = sum(manifest.sizes.values())
    with Progress(transient=True, disable=not Console().is_terminal) as progress:
        bar = progress.add_task("verifying", total=num_bytes)
        problems = find_damage(checkpoint, manifest, lambda done: progress.advance(bar, done))
    if problems:
        raise CheckpointError("\n".join(problems))
    num_files = len(manifest.sizes) + 1
    typer.echo(f"{checkpoint}: whole ({len(manifest.tensors)} tensors, {num_files} files, {format_bytes(num_bytes)})")


def _summary(reader: NativeReader) -> Table:
    """One line for each fact of the checkpoint and each plain value of its metadata."""
    table = Table.grid(padding=(0, 2))
    for key, value in _facts(reader):
        table.add_row(key, value)
    return table


def _facts(reader: NativeReader) -> Iterator[tuple[str, str]]:
    manifest = reader.manifest
    yield "checkpoint", str(reader.path)
    yield "format", f"{manifest.format} {manifest.version}, written by {manifest.written_by}"
    yield "size", f"{format_bytes(sum(manifest.sizes.values()))} in {len(manifest.sizes) + 1} files"
    for key, value in reader.metadata.items():
        yield key, _brief(value)
    for name, file in manifest.files.items():
        yield "file", f"{name} ({format_bytes(file.num_bytes)})"


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(value) + "}"
    if isinstance(value, list):
        return f"[{len(value)} values]"
    return str(value)


def _group_table(manifest: Manifest) -> Table:
    """Tensors by the first parts of their names: `model`, `optimizer.exp_avg`, ..."""
    table = _new_table("group", "tensors", "elements", "dtypes", "bytes")
    groups: dict[str, list[StoredTensor]] = {}
    for name, tensor in manifest.tensors.items():
        groups.setdefault(_group(name), []).append(tensor)
    for group, members in groups.items():
        table.add_row(group, str(len(members)), _num_elements(members), _dtypes(members), _num_bytes(members))
    return table


def _tensor_table(manifest: Manifest) -> Table:
    table = _new_table("tensor", "dtype", "shape", "bytes", "shard")
    for name, tensor in manifest.tensors.items():
        shape = " x ".join(str(size) for size in tensor.shape) or "scalar"
        table.add_row(name, tensor.dtype, shape, format_bytes(tensor.num_bytes), tensor.shard)
    return table


def _new_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column, overflow="fold", justify="right" if column in ("tensors", "elements", "bytes") else "left"
        )
    return table


def _group(name: str) -> str:
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "optimizer" else first


def _num_elements(tensors: Iterable[StoredTensor]) -> str:
    return f"{sum(math.prod(tensor.shape) for tensor in tensors):,}"


def _dtypes(tensors: Iterable[StoredTensor]) -> str:
    return ", ".join(sorted({tensor.dtype for tensor in tensors}))


def _num_bytes(tensors: Iterable[StoredTensor]) -> str:
    return format_bytes(sum(tensor.num_bytes for tensor in tensors))
