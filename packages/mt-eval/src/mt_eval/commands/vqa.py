"""`mt eval vqa`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.paths import as_path
from mt_eval.commands.options import AS_JSON, CHAT_TEMPLATE, CHECKPOINT, DEVICE, LIMIT, OUTPUT, STOP, run_tasks
from mt_infer.commands.layout import NPROC, SETTINGS

if TYPE_CHECKING:
    from mt_eval.tasks import Task
    from mt_infer.text import TextGenerator


def vqa(
    context: typer.Context,
    path: CHECKPOINT,
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
    output: OUTPUT = None,
    as_json: AS_JSON = False,
    set_: SETTINGS = None,
    device: DEVICE = "auto",
    nproc: NPROC = None,
) -> None:
    """Questions about images, and captions: exact match and VQAv2's accuracy of greedy answers."""
    given = {"image_folder": None if image_folder is None else str(image_folder), "chat_template": chat_template}
    keys = {key: value for key, value in given.items() if value is not None}

    def build(generator: TextGenerator) -> Sequence[Task]:
        from mt_eval.vqa.task import VisualQuestions
        from mt_infer.sampling.parameters import SamplingParameters

        sampling = SamplingParameters(temperature=0.0, max_tokens=max_tokens, stop=tuple(stop or ()))
        return [VisualQuestions(data, generator.tokenizer, generator.config, keys=keys, sampling=sampling, limit=limit)]

    run_tasks(context, path, build, output=output, as_json=as_json, set_=set_ or [], device=device, nproc=nproc)
