"""The folders of a Megatron `--save` directory: the tracker file, iterations, ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mt_ckpt.pickles.storages import pickled_text
from mt_core.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
RANK_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
# mp_rank_<tensor>[_<pipeline>][_<expert>]; which of the last two a single number is, the arguments say.
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_LEGACY_MARK = b"language_model"
_TOOL_MARK = b"orig_vocab_size"
"""An argument that transformers' reshaping tool adds to those of Megatron-LM."""
_SCANNED_BYTES = 4 << 20


@dataclass(frozen=True)
class RankSuffix:
    """The numbers in the name of a rank's folder: of tensor parallelism, then of pipeline and expert parallelism as
    far as each is used."""

    tensor: int
    others: tuple[int, ...]


def iteration_name(iteration: int) -> str:
    """The folder of an iteration; weights without an iteration are a release."""
    return f"iter_{iteration:07d}" if iteration else RELEASE


def rank_name(tensor: int, pipeline: int | None, expert: int | None) -> str:
    """None: not sharded over that axis."""
    others = [f"_{number:03d}" for number in (pipeline, expert) if number is not None]
    return f"mp_rank_{tensor:02d}{''.join(others)}"


def find_iteration(path: Path) -> Path:
    """The folder of one iteration: `path` itself, or the one that the tracker in `path` names.

    Raises CheckpointError when there is none.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        # Without a tracker: the path of one iteration.
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory")
        return path
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text != RELEASE and not text.isdecimal():
        raise CheckpointError(
            f"{tracker}: holds {text[:40]!r}, expected the number of an iteration or the word release"
        )
    folder = path / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise CheckpointError(f"{tracker}: names {text}, but {folder} does not exist")
    return folder


def rank_folders(folder: Path) -> Mapping[RankSuffix, Path]:
    """The folders of ranks in that of an iteration, in order."""
    folders = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (match := _RANK.fullmatch(entry.name)) and entry.is_dir():
            numbers = [int(group) for group in match.groups() if group is not None]
            folders[RankSuffix(numbers[0], tuple(numbers[1:]))] = entry
    return folders


def detect(path: Path) -> bool:
    """Whether `path` holds ranks with Megatron-Core's names."""
    return (file := _first_rank(path)) is not None and not mentions_legacy_names(file)


def detect_legacy(path: Path) -> bool:
    """Whether `path` holds ranks with the names from before Megatron-Core that Megatron-LM itself wrote."""
    return (file := _first_rank(path)) is not None and mentions_legacy_names(file) and not is_of_reshaping_tool(path)


def is_of_reshaping_tool(path: Path) -> bool:
    """Whether transformers' tool wrote the ranks at `path`: it adds the vocabulary's true size to the arguments."""
    file = _first_rank(path)
    return file is not None and mentions_legacy_names(file) and _mentions(file, _TOOL_MARK)


def mentions_legacy_names(file: Path) -> bool:
    """Whether the pickle of a rank's file has the name that every old parameter has."""
    return _mentions(file, _LEGACY_MARK)


def _mentions(file: Path, word: bytes) -> bool:
    """Whether a string is in the pickle of a rank's file, near its beginning. Nothing is unpickled."""
    try:
        return word in pickled_text(file, _SCANNED_BYTES)
    except (CheckpointError, OSError):
        return False


def _first_rank(path: Path) -> Path | None:
    try:
        folders = rank_folders(find_iteration(path))
    except (CheckpointError, OSError):
        return None
    return next((file for folder in folders.values() if (file := folder / RANK_FILE).is_file()), None)
