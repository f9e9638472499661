"""Files with the most probable tokens of a teacher, which any student, layout and run reads.

A folder has `cache.json` (what was computed) and files of rows (safetensors). A row is one sample under the hash of its
tokens, positions and segments; neither its number nor a rank stands anywhere. Of a row and each position: the ids of
the k most probable tokens, int32, and their log-probabilities over the whole vocabulary (logits over the temperature
minus the log-sum-exp of all of them), float32, so that the mass of the other tokens is known exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from mt_core.errors import CheckpointError, ConfigError, TrainingError

DESCRIPTION = "cache.json"
FORMAT = 1
IDS, LOG_PROBS = "ids", "log_probs"
KEYED_BY = ("tokens", "position_ids", "segment_ids")


@dataclass(frozen=True)
class CacheDescription:
    """teacher: hash of its weights and configuration, and where it was. tokenizer: its fingerprint."""

    teacher: str
    path: str
    tokenizer: str
    vocab_size: int
    top_k: int
    temperature: float
    format: int = FORMAT


Row = tuple[np.ndarray, np.ndarray]
"""(ids int32, log_probs float32), [S, k] both, the most probable token first."""


class TeacherCache:
    """The rows of a folder. Rows of files are read where they are asked for."""

    def __init__(self, folder: Path, description: CacheDescription) -> None:
        self.folder, self.description = folder, description
        self._places: dict[str, tuple[Path, int]] = {}
        self._open: dict[Path, Any] = {}
        self.read_index()

    @classmethod
    def open(cls, folder: Path) -> TeacherCache:
        """Raises CheckpointError for a folder that is no cache."""
        file = folder / DESCRIPTION
        try:
            description = CacheDescription(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise CheckpointError(
                f"distillation.cache={folder} is no cache of a teacher ({DESCRIPTION} is missing); add "
                "distillation.teacher (--teacher), which writes one"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if description.format != FORMAT:
            raise CheckpointError(f"{file} has format {description.format}; this version reads {FORMAT}")
        return cls(folder, description)

    @classmethod
    def create(cls, folder: Path, description: CacheDescription) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{DESCRIPTION}.new"
        temporary.write_text(json.dumps(asdict(description), indent=1), encoding="utf-8")
        temporary.replace(folder / DESCRIPTION)

    def read_index(self) -> None:
        """Find the rows of all files of the folder."""
        for path in sorted(self.folder.glob("rows-*.safetensors")):
            if path not in self._open:
                self._open[path] = safe_open(path, "numpy")
                keys = self._open[path].get_tensor("keys")  # uint8 [rows, 16]
                self._places |= {bytes(key).hex(): (path, row) for row, key in enumerate(keys)}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def row(self, key: str, top_k: int) -> Row:
        """The first top_k tokens. Raises TrainingError for a sample that the teacher has not seen."""
        try:
            path, row = self._places[key]
        except KeyError:
            raise TrainingError(
                f"distillation.cache={self.folder} has {len(self)} samples, and not this one: it was written for other "
                "data, another data.seq_length or fewer steps; add distillation.teacher, which adds the missing ones"
            ) from None
        file = self._open[path]
        ids, log_probs = (file.get_slice(name)[row] for name in (IDS, LOG_PROBS))
        return ids[:, :top_k], log_probs[:, :top_k]

    def write(self, name: str, rows: Mapping[str, Row]) -> None:
        """Add a file of rows, which other readers find with `read_index`. name: differs between processes and files."""
        arrays: dict[str, np.ndarray] = {
            "keys": np.array([list(bytes.fromhex(key)) for key in rows], np.uint8),
            IDS: np.stack([ids.astype(np.int32) for ids, _ in rows.values()]),
            LOG_PROBS: np.stack([log_probs.astype(np.float32) for _, log_probs in rows.values()]),
        }
        temporary = self.folder / f".rows-{name}.new"
        save_file(arrays, temporary)
        temporary.replace(self.folder / f"rows-{name}.safetensors")


def row_keys(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """A hash of each row's tokens, positions and segments."""
    parts = [arrays[name].astype(np.int64) for name in KEYED_BY if name in arrays]
    rows = np.ascontiguousarray(np.concatenate(parts, 1))
    return [hashlib.blake2b(row.tobytes(), digest_size=16).hexdigest() for row in rows]


def require_cache_of(cache: CacheDescription, wanted: CacheDescription, folder: str) -> None:
    """Raises ConfigError for a cache of another teacher, tokenizer, temperature, or of fewer tokens. Where `wanted` has
    no teacher, any is right."""
    problems = [
        (
            bool(wanted.teacher) and cache.teacher != wanted.teacher,
            f"it is that of another teacher, {cache.path} (weights {cache.teacher[:12]}), and distillation.teacher="
            f"{wanted.path} has the weights {wanted.teacher[:12]}; name another folder",
        ),
        (
            cache.tokenizer != wanted.tokenizer,
            f"its teacher has the tokenizer {cache.tokenizer[:12]}, and the student {wanted.tokenizer[:12]}; "
            "distributions over different vocabularies cannot be compared",
        ),
        (
            cache.temperature != wanted.temperature,
            f"it was computed at distillation.temperature={cache.temperature} (now {wanted.temperature}), and the mass "
            "of the other tokens is known at that one alone; set it to that, or name another folder",
        ),
        (
            cache.top_k < wanted.top_k,
            f"it holds {cache.top_k} tokens of each position, fewer than distillation.top_k={wanted.top_k}",
        ),
    ]
    for wrong, what in problems:
        if wrong:
            raise ConfigError(f"distillation.cache={folder}: {what}")


def fields_of(keys: Iterable[str], cache: TeacherCache, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """[rows, S, top_k] ids and log-probabilities."""
    rows = [cache.row(key, top_k) for key in keys]
    return np.stack([ids for ids, _ in rows]), np.stack([log_probs for _, log_probs in rows])
