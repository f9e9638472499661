"""Where the server that ranks are forked from has its memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_core import _huge_pages

LINES = """\
00100000-00900000 rw-p 00000000 00:00 0                                  [heap]
01300000-01380000 rw-p 00000000 00:00 0
01500000-01a80000 rw-p 00000000 00:00 0
02000000-02800000 r-xp 00000000 fe:00 4711                               /usr/lib/libfour.so
03000000-03800000 rw-p 00000000 fe:00 4711                               /usr/lib/libfour.so
04000000-04800000 rw-p 00000000 00:00 0                                  [stack]
05000000-05800000 rw-s 00000000 00:00 0
"""


def test_whole_huge_pages_of_private_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses in MiB: the heap from 1 to 9, 0.5 MiB from 19, 5.5 MiB from 21."""
    (tmp_path / "maps").write_text(LINES)
    monkeypatch.setattr(_huge_pages, "MAPS", tmp_path / "maps")
    mib = 1 << 20
    assert list(_huge_pages._allocated()) == [(2 * mib, 8 * mib), (22 * mib, 26 * mib)]
