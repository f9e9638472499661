"""`mt calibrate`: quantize a model by what it computes of a data set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from mt_core.commands import host_of, need, typed_words
from mt_core.errors import ConfigError
from mt_core.paths import as_path

if TYPE_CHECKING:
    from mt_tools.calibration.options import CalibrationOptions
    from mt_tools.calibration.run import CalibrationResult

UNSEEN_SHOWN = 8


def calibrate(
    context: typer.Context,
    path: Annotated[
        Path, typer.Argument(parser=as_path, metavar="PATH", help="A run directory, or a checkpoint of any format.")
    ],
    out: Annotated[Path, typer.Option("--out", parser=as_path, metavar="DIR", help="The folder to write.")],
    scheme: Annotated[str, typer.Option(help="As of mt convert --quantize: w4a16-g32, int8, nvfp4, ...")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD",
            help="rotate, rotate-values; smoothquant or awq; max, percentile or mse; gptq. Repeatable.",
            show_default="mse, gptq",
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(parser=as_path, metavar="FILE", help="A text in UTF-8 to calibrate with.")
    ] = None,
    eval_text: Annotated[
        Path | None, typer.Option(parser=as_path, metavar="FILE", help="A text to measure with.", show_default=False)
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="To calibrate with.")] = 512,
    eval_samples: Annotated[int, typer.Option(min=1, help="To measure with.")] = 32,
    seq_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sample of a text. Default: 2048, or the model's longest.")
    ] = None,
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Samples that a rank computes at once.")] = 1,
    percentile: Annotated[float, typer.Option(min=50.0, max=100.0, help="Of --method percentile.")] = 99.9,
    alpha: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of --method smoothquant.")] = 0.5,
    damping: Annotated[float, typer.Option(min=0.0, help="Of GPTQ: part of the mean of the diagonal.")] = 0.01,
    order: Annotated[
        Literal["activity", "file"], typer.Option(help="In which GPTQ rounds columns: the most active first, or as is.")
    ] = "activity",
    min_tokens: Annotated[int, typer.Option(min=1, help="Experts with fewer are named.")] = 64,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Of the data (data.*), layout (parallel.*) and others."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    nproc: Annotated[int | None, typer.Option(help="Processes to start on this machine, for a layout.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what calibration.json holds.")] = False,
) -> None:
    """Quantize a model by what it computes of a data set, and measure what that costs.

    Calibrates with --text, or with the training samples of section [data]; measures with --eval-text, or with the
    validation samples. Writes a Hugging Face folder with the result, and calibration.json with all numbers.
    """
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt calibrate")
    from mt_core.launch.local import launch
    from mt_core.launch.session import rank_session
    from mt_core.train.build import resolve_device
    from mt_tools.calibration.options import CalibrationOptions, methods_named
    from mt_tools.calibration.run import result_path
    from mt_tools.calibration.writing import REPORT

    if (text is None) != (eval_text is None):
        raise ConfigError(
            "--text and --eval-text go together: a model is measured with what it was not calibrated with"
        )
    result_path(out)
    options = CalibrationOptions(
        scheme, methods_named(method or ["mse", "gptq"]), percentile, alpha, damping, order == "activity", min_tokens
    )
    options.quantizer()
    if nproc is not None:
        raise typer.Exit(launch(nproc, _without_nproc(typed_words(context))))
    from mt_tools.calibration.command_run import Data, calibrate_checkpoint

    data = Data(text, eval_text, samples, eval_samples, seq_length, micro_batch_size)
    with rank_session(resolve_device(device).type):
        result = calibrate_checkpoint(path, out, options, data, set_ or [], device, host_of(context))
        if result is not None and as_json:
            typer.echo((out / REPORT).read_text(encoding="utf-8"))
        elif result is not None:
            _show(out, options, result)


def _without_nproc(words: list[str]) -> list[str]:
    kept, skipped = [], False
    for word in words:
        if skipped or word == "--nproc" or word.startswith("--nproc="):
            skipped = word == "--nproc"
            continue
        kept.append(word)
    return kept


def _show(out: Path, options: CalibrationOptions, result: CalibrationResult) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("cross-entropy", "perplexity", "KL to the original"):
        table.add_column(name, justify="right")
    for name, part in (("before", result.before), ("after", result.after)):
        table.add_row(name, f"{part.cross_entropy:.5f}", f"{part.perplexity:.4f}", f"{part.divergence:.5f}")
    Console(markup=False, highlight=False).print(table)
    worst = max(result.weights, key=lambda weight: weight.error)
    typer.echo(f"{len(result.weights)} matrices; the largest error of outputs is {worst.error:.2%}, of {worst.name}")
    for weight in result.weights:
        for note in weight.notes:
            typer.echo(note)
        if weight.unseen:
            typer.echo(_unseen(weight.name, weight.unseen, options.min_tokens))
    typer.echo(f"{out}: {options.scheme} by {', '.join(options.methods)}")


def _unseen(name: str, unseen: dict[int, int], least: int) -> str:
    shown = [f"{expert} ({tokens})" for expert, tokens in sorted(unseen.items())[:UNSEEN_SHOWN]]
    more = f" and {len(unseen) - UNSEEN_SHOWN} more" if len(unseen) > UNSEEN_SHOWN else ""
    return (
        f"{name}: fewer than {least} tokens for the matrices of experts {', '.join(shown)}{more}; their weights are "
        "rounded without calibration"
    )
