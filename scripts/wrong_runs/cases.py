"""A case: what trains the runs, the picture, the command, and the words of its answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CASES: dict[str, Case] = {}
BASE: Mapping[str, Any] = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 2,
    "model.max_position_embeddings": 32,
    "data.seq_length": 32,
    "train.train_iters": 200,
    "train.micro_batch_size": 8,
    "train.global_batch_size": 8,
    "train.eval_iters": 0,
    "train.sample_prompt": "null",
    "lr_schedule.lr_warmup_iters": 20,
    "logging.log_interval": 1,
    "logging.progress": "none",
}
"""From the preset gpt-tiny, on the built-in corpus where nothing else is said."""
CORPUS = {"data.corpus_bytes": 1_000_000}


@dataclass(frozen=True)
class Case:
    """train: makes the runs below a folder. plot: arguments of mt plot. command: of mt, which finds the fault; both
    run in that folder. words: of the answer."""

    train: Callable[[Path], None]
    plot: Sequence[str]
    command: Sequence[str]
    words: Sequence[str]


def case(
    name: str, *, plot: Sequence[str], command: Sequence[str], words: Sequence[str]
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Registers a function that trains the runs. name: of the picture."""

    def register(train: Callable[[Path], None]) -> Callable[[Path], None]:
        CASES[name] = Case(train, plot, command, words)
        return train

    return register


def mt(folder: Path, *words: str, codes: tuple[int, ...] = (0,), python: str = sys.executable) -> str:
    """What a command prints that runs in the folder. Raises RuntimeError for another exit code."""
    done = subprocess.run([python, "-m", "mt_cli", *words], cwd=folder, check=False, text=True, capture_output=True)
    if done.returncode not in codes:
        raise RuntimeError(f"mt {' '.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def settings(values: Mapping[str, Any]) -> list[str]:
    """Options of mt train."""
    return [part for key, value in {**BASE, **values}.items() for part in ("--set", f"{key}={value}")]


def train(folder: Path, name: str, changes: Mapping[str, Any] | None = None, *words: str, **options: Any) -> None:
    """A run in folder/NAME. changes: keys beside BASE. words: of mt train, a configuration in place of the preset
    first."""
    if not (folder / name / "metrics.jsonl").exists():
        common = [] if words[:1] and words[0].endswith(".toml") else ["--preset", "gpt-tiny"]
        keys = {**({} if "data.dataset_type" in (changes or {}) else CORPUS), **(changes or {})}
        mt(folder, "train", *words, *common, *settings(keys), "--run-dir", name, **options)


def good(folder: Path) -> None:
    """The run that others are compared with."""
    train(folder, "good")
