"""`mt eval generation`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mt_core.commands import need
from mt_core.errors import ConfigError
from mt_core.paths import as_path
from mt_eval.commands.options import AS_JSON, OUTPUT, need_extra, show
from mt_infer.commands.layout import progress_bar

CODE = "Generated programs"


def generation(
    predictions: Annotated[
        Path, typer.Argument(parser=as_path, metavar="PREDICTIONS", help="JSON lines of mt generate --output.")
    ],
    metric: Annotated[
        list[str], typer.Option(help="exact_match, f1, bleu, rouge or pass@k. Repeatable.", show_default=False)
    ],
    reference_key: Annotated[str, typer.Option(help="Of the lines: a text, or a list of texts.")] = "references",
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run what the model wrote, for pass@k.", rich_help_panel=CODE)
    ] = False,
    k: Annotated[str, typer.Option(metavar="K,K,...", help="Of pass@k.", rich_help_panel=CODE)] = "1",
    test_key: Annotated[
        str, typer.Option(help="Of the lines: a program to append, which fails or not.", rich_help_panel=CODE)
    ] = "test",
    timeout: Annotated[int, typer.Option(help="Seconds for each program.", rich_help_panel=CODE)] = 10,
    memory_mb: Annotated[
        int, typer.Option(help="Memory of each program, with its processes.", rich_help_panel=CODE)
    ] = 1024,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Programs at a time. Default: one for each CPU.", rich_help_panel=CODE)
    ] = None,
    allow_unisolated: Annotated[
        bool,
        typer.Option(
            "--allow-unisolated",
            help="Also where programs would have the network, the environment of this command and the user's files.",
            rich_help_panel=CODE,
        ),
    ] = False,
    output: OUTPUT = None,
    as_json: AS_JSON = False,
) -> None:
    """Generated texts against references, or by tests."""
    need("torch", "mt-data", command="mt eval generation")
    extras = {"bleu": "sacrebleu", "rouge": "rouge_score"}
    need_extra("metrics", *(extras[name] for name in metric if name in extras), command="mt eval generation")
    from mt_eval.metrics.code_execution import Limits, ProgramRunner
    from mt_eval.metrics.generation import Generation, measure_generation

    limits, runner = Limits(timeout, memory_mb), None
    if allow_code_execution:
        runner = ProgramRunner(limits, workers=workers, allow_unisolated=allow_unisolated)
    task = Generation(predictions, metric, reference_key=reference_key, test_key=test_key, k=_numbers(k), runner=runner)
    with progress_bar() as bar:
        row = bar.add_task(task.name, total=len(task))
        evaluation = measure_generation(task, output, lambda done, total: bar.update(row, completed=done))
    show(evaluation, as_json)


def _numbers(k: str) -> list[int]:
    try:
        numbers = [int(one) for one in k.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--k {k}: it is one or more numbers from 1 on, with commas between them")
    return numbers
