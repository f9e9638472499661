"""Options of a run of preprocessing, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mt_core.errors import ConfigError
from mt_data.preprocess.encodings import UTF8, check_encodings
from mt_data.preprocess.files import refuse_remote_output
from mt_data.preprocess.machine import MachineShare
from mt_data.preprocess.readers import MAX_LINE_BYTES

OnError = Literal["raise", "skip"]
Splitter = Literal["rules", "nltk"]
ExecutorName = Literal["local", "dask"]


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """The command's options under the same names. Raises ConfigError for values that cannot be."""

    input: tuple[str, ...]
    """Files, folders or patterns."""
    output_prefix: str
    """Outputs are `{output_prefix}_{key}_{document or sentence}.bin` and `.idx`."""
    tokenizer_type: str
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the tokenizer's section of the configuration, such as vocab_file."""
    json_keys: tuple[str, ...] = ("text",)
    """Fields (or Parquet columns) to tokenize, each into an output of its own."""
    append_eod: bool = False
    split_sentences: bool = False
    sentence_splitter: Splitter = "rules"
    lang: str = "english"
    keep_newlines: bool = False
    """Sentences keep the white space behind them, so that joined they are the text."""
    workers: int | None = None
    """Processes. Default: the cores that this one may use, fewer for small inputs. Does not change the output."""
    partitions: int | None = None
    shard: str | None = None
    """The part of the corpus that this machine does: "i/n", or "i" with partitions=n; i counts from 0."""
    on_error: OnError = "raise"
    input_format: str = "auto"
    encodings: tuple[str, ...] = UTF8
    """Tried in turn on each text, or line. A byte order mark goes before them."""
    shard_mb: float | None = None
    """Input (MiB) of a piece of work. Default: a 256th of the corpus, within 1 to 32."""
    max_line_bytes: int = MAX_LINE_BYTES
    overwrite: bool = False
    executor: ExecutorName = "local"
    dask_scheduler: str | None = None

    def __post_init__(self) -> None:
        _require(bool(self.input), "--input is missing; name files or patterns")
        check_encodings(self.encodings, "--encoding")
        refuse_remote_output("--output-prefix", self.output_prefix)
        _require(bool(Path(self.output_prefix).name), f"--output-prefix {self.output_prefix!r} names a folder")
        _require(bool(self.json_keys), "--json-keys needs at least one key")
        _require(len(set(self.json_keys)) == len(self.json_keys), f"--json-keys {self.json_keys} repeats a key")
        for key in self.json_keys:
            _require(bool(key) and "/" not in key, f"--json-keys {key!r} cannot be part of a file name")
        _require(self.workers is None or self.workers > 0, f"--workers {self.workers} must be at least 1")
        _require(self.shard_mb is None or self.shard_mb > 0, f"--shard-mb {self.shard_mb} must be above 0")
        _require(self.max_line_bytes > 0, f"--max-line-bytes {self.max_line_bytes} must be above 0")
        _require(self.on_error in ("raise", "skip"), f"--on-error {self.on_error} must be raise or skip")
        _require(
            self.sentence_splitter in ("rules", "nltk"),
            f"--sentence-splitter {self.sentence_splitter} must be rules or nltk",
        )
        _require(self.executor in ("local", "dask"), f"--executor {self.executor} must be local or dask")
        if not self.split_sentences:
            _require(not self.keep_newlines, "--keep-newlines only counts with --split-sentences")
        if self.executor == "dask":
            _require(self.dask_scheduler is not None, "--executor dask needs --dask-scheduler HOST:PORT")
            _require(self.workers is None, "--workers is the scheduler's matter with --executor dask")
        else:
            _require(self.dask_scheduler is None, "--dask-scheduler only counts with --executor dask")

    @property
    def level(self) -> str:
        """What a sequence of the output is, as Megatron names it: "document" or "sentence"."""
        return "sentence" if self.split_sentences else "document"


@dataclass
class Counts:
    """What was done; sums over shards. `sequences` and `tokens` are by JSON key."""

    input_bytes: int = 0
    """Bytes of the input files as they lie on the disk (compressed ones count compressed)."""
    documents: int = 0
    skipped: int = 0
    sequences: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def add(self, other: Counts) -> None:
        self.input_bytes += other.input_bytes
        self.documents += other.documents
        self.skipped += other.skipped
        for mine, theirs in ((self.sequences, other.sequences), (self.tokens, other.tokens)):
            for key, value in theirs.items():
                mine[key] = mine.get(key, 0) + value


@dataclass(frozen=True, kw_only=True)
class PreprocessReport:
    """What a finished run made."""

    outputs: Mapping[str, Path]
    """Prefix of the indexed dataset by JSON key."""
    share: MachineShare
    counts: Counts
    shards: int
    shards_reused: int
    """Pieces of work that an earlier, interrupted run had finished."""
    skipped_report: Path | None
    """A JSON line for each record left out: file, line, reason. None when none was."""
    seconds: float


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
