"""Options of a run of preprocessing, and what it reports."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mt_core.errors import ConfigError
from mt_data.preprocess.encodings import UTF8, check_encodings
from mt_data.preprocess.files import refuse_remote_output
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


# -- part of a machine, when several share a corpus --------------------------------------------------


@dataclass(frozen=True)
class MachineShare:
    """Part `index` (from 0) of `count`; `origin` says who decided."""

    index: int
    count: int
    origin: str

    @property
    def suffix(self) -> str:
        """Behind the output prefix; sorts in the order of the parts. Empty for the whole corpus."""
        return "" if self.count == 1 else f"_{self._padded(self.index)}-of-{self._padded(self.count)}"

    @property
    def all_suffixes(self) -> str:
        """The suffixes of all parts, in order, as bash and zsh expand it."""
        first, last = self._padded(0), self._padded(self.count - 1)
        return f"_{{{first}..{last}}}-of-{self._padded(self.count)}"

    def _padded(self, number: int) -> str:
        # At least five digits, so that names sort in the order of the parts up to 99999 machines.
        return f"{number:0{max(5, len(str(self.count)))}d}"


WHOLE = MachineShare(0, 1, "the whole corpus")


def machine_share(
    shard: str | None, partitions: int | None, environment: Mapping[str, str] | None = None
) -> MachineShare:
    """The share that `--shard` names, else the one that a SLURM array or torchrun gives, else all.

    Raises ConfigError for a shard that cannot be, and where SLURM and torchrun both give one.
    """
    environment = os.environ if environment is None else environment
    share = _from_option(shard, partitions) if shard is not None else _from_environment(environment)
    if not 0 <= share.index < share.count:
        raise ConfigError(f"{share.origin}: part {share.index} of {share.count} is none; parts count from 0")
    if partitions is not None and share is not WHOLE and share.count != partitions:
        raise ConfigError(f"--partitions {partitions}, but {share.origin} says {share.count} parts")
    return share


def _from_option(shard: str, partitions: int | None) -> MachineShare:
    match = re.fullmatch(r"(\d+)(?:/(\d+))?", shard)
    if not match or (match[2] is None and partitions is None):
        raise ConfigError(f"--shard {shard}: expected i/n, such as 0/4, or i together with --partitions n")
    count = int(match[2]) if match[2] is not None else partitions
    return MachineShare(int(match[1]), count or 0, f"--shard {shard}")


def _from_environment(environment: Mapping[str, str]) -> MachineShare:
    # Both may be set: torchrun started inside of a SLURM array job. Which of the two divides the corpus cannot be
    # guessed.
    shares = [share for share in (_from_slurm(environment), _from_torchrun(environment)) if share.count > 1]
    if len(shares) > 1:
        raise ConfigError(
            f"{shares[0].origin} and {shares[1].origin} both name a part; say which with --shard i/n (0/1 for all)"
        )
    return shares[0] if shares else WHOLE


def _from_slurm(environment: Mapping[str, str]) -> MachineShare:
    count = _number(environment, "SLURM_ARRAY_TASK_COUNT", 1)
    if "SLURM_ARRAY_TASK_ID" not in environment or count == 1:
        return WHOLE
    # --array=5-20:5 gives the ids 5, 10, 15, 20 with MIN 5 and STEP 5: index = (id - MIN) / STEP. TASK_COUNT counts the
    # members, so arrays with gaps (0,3,4) fail the check below.
    task, first, step = (
        _number(environment, name, default)
        for name, default in (
            ("SLURM_ARRAY_TASK_ID", 0),
            ("SLURM_ARRAY_TASK_MIN", 0),
            ("SLURM_ARRAY_TASK_STEP", 1),
        )
    )
    index, rest = divmod(task - first, max(step, 1))
    if rest or index >= count:
        raise ConfigError(
            f"SLURM_ARRAY_TASK_ID={task} is no member of an even array of {count} from {first}; "
            "number the array 0-N, or give --shard i/n"
        )
    return MachineShare(index, count, f"SLURM_ARRAY_TASK_ID={task}")


def _from_torchrun(environment: Mapping[str, str]) -> MachineShare:
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return WHOLE
    rank, world = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
    return MachineShare(rank, world, f"RANK={rank}, WORLD_SIZE={world}")


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is no number; give --shard i/n") from None
