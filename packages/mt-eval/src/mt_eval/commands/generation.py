"""`mt eval generation`, `mt eval qa` and `mt eval vqa`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.commands import host_of, need, with_fields
from mt_core.errors import ConfigError
from mt_core.paths import as_path
from mt_eval.commands.options import (
    AS_JSON,
    CHAT_TEMPLATE,
    CHECKPOINT,
    LIMIT,
    OUTPUT,
    STOP,
    EvaluationOptions,
    named_options,
    need_extra,
    run_tasks,
    show,
)
from mt_infer.commands.layout import progress_bar

if TYPE_CHECKING:
    from mt_eval.tasks import Task
    from mt_infer.text import TextGenerator


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
    from mt_core.sandbox.programs import Limits, ProgramRunner
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
        numbers = [int(number) for number in k.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--k {k}: it is one or more numbers from 1 on, with commas between them")
    return numbers


# -- qa ----------------------------------------------------------------------------------------------

PASSAGES = "Passages"
TOP_K = 5


@with_fields
def qa(
    context: typer.Context,
    path: CHECKPOINT,
    run: EvaluationOptions,
    data: Annotated[
        list[str],
        typer.Option(
            metavar="FILE",
            help="Questions in JSON lines, a JSON array or tab-separated lines; patterns too. Repeatable.",
            show_default=False,
        ),
    ],
    ft_neighbours: Annotated[
        int | None,
        typer.Option(min=0, help="Passages in the prompt. Default: as in training, else 1.", rich_help_panel=PASSAGES),
    ] = None,
    encode_passages: Annotated[
        bool | None,
        typer.Option(help="Passages are neighbours of every chunk, for RETRO. Default: yes.", rich_help_panel=PASSAGES),
    ] = None,
    reuse_top: Annotated[
        bool | None,
        typer.Option(
            help="Neighbours are the first passages, not those behind the prompt's. Default: yes.",
            rich_help_panel=PASSAGES,
        ),
    ] = None,
    without_passages: Annotated[
        bool,
        typer.Option("--without-passages", help="Measure a second time, without any.", rich_help_panel=PASSAGES),
    ] = False,
    retriever: Annotated[
        str | None,
        typer.Option(help="Finds the passages: index, or one of a plugin.", rich_help_panel=PASSAGES),
    ] = None,
    retriever_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of the retriever. Repeatable.", rich_help_panel=PASSAGES),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Passages that it finds. Default: 5.", rich_help_panel=PASSAGES)
    ] = None,
    chat_template: CHAT_TEMPLATE = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 64,
    stop: STOP = None,
    limit: LIMIT = None,
) -> None:
    """Questions answered with retrieved passages: exact match and F1 of greedy answers."""
    data_options = {
        "ft_neighbours": ft_neighbours,
        "encode_passages": encode_passages,
        "reuse_top": reuse_top,
        "chat_template": chat_template,
    }
    keys = {key: value for key, value in data_options.items() if value is not None}
    options = named_options(retriever_option or [], "--retriever-option")
    if retriever is None and (options or top_k is not None):
        raise ConfigError("--retriever-option and --top-k are those of a retriever; name it with --retriever")

    def build(generator: TextGenerator) -> Sequence[Task]:
        from mt_eval.qa import QuestionAnswering
        from mt_infer.sampling.parameters import SamplingParameters

        host = host_of(context)
        passage_retriever = None
        if retriever is not None:
            passage_retriever = (
                host.registry("passage_retrievers").get(retriever, key="--retriever").build.load()(options, run.device)
            )
        sampling = SamplingParameters(temperature=0.0, max_tokens=max_tokens, stop=tuple(stop or ()))
        return [
            QuestionAnswering(
                data,
                generator,
                keys=keys,
                sampling=sampling,
                with_passages=with_passages,
                retriever=passage_retriever if with_passages else None,
                top_k=top_k or TOP_K,
                limit=limit,
            )
            for with_passages in ((True, False) if without_passages else (True,))
        ]

    run_tasks(context, path, build, run)


# -- vqa ---------------------------------------------------------------------------------------------


@with_fields
def vqa(
    context: typer.Context,
    path: CHECKPOINT,
    run: EvaluationOptions,
    data: Annotated[
        list[str],
        typer.Option(
            metavar="FILE", help="JSON lines, or shards (.tar); patterns too. Repeatable.", show_default=False
        ),
    ],
    image_folder: Annotated[
        Path | None,
        typer.Option(parser=as_path, help="Where paths in JSON lines begin. Default: the folder of the file."),
    ] = None,
    chat_template: CHAT_TEMPLATE = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 32,
    stop: STOP = None,
    limit: LIMIT = None,
) -> None:
    """Questions about images, and captions: exact match and VQAv2's accuracy of greedy answers."""
    data_options = {"image_folder": None if image_folder is None else str(image_folder), "chat_template": chat_template}
    keys = {key: value for key, value in data_options.items() if value is not None}

    def build(generator: TextGenerator) -> Sequence[Task]:
        from mt_eval.vqa import VisualQuestions
        from mt_infer.sampling.parameters import SamplingParameters

        sampling = SamplingParameters(temperature=0.0, max_tokens=max_tokens, stop=tuple(stop or ()))
        return [VisualQuestions(data, generator.tokenizer, generator.config, keys=keys, sampling=sampling, limit=limit)]

    run_tasks(context, path, build, run)
