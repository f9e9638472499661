"""`mt ckpt`: what is in a checkpoint, is it whole, how do two differ; averages; removing old ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mt_ckpt.commands.merge import merge
from mt_ckpt.files.sizes import format_bytes
from mt_core.checkpoint_base import TENSORS, OverBase
from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, CheckpointReader, CheckpointSaverSpec, ConvertOptions
from mt_core.errors import CheckpointError, ConfigError
from mt_core.paths import as_path
from mt_core.plugins import PluginHost, load_plugins
from mt_core.wording import counted

if TYPE_CHECKING:
    from rich.progress import Progress

    from mt_ckpt.average import Average
    from mt_ckpt.contents import Entry, Opened
    from mt_ckpt.difference import Difference
    from mt_ckpt.files.checksum_file import Checksums

app = typer.Typer(no_args_is_help=True, help="Inspect, verify, compare, average, merge and thin out checkpoints.")
app.command()(merge)

# A folder, or an address such as s3://bucket/run: what these read may lie in an object store.
AnyCheckpoint = Annotated[
    Path,
    typer.Argument(parser=as_path, metavar="PATH", help="A checkpoint of any format, or a run for its latest."),
]
Loader = Annotated[str, typer.Option(help="The format to read; auto recognizes it by the files.")]
OtherLoader = Annotated[str, typer.Option(help="As --loader, of the second checkpoint.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with every tensor.")]
RunDirectory = Annotated[
    Path, typer.Argument(parser=as_path, metavar="RUN", help="A run directory, or its checkpoints folder.")
]


@app.command()
def inspect(
    path: AnyCheckpoint,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    loader: Loader = "auto",
    as_json: AsJson = False,
) -> None:
    """Show a checkpoint's format, metadata, sizes and tensors. No tensor is read."""
    from mt_ckpt.contents import entries, open_any

    opened = open_any(path, load_plugins(), loader)
    tensor_entries = list(entries(opened.reader))
    if as_json:
        typer.echo(json.dumps(_contents(opened, tensor_entries), indent=2, default=str))
        return
    console = Console(markup=False)  # names and values are shown as they are
    console.print(_summary(opened))
    console.print(_tensor_table(tensor_entries) if tensors else _group_table(tensor_entries))


@app.command()
def verify(path: AnyCheckpoint, loader: Loader = "auto") -> None:
    """Read every tensor of a checkpoint; compare with its checksums, where it has any, and with its configuration."""
    from mt_ckpt.contents import open_any
    from mt_ckpt.files.checksum_file import read_checksums
    from mt_ckpt.locate import resolve_run
    from mt_ckpt.native.manifest import detect

    checkpoint = resolve_run(path)
    # From the strongest check to the weakest: checksums of every byte, checksums of a conversion, the tensors alone.
    if loader in ("auto", "mt") and detect(checkpoint):
        typer.echo(_verify_every_byte(checkpoint))
        _verify_base(open_any(checkpoint, load_plugins(), loader))
    elif (checksums := read_checksums(checkpoint)) is not None:
        typer.echo(_verify_written_files(checkpoint, checksums, loader))
    else:
        typer.echo(_verify_every_tensor(open_any(checkpoint, load_plugins(), loader)))


def _verify_every_byte(checkpoint: Path) -> str:
    """Verify mt's own format. Raises CheckpointError that names the damaged files."""
    from mt_ckpt.native.manifest import read_manifest
    from mt_ckpt.native.read import find_damage

    manifest = read_manifest(checkpoint)
    num_bytes = sum(manifest.sizes.values())
    with _progress() as progress:
        bar = progress.add_task("verifying", total=num_bytes)
        problems = find_damage(checkpoint, manifest, lambda done: progress.advance(bar, done))
    if problems:
        raise CheckpointError("\n".join(problems))
    num_files = len(manifest.sizes) + 1
    files = counted(num_files, "file")
    return f"{checkpoint}: whole ({len(manifest.tensors)} tensors, {files}, {format_bytes(num_bytes)})"


