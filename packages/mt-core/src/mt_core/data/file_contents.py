"""What the files of a configured data set hold: recorded as a run begins, and compared with what is there later.

The files are those that keys of `[data]` and `[tokenizer]` name: token files by their prefix, texts, folders, patterns,
and the entries of Megatron's lists. Needs no torch.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from mt_core.config.schema import Config

MOST_FILES = 512
"""Files that are looked at; those of a larger blend beyond them are left out."""
WHOLE, BLOCKS, BLOCK_BYTES = 1 << 20, 16, 1 << 14
"""Files of at most WHOLE bytes are read as a whole, of larger ones as many blocks at even distances."""
NAMES_FILES = re.compile(r"(path|paths|prefix|file|files|model|folder)$")
NOT_READ = ("data_cache_path",)
LISTS = ("data_args_path", "per_split_data_args_path")
"""Keys of files that name other files."""
HIDDEN = (".", "cache", "__pycache__")


def configured_contents(config: Config) -> list[dict[str, Any]]:
    """Contents of each file: path (absolute), bytes, written (seconds since the epoch), digest. [] for data in no
    file."""
    paths = list(islice(dict.fromkeys(_configured_files(config)), MOST_FILES))
    # Latency of a shared file system is what reading many small blocks costs.
    with ThreadPoolExecutor(16) as pool:
        contents = pool.map(file_content, paths)
    return [entry for entry in contents if entry is not None]


def file_content(path: Path) -> dict[str, Any] | None:
    """None for a file that cannot be read."""
    try:
        status = path.stat()
        digest = _digest(path, status.st_size, status.st_mtime_ns)
    except OSError:
        return None
    return {"path": str(path.absolute()), "bytes": status.st_size, "written": status.st_mtime, "digest": digest}


@lru_cache(maxsize=4 * MOST_FILES)
def _digest(path: Path, size: int, written: int) -> str:
    """written: nanoseconds, so that a file that is written again is read again."""
    digest = hashlib.blake2b(f"{size} ".encode(), digest_size=16)
    with path.open("rb") as file:
        for begin, count in _blocks(size):
            file.seek(begin)
            digest.update(file.read(count))
    return digest.hexdigest()


def changed_files(recorded: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The entries whose files are there, and no longer hold what was recorded."""
    with ThreadPoolExecutor(16) as pool:
        contents = pool.map(lambda entry: file_content(Path(entry["path"])), recorded)
    return [
        was for was, now in zip(recorded, contents, strict=True) if now is not None and now["digest"] != was["digest"]
    ]


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """Begin and length of each block of a file that is read."""
    if size <= WHOLE:
        yield 0, size
        return
    for number in range(BLOCKS):
        yield (size - BLOCK_BYTES) * number // (BLOCKS - 1), BLOCK_BYTES


def _configured_files(config: Config) -> Iterator[Path]:
    for section in (config.data, config.tokenizer):
        for name in _names(section.model_dump(mode="json"), is_named=False):
            yield from _files_of(name)


def _names(value: Any, *, is_named: bool) -> Iterator[str]:
    """Strings below keys that name files."""
    if isinstance(value, str) and is_named:
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key in LISTS and isinstance(part, str):
                yield from (part, *_listed(Path(part)))
            elif key not in NOT_READ:
                yield from _names(part, is_named=is_named or NAMES_FILES.search(str(key)) is not None)
    elif isinstance(value, list):
        for part in value:
            yield from _names(part, is_named=is_named)


def _listed(path: Path) -> Iterator[str]:
    """Names in a list of Megatron's: "weight prefix" pairs, or JSON of such lists by split."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    try:
        content: Any = json.loads(text)
    except ValueError:
        content = text.split()
    for name in _names({"paths": content}, is_named=False):
        yield from name.split()


def _files_of(name: str) -> Iterator[Path]:
    """The files that a name stands for: itself, those of a prefix, of a folder or of a pattern."""
    path = Path(name)
    if path.is_dir():
        yield from islice(_below(path), MOST_FILES)
    elif path.is_file():
        yield path
    elif any(character in name for character in "*?["):
        yield from (Path(each) for each in sorted(glob.glob(name, recursive=True)) if os.path.isfile(each))
    for ending in (".bin", ".idx"):
        if (part := Path(name + ending)).is_file():
            yield part


def _below(folder: Path) -> Iterator[Path]:
    """Files of a folder in a fixed order, without hidden ones and caches."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith(HIDDEN))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))
