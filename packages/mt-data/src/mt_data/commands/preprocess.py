"""`mt data preprocess`."""

from __future__ import annotations

import re
import shlex
import signal
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from mt_core.errors import ConfigError
from mt_core.wording import counted
from mt_data.preprocess.encodings import UTF8
from mt_data.preprocess.options import PreprocessOptions, PreprocessReport

SPREAD_OPTIONS = ("--input", "--json-keys", "--encoding")
Vocabulary = "Tokenizer"
Parts = "Many machines"


class PreprocessCommand(TyperCommand):
    """Lets `--input`, `--json-keys` and `--encoding` take several values, as Megatron's script does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(in_todays_words(args), SPREAD_OPTIONS))


def in_todays_words(arguments: Sequence[str]) -> list[str]:
    """`--json-key`, as Megatron's older script has it, is `--json-keys`, with a note."""
    if any(argument.partition("=")[0] == "--json-key" for argument in arguments):
        typer.echo("note: --json-key is called --json-keys here", err=True)
    return [re.sub("^--json-key(?==|$)", "--json-keys", argument) for argument in arguments]


def spread(arguments: Sequence[str], options: Iterable[str]) -> list[str]:
    """`--key a b` as `--key a --key b`, for the options named."""
    result: list[str] = []
    option: str | None = None
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            option = argument if argument in options else None
        # A further value: the option is repeated before it, unless it stands there already. `--input a b` has become
        # `--input a --input b` when the loop ends.
        elif option is not None and result[-1] != option:
            result.append(option)
        result.append(argument)
    return result


def preprocess(
    input: Annotated[
        list[str],
        typer.Option(help="Files, folders, quoted patterns: .jsonl, .parquet, .txt, .md, also .gz, .zst."),
    ],
    output_prefix: Annotated[str, typer.Option(help="Outputs are PREFIX_KEY_document (or _sentence) .bin, .idx.")],
    tokenizer_type: Annotated[
        str, typer.Option(help="Registered name; mt plugins lists them.", rich_help_panel=Vocabulary)
    ],
    vocab_file: Annotated[str | None, typer.Option(rich_help_panel=Vocabulary)] = None,
    merge_file: Annotated[str | None, typer.Option(rich_help_panel=Vocabulary)] = None,
    tokenizer_model: Annotated[str | None, typer.Option(rich_help_panel=Vocabulary)] = None,
    vocab_size: Annotated[int | None, typer.Option(rich_help_panel=Vocabulary)] = None,
    vocab_extra_ids: Annotated[int | None, typer.Option(rich_help_panel=Vocabulary)] = None,
    tiktoken_pattern: Annotated[str | None, typer.Option(rich_help_panel=Vocabulary)] = None,
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(help="key=value of the tokenizer's section; repeatable.", rich_help_panel=Vocabulary),
    ] = None,
    json_keys: Annotated[
        list[str] | None, typer.Option(help="Keys to tokenize, each into its own output. Default: text.")
    ] = None,
    append_eod: Annotated[
        bool, typer.Option("--append-eod", help="End every document with the end-of-document id.")
    ] = False,
    split_sentences: Annotated[
        bool, typer.Option("--split-sentences", help="A sequence is a sentence, as BERT's data needs.")
    ] = False,
    sentence_splitter: Annotated[
        Literal["rules", "nltk"], typer.Option(help="nltk: Punkt, whose data must be installed.")
    ] = "rules",
    lang: Annotated[str, typer.Option(help="Language of the sentences.")] = "english",
    keep_newlines: Annotated[
        bool, typer.Option("--keep-newlines", help="Sentences keep the white space behind them.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes; the output is the same for any number. Default: the cores, fewer for small inputs."
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            help="i/n: do part i (from 0) of n. Default: from SLURM arrays and torchrun.", rich_help_panel=Parts
        ),
    ] = None,
    partitions: Annotated[
        int | None, typer.Option(help="n, where --shard gives i alone.", rich_help_panel=Parts)
    ] = None,
    executor: Annotated[Literal["local", "dask"], typer.Option(rich_help_panel=Parts)] = "local",
    dask_scheduler: Annotated[str | None, typer.Option(help="HOST:PORT", rich_help_panel=Parts)] = None,
    on_error: Annotated[
        Literal["raise", "skip"],
        typer.Option(help="skip: leave out lines that cannot be used, and list them in PREFIX.skipped.jsonl."),
    ] = "raise",
    input_format: Annotated[
        str, typer.Option(help="jsonl, text, text-lines or parquet, for names without a known ending.")
    ] = "auto",
    encoding: Annotated[
        list[str] | None, typer.Option(help="Encodings of the text, tried in turn. Default: utf-8.")
    ] = None,
    shard_mb: Annotated[
        float | None, typer.Option(help="MiB of input in a piece of work. Default: by the input's size, 1 to 32.")
    ] = None,
    max_line_bytes: Annotated[int | None, typer.Option(help="Longer lines are malformed. Default: 256 MiB.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace outputs that exist.")] = False,
) -> None:
    """Tokenize text into Megatron's indexed datasets; the same command goes on after an interruption.

    Example: mt data preprocess --input corpus.jsonl --output-prefix corpus --tokenizer-type ByteLevelTokenizer
    --append-eod
    """
    named = {
        "vocab_file": vocab_file,
        "merge_file": merge_file,
        "tokenizer_model": tokenizer_model,
        "vocab_size": vocab_size,
        "vocab_extra_ids": vocab_extra_ids,
        "tiktoken_pattern": tiktoken_pattern,
    }
    limit = {} if max_line_bytes is None else {"max_line_bytes": max_line_bytes}
    options = PreprocessOptions(
        input=tuple(input),
        output_prefix=output_prefix,
        tokenizer_type=tokenizer_type,
        tokenizer=tokenizer_options(named, tokenizer or []),
        json_keys=tuple(json_keys or ["text"]),
        append_eod=append_eod,
        split_sentences=split_sentences,
        sentence_splitter=sentence_splitter,
        lang=lang,
        keep_newlines=keep_newlines,
        workers=workers,
        partitions=partitions,
        shard=shard,
        on_error=on_error,
        input_format=input_format,
        encodings=tuple(encoding or UTF8),
        shard_mb=shard_mb,
        overwrite=overwrite,
        executor=executor,
        dask_scheduler=dask_scheduler,
        **limit,
    )
    run(options)


