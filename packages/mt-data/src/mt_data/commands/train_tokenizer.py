"""`mt data train-tokenizer`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mt_core.errors import ConfigError, DataError
from mt_core.plugins import load_plugins
from mt_core.specs import TOKENIZERS
from mt_data.preprocess.files import refuse_remote_output
from mt_data.preprocess.readers import Record, expand_globs, iter_documents
from mt_data.tokenizers.training import FORMATS, Format, Kind, TrainedTokenizer, TrainOptions, train


def train_tokenizer(
    kind: Annotated[Kind, typer.Option(help="bpe as GPT-2's, wordpiece as BERT's, or unigram.")],
    input: Annotated[list[str], typer.Option(help="Files or patterns: jsonl, .gz, .zst, parquet, txt. Repeatable.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens wanted, special ones included.")],
    output: Annotated[Path, typer.Option(help="Directory to write the tokenizer's files to.")],
    format: Annotated[
        Format | None, typer.Option(help="bpe: gpt2, huggingface or sentencepiece; unigram: the latter two.")
    ] = None,
    json_keys: Annotated[list[str], typer.Option(help="Keys of the text in a record. Repeatable.")] = ["text"],  # noqa: B006
    min_frequency: Annotated[int, typer.Option(min=1, help="Do not merge pairs seen less often.")] = 2,
    lower_case: Annotated[bool, typer.Option(help="wordpiece: lower letters, strip accents.")] = True,
    vocab_extra_ids: Annotated[int, typer.Option(min=0, help="T5 sentinels <extra_id_0> and on to put in.")] = 0,
    max_mb: Annotated[float | None, typer.Option(min=0, help="Stop reading after so many MB of text.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace files of an earlier run in the directory.")] = False,
) -> None:
    """Train a vocabulary on a corpus, and say which command uses it.

    The files are those of a registered tokenizer: GPT2BPETokenizer, BertWordPieceLowerCase or
    BertWordPieceCase, HuggingFaceTokenizer, SentencePieceTokenizer.
    """
    options = TrainOptions(
        kind=kind,
        format=format or FORMATS[kind][0],
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        lower_case=lower_case,
        vocab_extra_ids=vocab_extra_ids,
    )
    refuse_remote_output("--output", output)
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise ConfigError(f"--output {str(output)!r} is not empty; name another directory, or pass --overwrite")
    texts = limited(texts_of(iter_documents(expand_globs(input)), json_keys), max_mb)
    trained = train(texts, options)
    write_files(trained, output)
    section = tokenizer_section(trained, output)
    typer.echo(f"wrote {', '.join(sorted(trained.files))} to {output}: {built_size(section)} tokens")
    typer.echo("\n" + toml_section(section))
    typer.echo("\nnext: " + next_command(section, input))


def texts_of(records: Iterator[Record], json_keys: Sequence[str]) -> Iterator[str]:
    """The strings under `json_keys`, which may also be lists of strings; DataError names file and line."""
    for record in records:
        for key in json_keys:
            value = record.value.get(key)
            for part in value if isinstance(value, list) else [value]:
                try:
                    yield _as_text(part)
                except ValueError as error:
                    raise DataError(
                        f"{record.file}, line {record.line}: the key {key!r} holds {error}; the record has the keys "
                        f"{', '.join(sorted(record.value))} (see --json-keys)"
                    ) from error


def _as_text(value: object) -> str:
    """The value if it is text; ValueError saying what it is instead."""
    if not isinstance(value, str):
        raise ValueError("nothing" if value is None else f"a {type(value).__name__}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate, which is no Unicode text") from None
    return value


def limited(texts: Iterator[str], max_mb: float | None) -> Iterator[str]:
    """`texts` until so many megabytes (10^6 bytes of UTF-8, counted by texts) have passed."""
    left = float("inf") if max_mb is None else max_mb * 1e6
    for text in texts:
        yield text
        left -= len(text.encode("utf-8"))
        # After the text that passes the limit, so that there is one text at least.
        if left <= 0:
            return


def write_files(trained: TrainedTokenizer, output: Path) -> None:
    """Each file under a temporary name first, so that none is there in part."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, data in trained.files.items():
            temporary = output / f".{name}.tmp"
            temporary.write_bytes(data)
            temporary.replace(output / name)
    except OSError as error:
        raise DataError(f"--output {str(output)!r} cannot be written: {error.strerror or error}") from error


def tokenizer_section(trained: TrainedTokenizer, output: Path) -> dict[str, Any]:
    """The `tokenizer` section of the configuration for the new files."""
    paths = {key: str(output if name == "." else output / name) for key, name in trained.keys.items()}
    extra = {"vocab_extra_ids": trained.vocab_extra_ids} if trained.vocab_extra_ids else {}
    return {"tokenizer_type": trained.tokenizer_type, **paths, **extra}


def built_size(section: dict[str, Any]) -> int:
    """Vocabulary of the tokenizer as it is built from its files; a check that they load as well."""
    spec = load_plugins()[TOKENIZERS].get(section["tokenizer_type"])
    return spec.build.load()(spec.config_type.load()(**section)).vocab_size


def toml_section(section: dict[str, Any]) -> str:
    """The section as a configuration file has it."""
    lines = (f"{key} = {json.dumps(value)}" for key, value in section.items())
    return "\n".join(["[tokenizer]", *lines])


def next_command(section: dict[str, Any], inputs: Sequence[str]) -> str:
    """The command that tokenizes the same corpus."""
    flags = [part for key, value in section.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    sources = [part for source in inputs for part in ("--input", source)]
    words = ["mt", "data", "preprocess", *sources, "--output-prefix", "corpus", *flags, "--append-eod"]
    return shlex.join(words)
