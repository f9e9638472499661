"""`mt eval lambada`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.paths import as_path
from mt_eval.commands.options import AS_JSON, CHECKPOINT, DEVICE, LIMIT, OUTPUT, SEQ_LENGTH, run_tasks, window_length
from mt_infer.commands.layout import NPROC, SETTINGS

if TYPE_CHECKING:
    from mt_eval.tasks import Task
    from mt_infer.text import TextGenerator


def lambada(
    context: typer.Context,
    path: CHECKPOINT,
    data: Annotated[Path, typer.Argument(parser=as_path, metavar="FILE", help='JSON lines with "text".')],
    strict: Annotated[
        bool, typer.Option("--strict/--loose", help="The whole last word, or its last token only.")
    ] = True,
    seq_length: SEQ_LENGTH = None,
    limit: LIMIT = None,
    output: OUTPUT = None,
    as_json: AS_JSON = False,
    set_: SETTINGS = None,
    device: DEVICE = "auto",
    nproc: NPROC = None,
) -> None:
    """LAMBADA: how often the last word of a passage is the likeliest one."""

    def build(generator: TextGenerator) -> Sequence[Task]:
        from mt_eval.lambada import Lambada

        length = window_length(generator, seq_length)
        return [Lambada(data, generator.tokenizer, length, is_strict=strict, limit=limit)]

    run_tasks(context, path, build, output=output, as_json=as_json, set_=set_ or [], device=device, nproc=nproc)
