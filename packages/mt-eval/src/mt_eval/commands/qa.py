"""`mt eval qa`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.commands import host_of
from mt_core.errors import ConfigError
from mt_eval.commands.options import (
    AS_JSON,
    CHAT_TEMPLATE,
    CHECKPOINT,
    DEVICE,
    LIMIT,
    OUTPUT,
    STOP,
    named_options,
    run_tasks,
)
from mt_infer.commands.layout import NPROC, SETTINGS

if TYPE_CHECKING:
    from mt_eval.tasks import Task
    from mt_infer.text import TextGenerator

PASSAGES = "Passages"
TOP_K = 5


def qa(
    context: typer.Context,
    path: CHECKPOINT,
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
    output: OUTPUT = None,
    as_json: AS_JSON = False,
    set_: SETTINGS = None,
    device: DEVICE = "auto",
    nproc: NPROC = None,
) -> None:
    """Questions answered with retrieved passages: exact match and F1 of greedy answers."""
    given = {
        "ft_neighbours": ft_neighbours,
        "encode_passages": encode_passages,
        "reuse_top": reuse_top,
        "chat_template": chat_template,
    }
    keys = {key: value for key, value in given.items() if value is not None}
    options = named_options(retriever_option or [], "--retriever-option")
    if retriever is None and (options or top_k is not None):
        raise ConfigError("--retriever-option and --top-k are those of a retriever; name it with --retriever")

    def build(generator: TextGenerator) -> Sequence[Task]:
        from mt_eval.qa.task import QuestionAnswering
        from mt_infer.sampling.parameters import SamplingParameters

        host = host_of(context)
        found = None
        if retriever is not None:
            found = host.passage_retrievers.get(retriever, key="--retriever").build.load()(options, device)
        sampling = SamplingParameters(temperature=0.0, max_tokens=max_tokens, stop=tuple(stop or ()))
        return [
            QuestionAnswering(
                data,
                generator,
                keys=keys,
                sampling=sampling,
                with_passages=with_passages,
                retriever=found if with_passages else None,
                top_k=top_k or TOP_K,
                limit=limit,
            )
            for with_passages in ((True, False) if without_passages else (True,))
        ]

    run_tasks(context, path, build, output=output, as_json=as_json, set_=set_ or [], device=device, nproc=nproc)
