"""`mt convert`: from one checkpoint format to another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from mt_ckpt.files.sizes import format_bytes, parse_bytes
from mt_core.checkpoint_specs import VocabPadding
from mt_core.paths import as_path
from mt_core.plugins import load_plugins

if TYPE_CHECKING:
    from mt_ckpt.convert.engine import Report
    from mt_ckpt.convert.verify import Verification

LoadDir = Annotated[
    Path, typer.Option(parser=as_path, metavar="PATH", help="The checkpoint, or a run directory for its latest one.")
]
SaveDir = Annotated[  # not a Path, which would make a local folder of an address
    str, typer.Option(metavar="PATH", help="The directory to write; it must not exist, or be empty.")
]
Saver = Annotated[str, typer.Option(help="The format to write; mt plugins lists them.")]
Loader = Annotated[str, typer.Option(help="The format to read; auto recognizes it by the files.")]
TransformerImpl = Literal["transformer_engine", "local"]
OptimizerFormat = Literal["fully_reshardable", "dp_reshardable", "plain", "none"]
Parallel = Annotated[int, typer.Option(min=1, help="Of formats that cut tensors by rank.")]


def convert(
    load_dir: LoadDir,
    save_dir: SaveDir,
    saver: Saver,
    loader: Loader = "auto",
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of formats that do not say what their model is: its config.json."),
    ] = None,
    target_tensor_parallel_size: Parallel = 1,
    target_pipeline_parallel_size: Parallel = 1,
    target_virtual_pipeline_parallel_size: Parallel = 1,
    target_expert_parallel_size: Parallel = 1,
    target_expert_tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Default: as the tensor parallel size.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16. Default: as the weights are.")] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME",
            help="Round matrices of linear layers to a scheme of the format, such as fp8-blocks or w4a16.",
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --quantize, of gguf: an importance matrix of llama.cpp."),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Of formats that cut by size, such as 5GB (the default of hf).")
    ] = None,
    target_megatron_version: Annotated[
        str | None, typer.Option(help="The Megatron-Core that is to load it, 0.8 to 0.19 or HEAD. Default: the newest.")
    ] = None,
    target_transformer_impl: Annotated[
        TransformerImpl | None,
        typer.Option(help="Whose layers Megatron has. Default: as the run had them, else transformer_engine."),
    ] = None,
    target_optimizer_format: Annotated[
        OptimizerFormat | None,
        typer.Option(
            help="Layout of megatron-dist's optimizer; plain: not distributed; none: left out. Default: plain if the "
            "run had no distributed optimizer, else fully_reshardable."
        ),
    ] = None,
    make_vocab_size_divisible_by: Annotated[
        int | None, typer.Option(min=1, help="Of formats that store padding. Default: as the model's configuration.")
    ] = None,
    vocab_padding: Annotated[
        VocabPadding | None,
        typer.Option(
            help="Rows of padding, of formats that store them. Default: those of the source, others so that the loss "
            "over them too is the model's."
        ),
    ] = None,
    true_vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ids, where the source counts rows of padding too, which are kept as such."),
    ] = None,
    trim_vocabulary: Annotated[
        bool, typer.Option("--trim-vocabulary", help="Drop rows beyond the vocab_size of the source's configuration.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(parser=as_path, metavar="DIR", help="Write the tokenizer of this folder, not the source's."),
    ] = None,
    upcycle_experts: Annotated[
        int | None, typer.Option(min=2, help="Turn dense feed-forwards into mixtures of so many experts.")
    ] = None,
    granularity: Annotated[
        int, typer.Option(min=1, help="With --upcycle-experts: make each so much narrower, and use as many more.")
    ] = 1,
    nproc: Annotated[int, typer.Option(min=1, help="Processes that write at the same time (hf, mt, Megatron's).")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and write nothing.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the result again; compare tensors, then both models' outputs.")
    ] = False,
) -> None:
    """Convert a checkpoint to another format, a tensor at a time on the CPU."""
    from mt_ckpt.convert import convert as run
    from mt_ckpt.gguf.options import options_for

    options = options_for(
        saver,
        imatrix,
        target_tensor_parallel_size=target_tensor_parallel_size,
        target_pipeline_parallel_size=target_pipeline_parallel_size,
        target_virtual_pipeline_parallel_size=target_virtual_pipeline_parallel_size,
        target_expert_parallel_size=target_expert_parallel_size,
        target_expert_tensor_parallel_size=target_expert_tensor_parallel_size,
        target_megatron_version=target_megatron_version,
        target_transformer_impl=target_transformer_impl,
        target_optimizer_format=target_optimizer_format,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        vocab_padding=vocab_padding,
        dtype=dtype,
        quantize=quantize,
        max_shard_size=parse_bytes(max_shard_size, "--max-shard-size") if max_shard_size else None,
        upcycle_experts=upcycle_experts,
        granularity=granularity,
    )
    with _progress_bar() as bar:
        task = bar.add_task("converting", total=None)
        report = run(
            load_dir,
            save_dir,
            saver=saver,
            loader=loader,
            config=config,
            options=options,
            dry_run=dry_run,
            verify=verify,
            trim_vocabulary=trim_vocabulary,
            tokenizer=tokenizer,
            nproc=nproc,
            true_vocab_size=true_vocab_size,
            host=load_plugins(),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    for line in describe(report, save_dir, dry_run=dry_run):
        typer.echo(line)


def _progress_bar() -> Any:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    console = Console(stderr=True)
    return Progress(
        *columns,
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def describe(report: Report, save_dir: str, *, dry_run: bool) -> list[str]:
    """What was done, in sentences."""
    amount = (
        f"{report.num_tensors} tensors, {report.num_parameters:,} parameters of a {report.family} model, "
        f"{format_bytes(report.num_bytes)}"
    )
    reason = report.optimizer_left_out
    unread = [f"without the optimizer of Megatron's run: {reason}"] if reason else []
    unread += _source_lines(report.read_from)
    if dry_run:
        lines = [f"nothing written; {report.saver} can hold it: {amount}", *unread]
        return [*lines, *_left_out(report), *report.notes, *_files_left_out(report)]
    lines = [f"{save_dir}: written as {report.saver}: {amount}", *unread]
    if report.num_omitted_tensors:
        lines.append(
            f"the model's other {report.num_omitted_tensors} tensors are left to another file, such as the base"
        )
    lines += [*_left_out(report), *report.notes, *_files_left_out(report)]
    checked = report.verification
    if checked is not None:
        lines.append(f"verified: {checked.num_tensors} tensors are equal bit for bit, {_outputs(checked.num_outputs)}")
        lines += _loss(checked)
        if names := checked.strict_names:
            lines.append(f"a strict load of {names.reader} finds each of its {names.number} names, and no other")
        lines += [f"  model.{key}: {change}" for key, change in checked.changed_settings.items()]
    if not report.has_tokenizer:
        lines.append("without a tokenizer, since the source has none that can be read; --tokenizer DIR adds one")
    return lines


def _source_lines(read_from: Mapping[str, Any]) -> list[str]:
    if not read_from:
        return []
    lines = [f"the model is what {read_from['config']} says; its tensors have the names of {read_from['names']}"]
    if read_from["left_out"]:
        lines.append(f"not read: {', '.join(read_from['left_out'])}")
    return lines


def _left_out(report: Report) -> list[str]:
    if not report.left_out:
        return []
    groups = sorted({_group(name) for name in report.left_out})
    return [f"left out, since they are not asked for or {report.saver} has no place for them: {', '.join(groups)}"]


def _files_left_out(report: Report) -> list[str]:
    if not report.files_left_out:
        return []
    return [
        f"left out, since {report.saver} has no place for them: the files {', '.join(report.files_left_out)}; "
        "keep those of the source, and give them by --tokenizer DIR on the way back"
    ]


def _loss(checked: Verification) -> list[str]:
    loss = checked.loss
    if loss is None:
        return []
    padding = f", {loss.num_padding_rows} rows of padding in its softmax" if loss.num_padding_rows else ""
    return [
        f"loss of a few tokens: {loss.source:.5f} of the source as {loss.source_reader} computes it, "
        f"{loss.target:.5f} as {loss.reader} computes it from the target ("
        f"{loss.num_parameters:,} parameters{padding})"
    ]


def _outputs(number: int) -> str:
    if number:
        return f"and {number} outputs on the way from token ids to logits"
    return "outputs were not compared: the model takes more than token ids"


def _group(name: str) -> str:
    from mt_ckpt.convert.wrapped_readers import HISTORY

    if name.endswith(HISTORY):
        return HISTORY.removeprefix(".")
    if name.endswith("*"):
        return name
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "optimizer" else first
