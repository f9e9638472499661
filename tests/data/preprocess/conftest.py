from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mt_data.preprocess.options import PreprocessOptions, PreprocessReport

EOD = 256
TEXTS = [
    f"Document {number}: " + "word " * (number % 7) + "émoji 🙂 and 日本語.\n" * (number % 3) if number % 11 else ""
    for number in range(60)
]
"""Some of them empty, the first one too."""


def expected_files(texts: Sequence[str], append_eod: bool = True) -> tuple[bytes, bytes]:
    """The `.bin` and `.idx` of byte-level ids (uint16), written down from the format's description."""
    sequences = [[*text.encode(), *([EOD] if append_eod else [])] for text in texts if text]
    boundaries, count = [0], 0
    for text in texts:
        count += bool(text)
        boundaries.append(count)
    offsets = [2 * sum(len(ids) for ids in sequences[:index]) for index in range(len(sequences))]
    data = b"".join(struct.pack(f"<{len(ids)}H", *ids) for ids in sequences)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(sequences), len(boundaries))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(offsets)}q", *offsets) + struct.pack(f"<{len(boundaries)}q", *boundaries)
    return data, index


def files_of(report: PreprocessReport, key: str = "text") -> tuple[bytes, bytes]:
    prefix = report.outputs[key]
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def write_jsonl(path: Path, texts: Sequence[str] = TEXTS) -> Path:
    lines = [json.dumps({"text": text, "n": n}, ensure_ascii=n % 2 == 0) for n, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl")


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., PreprocessOptions]:
    def make(*inputs: Path | str, **changes: Any) -> PreprocessOptions:
        values: dict[str, Any] = {
            "input": tuple(map(str, inputs)),
            "output_prefix": str(tmp_path / "out" / "set"),
            "tokenizer_type": "ByteLevelTokenizer",
            "append_eod": True,
            "workers": 1,
        }
        return PreprocessOptions(**{**values, **changes})

    return make


@pytest.fixture(scope="session")
def prep() -> SimpleNamespace:
    """What the tests of this folder share."""
    return SimpleNamespace(
        TEXTS=TEXTS, EOD=EOD, expected_files=expected_files, files_of=files_of, write_jsonl=write_jsonl
    )