def tokenizer_options(named: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The tokenizer's section: the options that were given, and `key=value` settings with values as in TOML."""
    result = {key: value for key, value in named.items() if value is not None}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--tokenizer {setting}: expected key=value, for instance lower_case=true")
        if key.strip() in result:
            raise ConfigError(f"--tokenizer {setting}: {key.strip()} is given twice")
        result[key.strip()] = _toml_value(value.strip())
    return result


def _toml_value(text: str) -> Any:
    try:
        # TOML gives numbers, booleans and lists their types; what is no TOML, such as a bare path, is a text.
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def run(options: PreprocessOptions) -> None:
    """Do it with a progress bar; what Ctrl-C or SIGTERM leaves is explained."""
    from rich.console import Console

    from mt_data.commands.display import RichProgress
    from mt_data.preprocess.run import preprocess as run_preprocess

    console = Console(stderr=True)
    with sigterm_as_interrupt() as received, RichProgress(console) as progress:
        try:
            report = run_preprocess(options, progress)
        except KeyboardInterrupt:
            progress.note(
                f"interrupted; {progress.shards} finished shards are kept in {options.output_prefix}*.partial: "
                "the same command goes on from there"
            )
            # The shell's convention for a process that a signal ended: 130 after Ctrl-C, 143 after SIGTERM.
            raise typer.Exit(128 + (received[-1] if received else signal.SIGINT)) from None
    _show(report, options)


@contextmanager
def sigterm_as_interrupt() -> Iterator[list[int]]:
    """While it lasts, SIGTERM raises KeyboardInterrupt as Ctrl-C does. Gives the list of SIGTERMs received."""
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    # SIGTERM too, since schedulers end jobs by it; the default action would end this process at once, without the
    # message on how to go on.
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(report: PreprocessReport, options: PreprocessOptions) -> None:
    counts = report.counts
    for key, prefix in report.outputs.items():
        typer.echo(f"{prefix}: {counted(counts.sequences[key], 'sequence')}, {counted(counts.tokens[key], 'token')}")
    reused = f", {report.shards_reused} of {report.shards} shards from an earlier run" if report.shards_reused else ""
    typer.echo(f"{counted(counts.documents, 'document')} in {report.seconds:.1f} s{reused}")
    if report.skipped_report:
        typer.echo(f"lines skipped: {counts.skipped:,}; {report.skipped_report} lists them")
    first = next(iter(report.outputs.values()))
    if report.share.count == 1:
        typer.echo(f"next: mt data inspect {shlex.quote(str(first))}")
        return
    typer.echo("next, when all parts are done:")
    whole = shlex.quote(options.output_prefix)
    for key in report.outputs:
        output = f"{shlex.quote(key)}_{options.level}"
        parts = f"{whole}{report.share.all_suffixes}_{output}"
        typer.echo(f"  mt data merge --input {parts} --output-prefix {whole}_{output}")
