"""Words of messages."""

from __future__ import annotations

import pytest

from mt_core.wording import counted


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 documents"), (1, "1 document"), (2, "2 documents"), (1200, "1,200 documents")]
)
def test_a_noun_follows_its_number(number: int, words: str) -> None:
    assert counted(number, "document") == words
