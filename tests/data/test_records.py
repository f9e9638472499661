"""Records that are stored as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_core.errors import DataError
from mt_data.records import StoredFile, read_record


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"name": "a\xff"}', "Invalid JSON: invalid unicode code point at line 1"),
        (b'{"name": ', "Invalid JSON: EOF"),
        (b'{"name": 3, "sha256": ""}', "name: Input should be a valid string"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=f"a.json is damaged, or of another version of mt: {problem}"):
        read_record(tmp_path / "a.json", StoredFile)