def _verify_base(opened: Opened) -> None:
    """Compare the base of a checkpoint that holds the trained parameters alone with what it was. Raises CheckpointError
    that names the tensors with other values."""
    if not isinstance(opened.reader, OverBase):
        return
    if changed := opened.reader.changed_tensors():
        raise CheckpointError(
            f"{opened.reader.base_path}: other values than when {opened.path} was written over it: {', '.join(changed)}"
        )
    count = len(opened.reader.entry[TENSORS])
    typer.echo(f"{opened.reader.base_path}: the base, with the same values ({count} tensors)")


def _verify_written_files(path: Path, checksums: Checksums, loader: str) -> str:
    """Verify a conversion's result in a format without checksums.

    Raises CheckpointError that names the changed files.
    """
    from mt_ckpt.contents import configuration_problems
    from mt_ckpt.files.checksum_file import CHECKSUMS, find_changes

    with _progress() as progress:
        bar = progress.add_task("verifying", total=checksums.num_bytes)
        problems = find_changes(checksums, lambda done: progress.advance(bar, done))
    problems = problems or configuration_problems(path, load_plugins(), loader)
    if problems:
        raise CheckpointError("\n".join(problems))
    amount = f"{counted(len(checksums.files), 'file')}, {format_bytes(checksums.num_bytes)}"
    return f"{path}: whole ({amount}): every byte is the one that was written, by the checksums of {CHECKSUMS}"


def _verify_every_tensor(opened: Opened) -> str:
    """Verify another format. Raises CheckpointError that names what is missing, unknown or unreadable."""
    from mt_ckpt.contents import entries, files_of, find_problems, has_checksums

    tensors, files = list(entries(opened.reader)), files_of(opened)
    with _progress() as progress:
        bar = progress.add_task("verifying", total=sum(entry.num_bytes for entry in tensors))
        problems = find_problems(opened, tensors, load_plugins(), lambda done: progress.advance(bar, done))
    if problems:
        raise CheckpointError("\n".join(problems))
    values = "their checksums are right" if has_checksums(opened) else "its files have no checksums of values"
    return (
        f"{opened.path}: whole as far as {opened.loader.name} shows ({len(tensors)} tensors, "
        f"{counted(len(files), 'file')}, {format_bytes(sum(files.values()))}): "
        f"the tensors are those of the configuration and can be read; {values}"
    )


