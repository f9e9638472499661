"""`mt ckpt`: what is in a checkpoint, is it whole, how do two differ; averages; removing old ones."""

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
from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import load_plugins
from mt_core.specs import CheckpointReader, ConvertOptions

if TYPE_CHECKING:
    from rich.progress import Progress

    from mt_ckpt.difference import Difference
    from mt_ckpt.native.manifest import Manifest, StoredTensor
    from mt_ckpt.native.read import NativeReader

app = typer.Typer(no_args_is_help=True, help="Inspect, verify, compare, average and thin out checkpoints.")

CheckpointPath = Annotated[Path, typer.Argument(help="A checkpoint directory, or a run directory for its latest one.")]

AnyCheckpoint = Annotated[Path, typer.Argument(help="A checkpoint of any format, or a run directory for its latest.")]
RunDirectory = Annotated[Path, typer.Argument(help="A run directory, or its checkpoints folder.")]


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
    from mt_ckpt.native.manifest import read_manifest
    from mt_ckpt.native.verify import find_damage

    checkpoint = find_checkpoint(path)
    manifest = read_manifest(checkpoint)
    num_bytes = sum(manifest.sizes.values())
    with _progress() as progress:
        bar = progress.add_task("verifying", total=num_bytes)
        problems = find_damage(checkpoint, manifest, lambda done: progress.advance(bar, done))
    if problems:
        raise CheckpointError("\n".join(problems))
    num_files = len(manifest.sizes) + 1
    typer.echo(f"{checkpoint}: whole ({len(manifest.tensors)} tensors, {num_files} files, {format_bytes(num_bytes)})")


@app.command()
def diff(
    first: AnyCheckpoint,
    second: AnyCheckpoint,
    model_only: Annotated[bool, typer.Option("--model-only", help="Leave out optimizers and random streams.")] = False,
    top: Annotated[int, typer.Option(min=1, help="How many of the largest differences to show.")] = 20,
) -> None:
    """Compare two checkpoints of any formats tensor by tensor; exit code 1 if they differ."""
    from mt_ckpt.difference import differences

    left, right = _open_any(first), _open_any(second)
    names = list(dict.fromkeys([*left.shapes(), *right.shapes()]))
    names = [name for name in names if name.startswith("model.")] if model_only else names
    with _progress() as bar:
        task = bar.add_task("comparing", total=len(names))
        found = list(differences(left, right, names, lambda name: bar.advance(task)))
    if not found:
        typer.echo(f"the same: {len(names)} tensors")
        return
    Console(markup=False).print(_difference_table(found, top))
    typer.echo(f"{len(found)} of {len(names)} tensors differ" + (f"; {top} are shown" if len(found) > top else ""))
    raise typer.Exit(1)


@app.command()
def prune(
    run: RunDirectory,
    keep_last: Annotated[int, typer.Option(min=1, help="Keep so many of the newest.")],
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep iterations that this divides, too.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
) -> None:
    """Remove old checkpoints of a run; never the one that `latest` names."""
    from mt_ckpt.retention import checkpoints_of, superfluous
    from mt_core.retention import remove

    checkpoints = checkpoints_of(run)
    removed = superfluous(checkpoints, keep_last, keep_every)
    for path in removed:
        if not dry_run:
            remove(path)
        typer.echo(f"{'would remove' if dry_run else 'removed'} {path}")
    typer.echo(f"{len(checkpoints) - len(removed)} of {len(checkpoints)} checkpoints kept")


@app.command()
def average(
    checkpoints: Annotated[list[Path], typer.Argument(help="Checkpoints of any formats, or one run with --last.")],
    save_dir: Annotated[Path, typer.Option(help="The checkpoint to write; it must not exist, or be empty.")],
    last: Annotated[int | None, typer.Option(min=1, help="Of a run: average so many of the newest.")] = None,
    saver: Annotated[str, typer.Option(help="The format to write.")] = "mt",
) -> None:
    """Write the mean of the weights of several checkpoints of one model."""
    from mt_ckpt.average import Average
    from mt_ckpt.convert.resumable import require_free

    chosen = _chosen(checkpoints, last)
    require_free(save_dir.absolute())
    host = load_plugins()
    write = host.checkpoint_savers.get(saver, key="--saver").convert
    if write is None:
        raise ConfigError(f"--saver {saver}: this format is written by training only")
    mean = Average([_open_any(path) for path in chosen], [str(path) for path in chosen])
    write.load()(save_dir.absolute(), mean, ConvertOptions(), host)
    typer.echo(f"{save_dir}: the mean of {len(chosen)} checkpoints ({len(mean.shapes())} tensors)")


def _chosen(paths: list[Path], last: int | None) -> list[Path]:
    from mt_ckpt.retention import checkpoints_of

    if last is None:
        if len(paths) < 2:
            raise ConfigError("give two checkpoints or more, or one run directory with --last")
        return paths
    if len(paths) != 1:
        raise ConfigError(f"--last {last} takes one run directory, got {len(paths)} paths")
    found = checkpoints_of(paths[0])
    if len(found) < last:
        raise ConfigError(f"--last {last}: {paths[0]} has {len(found)} checkpoints")
    return found[-last:]


def _open_any(path: Path) -> CheckpointReader:
    from mt_ckpt.locate import resolve_run
    from mt_core.train.checkpointing import open_checkpoint

    return open_checkpoint(resolve_run(path), load_plugins())


def _progress() -> Progress:
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _difference_table(found: list[Difference], top: int) -> Table:
    """The largest first; what has no values to compare before that."""
    table = _new_table("tensor", "difference", "largest", "elements")
    order = sorted(found, key=lambda entry: -(float("inf") if entry.largest is None else entry.largest))
    for entry in order[:top]:
        largest = "" if entry.largest is None else f"{entry.largest:.3g}"
        table.add_row(entry.name, entry.what, largest, f"{entry.count:,}" if entry.count else "")
    return table


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
