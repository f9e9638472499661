"""Small corpora on disk, and the options to run over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from mt_data.corpora.running import RunOptions
from mt_data.preprocess.readers import iter_records

WriteJsonl = Callable[..., Path]


@pytest.fixture
def write_jsonl(tmp_path: Path) -> WriteJsonl:
    """write_jsonl(name, texts or records): a file below tmp_path."""

    def write(name: str, records: Iterable[Any]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        values = [value if isinstance(value, dict) else {"text": value} for value in records]
        path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
        return path

    return write


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunOptions]:
    """run(output="out", **options): options with folders below tmp_path."""

    def options(output: str = "out", **given: Any) -> RunOptions:
        return RunOptions(tmp_path / output, **given)

    return options


@pytest.fixture
def texts_of() -> Callable[[Path], list[str]]:
    def texts(path: Path) -> list[str]:
        return [record.value["text"] for record in iter_records(path)]

    return texts


@pytest.fixture
def files_below() -> Callable[[Path], dict[str, bytes]]:
    """The bytes of all output files of a folder, by name; reports and state are left out."""

    def files(folder: Path) -> dict[str, bytes]:
        found = (path for path in folder.rglob("*.jsonl*") if ".state" not in path.parts)
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}

    return files