@app.command()
def diff(
    first: AnyCheckpoint,
    second: AnyCheckpoint,
    model_only: Annotated[bool, typer.Option("--model-only", help="Leave out optimizers and random streams.")] = False,
    top: Annotated[int, typer.Option(min=1, help="How many of the largest differences to show.")] = 20,
    loader: Loader = "auto",
    other_loader: OtherLoader = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints of any formats tensor by tensor; exit code 1 if they differ."""
    from mt_ckpt.difference import differences

    left, right = _open_any(first, loader), _open_any(second, other_loader)
    names = list(dict.fromkeys([*left.shapes(), *right.shapes()]))
    names = [name for name in names if name.startswith("model.")] if model_only else names
    with _progress() as bar:
        task = bar.add_task("comparing", total=len(names))
        differing = list(differences(left, right, names, lambda name: bar.advance(task)))
    if as_json:
        typer.echo(json.dumps({"tensors": len(names), "differences": [asdict(entry) for entry in differing]}, indent=2))
        raise typer.Exit(int(bool(differing)))
    if not differing:
        typer.echo(f"the same: {len(names)} tensors")
        return
    Console(markup=False).print(_difference_table(differing, top))
    typer.echo(
        f"{len(differing)} of {len(names)} tensors differ" + (f"; {top} are shown" if len(differing) > top else "")
    )
    raise typer.Exit(1)


@app.command()
def prune(
    run: RunDirectory,
    keep_last: Annotated[int, typer.Option(min=1, help="Keep so many of the newest.")],
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep iterations that this divides, too.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
) -> None:
    """Remove old checkpoints of a run; never the one that `latest` names."""
    from mt_ckpt.locate import checkpoints_of, superfluous
    from mt_core.retention import remove

    checkpoints = checkpoints_of(run, load_plugins())
    removed = superfluous(checkpoints, keep_last, keep_every)
    for path in removed:
        if not dry_run:
            remove(path)
        typer.echo(f"{'would remove' if dry_run else 'removed'} {path}")
    typer.echo(f"{len(checkpoints) - len(removed)} of {len(checkpoints)} checkpoints kept")


@app.command()
def average(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(parser=as_path, metavar="PATH...", help="Checkpoints, or one run with --last."),
    ],
    save_dir: Annotated[
        str, typer.Option(metavar="PATH", help="The directory to write; it must not exist, or be empty.")
    ],
    last: Annotated[int | None, typer.Option(min=1, help="Of a run: average so many of the newest.")] = None,
    saver: Annotated[str, typer.Option(help="The format to write.")] = "mt",
    loader: Loader = "auto",
) -> None:
    """Write the mean of the weights of several checkpoints of one model."""
    from mt_ckpt.average import Average
    from mt_ckpt.writing.output_folders import require_free, target_path

    host = load_plugins()
    spec = host[CHECKPOINT_SAVERS].get(saver, key="--saver")
    target, write = target_path(save_dir, spec), spec.convert
    require_free(target)
    chosen = _chosen(checkpoints, last)
    if write is None:
        raise ConfigError(f"--saver {saver}: this format is written by training only")
    mean = Average([_open_any(path, loader) for path in chosen], [str(path) for path in chosen])
    write.load()(target, mean, ConvertOptions(), host)
    typer.echo(f"{save_dir}: the mean of {len(chosen)} checkpoints ({len(mean.shapes())} tensors)")
    for line in _left_out(target, mean, spec, host):
        typer.echo(line)


@app.command("add-tokens")
def add_tokens(
    path: AnyCheckpoint,
    token: Annotated[list[str], typer.Option(help="A new special token; repeatable.")],
    save_dir: Annotated[
        str, typer.Option(metavar="PATH", help="The directory to write; it must not exist, or be empty.")
    ],
    saver: Annotated[str, typer.Option(help="The format to write.")] = "hf",
    loader: Loader = "auto",
) -> None:
    """Add tokens to a model and its tokenizer; their rows are the mean of those of the tokens that are there."""
    from mt_ckpt.added_tokens import WithTokens
    from mt_ckpt.writing.output_folders import require_free, target_path

    host = load_plugins()
    spec = host[CHECKPOINT_SAVERS].get(saver, key="--saver")
    target, write = target_path(save_dir, spec), spec.convert
    require_free(target)
    if write is None:
        raise ConfigError(f"--saver {saver}: this format is written by training only")
    extended = WithTokens(_open_any(path, loader), token, host)
    write.load()(target, extended, ConvertOptions(), host)
    added = ", ".join(f"{text} = {number}" for text, number in extended.ids.items())
    typer.echo(f"{save_dir}: {added}; the model has {extended.vocab_size} ids")


def _left_out(target: Path, mean: Average, saver: CheckpointSaverSpec, host: PluginHost) -> Iterator[str]:
    from mt_ckpt.convert.engine import unwritten_files

    if mean.left_out:
        groups = sorted({name.partition(".")[0] for name in mean.left_out})
        yield f"left out, since a mean has weights alone: {len(mean.left_out)} tensors of {', '.join(groups)}"
    if files := unwritten_files(target, saver.name, mean, host):
        yield f"left out, since {saver.name} has no place for them: the files {', '.join(files)}"


def _chosen(paths: list[Path], last: int | None) -> list[Path]:
    from mt_ckpt.locate import checkpoints_of

    if last is None:
        if len(paths) < 2:
            raise ConfigError("give two checkpoints or more, or one run directory with --last")
        return paths
    if len(paths) != 1:
        raise ConfigError(f"--last {last} takes one run directory, got {len(paths)} paths")
    checkpoints = checkpoints_of(paths[0], load_plugins())
    if len(checkpoints) < last:
        raise ConfigError(f"--last {last}: {paths[0]} has {len(checkpoints)} checkpoints")
    return checkpoints[-last:]


def _open_any(path: Path, loader: str) -> CheckpointReader:
    from mt_ckpt.contents import open_any

    return open_any(path, load_plugins(), loader).reader


def _progress() -> Progress:
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _difference_table(differences: list[Difference], top: int) -> Table:
    """The largest first; what has no values to compare before that."""
    table = _new_table("tensor", "difference", "largest", "elements")
    order = sorted(differences, key=lambda entry: -(float("inf") if entry.largest is None else entry.largest))
    for entry in order[:top]:
        largest = "" if entry.largest is None else f"{entry.largest:.3g}"
        table.add_row(entry.name, entry.what, largest, f"{entry.count:,}" if entry.count else "")
    return table


def _summary(opened: Opened) -> Table:
    """One line for each fact of the checkpoint and each plain value of its metadata."""
    table = Table.grid(padding=(0, 2))
    for key, value in _facts(opened):
        table.add_row(key, value)
    return table


def _facts(opened: Opened) -> Iterator[tuple[str, str]]:
    from mt_ckpt.contents import files_of, iterations_beside, rank_layout

    reader, files = opened.reader, files_of(opened)
    yield "checkpoint", str(opened.path)
    yield "format", _format(opened)
    yield "size", f"{format_bytes(sum(files.values()))} in {counted(len(files), 'file')}"
    if (layout := rank_layout(reader.metadata)) is not None:
        yield "layout", layout
    if len(iterations := iterations_beside(opened.path)) > 1:
        yield "iterations", ", ".join(str(iteration) for iteration in iterations)
    for key, value in reader.metadata.items():
        yield key, _brief(value)
    for name, content in reader.files().items():
        yield "file", f"{name} ({format_bytes(len(content))})"


def _contents(opened: Opened, entries: Iterable[Entry]) -> dict[str, Any]:
    from mt_ckpt.contents import files_of, iterations_beside, rank_layout

    return {
        "checkpoint": str(opened.path),
        "format": opened.loader.name,
        "files": files_of(opened),
        "layout": rank_layout(opened.reader.metadata),
        "iterations": iterations_beside(opened.path),
        "metadata": dict(opened.reader.metadata),
        "tensors": [asdict(entry) for entry in entries],
    }


def _format(opened: Opened) -> str:
    from mt_ckpt.native.read import NativeReader

    reader, over = opened.reader, ""
    if isinstance(reader, OverBase):
        over, reader = f", over {reader.base_path}", reader.difference
    if isinstance(reader, NativeReader):
        manifest = reader.manifest
        return f"{manifest.format} {manifest.version}, written by {manifest.written_by}{over}"
    return f"{opened.loader.name}: {opened.loader.doc}"


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(value) + "}"
    if isinstance(value, list):
        return f"[{len(value)} values]"
    return str(value)


def _group_table(tensors: Iterable[Entry]) -> Table:
    """Tensors by the first parts of their names: `model`, `optimizer.exp_avg`, ..."""
    table = _new_table("group", "tensors", "elements", "dtypes", "bytes")
    groups: dict[str, list[Entry]] = {}
    for entry in tensors:
        groups.setdefault(_group(entry.name), []).append(entry)
    for group, members in groups.items():
        elements, num_bytes = (sum(part) for part in zip(*((x.numel, x.num_bytes) for x in members), strict=True))
        dtypes = ", ".join(sorted({entry.dtype for entry in members}))
        table.add_row(group, str(len(members)), f"{elements:,}", dtypes, format_bytes(num_bytes))
    return table


def _tensor_table(tensors: Iterable[Entry]) -> Table:
    table = _new_table("tensor", "dtype", "shape", "bytes", "file")
    for entry in tensors:
        shape = " x ".join(str(size) for size in entry.shape) or "scalar"
        table.add_row(entry.name, entry.dtype, shape, format_bytes(entry.num_bytes), entry.place)
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
