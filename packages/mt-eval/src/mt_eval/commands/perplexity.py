"""`mt eval ppl`, `mt eval wikitext103` and `mt eval lambada`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from mt_core.commands import host_of, with_fields
from mt_core.errors import ConfigError
from mt_core.paths import as_path
from mt_eval.commands.options import (
    CHECKPOINT,
    LIMIT,
    SEQ_LENGTH,
    EvaluationOptions,
    named_files,
    run_tasks,
    window_length,
)

if TYPE_CHECKING:
    from mt_core.interfaces import Split
    from mt_eval.tasks import Task
    from mt_infer.text import TextGenerator


SPLITS = ("train", "valid", "test")
MEGATRON_OVERLAP = 32
"""Megatron-LM's default of --overlapping-eval."""


@with_fields
def ppl(
    context: typer.Context,
    path: CHECKPOINT,
    run: EvaluationOptions,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FILE", help=".bin/.idx, JSON lines, Parquet or plain text. Repeatable.", show_default=False
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="SPLIT",
            help="train, valid or test of the checkpoint's section [data], whose samples may have neighbours.",
            show_default=False,
        ),
    ] = None,
    without_neighbors: Annotated[
        bool, typer.Option("--without-neighbors", help="Measure the split a second time, without neighbours.")
    ] = False,
    overlapping_eval: Annotated[
        int | None, typer.Option(min=1, help="Tokens that each window adds. Default: windows do not overlap.")
    ] = None,
    seq_length: SEQ_LENGTH = None,
    text_key: Annotated[str, typer.Option(help="Of JSON lines and Parquet.")] = "text",
    input_format: Annotated[
        str, typer.Option(help="jsonl, text, text-lines or parquet; auto: by the ending.")
    ] = "auto",
    detokenizer: Annotated[str, typer.Option(help="none, wikitext or ptb: applied to texts before tokens.")] = "none",
    prefix: Annotated[
        bool | None,
        typer.Option(help="Predict the first token of a document too. Default: yes, but for plain text."),
    ] = None,
    limit: LIMIT = None,
) -> None:
    """Perplexity of texts: of a token, a byte and a word; or of the samples of a split, with their neighbours."""
    named = named_files(data or [])
    chosen = split_named(split, bool(named), without_neighbors)

    def build(generator: TextGenerator) -> Sequence[Task]:
        from mt_eval.perplexity.samples import split_tasks
        from mt_eval.perplexity.task import Perplexity
        from mt_eval.perplexity.texts import TextSet

        length = window_length(generator, seq_length)
        texts = [TextSet(name, file, text_key, detokenizer, prefix, input_format) for name, file in named.items()]
        tasks: list[Task] = [
            Perplexity(text_set, generator.tokenizer, length, stride=overlapping_eval, limit=limit)
            for text_set in texts
        ]
        if chosen is None:
            return tasks
        host, tokenizer = host_of(context), generator.tokenizer
        return tasks + split_tasks(
            chosen, generator.config, tokenizer, host, without_neighbors=without_neighbors, limit=limit
        )

    run_tasks(context, path, build, run)


def split_named(split: str | None, has_texts: bool, without_neighbors: bool) -> Split | None:
    """Raises ConfigError for what is no split, when there is nothing to measure, and for a key that has no effect."""
    if split is None and not has_texts:
        raise ConfigError("there is nothing to measure; give texts with --data, or --split of the checkpoint's data")
    if split is None and without_neighbors:
        raise ConfigError("--without-neighbors is of --split, whose samples have neighbours; texts of --data have none")
    if split is None:
        return None
    if split not in SPLITS:
        raise ConfigError(f"--split {split}: it can be {', '.join(SPLITS)}")
    return cast("Split", split)


@with_fields
def wikitext103(
    context: typer.Context,
    path: CHECKPOINT,
    run: EvaluationOptions,
    data: Annotated[Path, typer.Argument(parser=as_path, metavar="FILE", help="wiki.test.tokens of WikiText-103.")],
    overlapping_eval: Annotated[int, typer.Option(min=1, help="Tokens that each window adds.")] = MEGATRON_OVERLAP,
    seq_length: SEQ_LENGTH = None,
    limit: LIMIT = None,
) -> None:
    """WikiText-103 as Megatron-LM measured it; word_perplexity is its adjusted perplexity."""

    def build(generator: TextGenerator) -> Sequence[Task]:
        from mt_eval.perplexity.task import Perplexity
        from mt_eval.perplexity.texts import TextSet

        texts = TextSet("wikitext103", str(data), detokenizer="wikitext", prefix=False, input_format="text")
        length = window_length(generator, seq_length)
        # A stride above the window would leave tokens out; models with fewer positions than 32 have no overlap.
        return [Perplexity(texts, generator.tokenizer, length, stride=min(overlapping_eval, length), limit=limit)]

    run_tasks(context, path, build, run)


# -- lambada -----------------------------------------------------------------------------------------


@with_fields
def lambada(
    context: typer.Context,
    path: CHECKPOINT,
    run: EvaluationOptions,
    data: Annotated[Path, typer.Argument(parser=as_path, metavar="FILE", help='JSON lines with "text".')],
    strict: Annotated[
        bool, typer.Option("--strict/--loose", help="The whole last word, or its last token only.")
    ] = True,
    seq_length: SEQ_LENGTH = None,
    limit: LIMIT = None,
) -> None:
    """LAMBADA: how often the last word of a passage is the likeliest one."""

    def build(generator: TextGenerator) -> Sequence[Task]:
        from mt_eval.lambada import Lambada

        length = window_length(generator, seq_length)
        return [Lambada(data, generator.tokenizer, length, is_strict=strict, limit=limit)]

    run_tasks(context, path, build, run)
