"""The files of text below a folder."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mt_core.errors import DataError
from mt_data.preprocess.formats import ENDINGS, detect_format

RUN = "config-origins.json"
"""Is in each run directory of mt train, whose logs and metrics are no text to train on."""
CACHE = ("cache", "mt")
"""Where tokens of raw text are kept, by default beside the text."""
log = logging.getLogger(__name__)


def text_files_below(folder: Path, input_format: str = "auto") -> list[Path]:
    """All files of a known ending below a folder, or all files where the format is named, by name.

    Left out: hidden files and folders, caches and runs of mt, manifests of token files. Files of other endings are
    counted in a message of the log. Raises DataError where no file is left.
    """
    taken, others = [], Counter[str]()
    for path in sorted(_files_below(folder)):
        if input_format != "auto" or _is_known(path):
            taken.append(path)
        else:
            others[path.suffix or "no ending"] += 1
    left_out = ", ".join(f"{ending} ({count})" for ending, count in others.most_common(8))
    if not taken:
        raise DataError(
            f"{folder} has no text: {f'its files end in {left_out}' if others else 'no file is in it'}; text ends in "
            f"{', '.join(ENDINGS)} (also .gz, .zst), and --input-format text (data.input_format) takes all files"
        )
    if others:
        log.warning("%s: %d files are read, files of other endings are left out: %s", folder, len(taken), left_out)
    return taken


def _is_known(path: Path) -> bool:
    try:
        detect_format(path)
    except DataError:
        return False
    return not path.name.endswith(".manifest.json")


def _files_below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        if RUN in files:
            folders.clear()
            continue
        hidden = [name for name in folders if name.startswith(".") or (Path(place).name, name) == CACHE]
        folders[:] = [name for name in folders if name not in hidden]
        yield from (Path(place, name) for name in files if not name.startswith("."))
