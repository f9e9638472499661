"""`mt bench attention`: counts by hand, and a rehearsal on a CPU."""

from __future__ import annotations

import pytest

from mt_tools.bench.attention import AttentionShape
from mt_tools.bench.report import read_report


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        (AttentionShape(1, 4, 1, 1, 1), 1 + 2 + 3 + 4),
        (AttentionShape(2, 4, 3, 1, 5), (1 + 2 + 3 + 4) * 2 * 3 * 5),
        (AttentionShape(1, 4, 1, 1, 1, documents=2), 2 * (1 + 2)),
        (AttentionShape(1, 6, 1, 1, 1, window=3), 1 + 2 + 3 + 3 + 3 + 3),
        (AttentionShape(1, 4, 1, 1, 1, window=9), 1 + 2 + 3 + 4),
    ],
)
def test_products_of_keys_that_are_seen(shape: AttentionShape, seen: int) -> None:
    assert shape.forward_flops == 4 * seen


def test_a_rehearsal(mt, tmp_path) -> None:
    out = tmp_path / "attention.json"
    assert mt("bench", "attention", "--rounds", 2, "--out", out).code == 0
    cases = read_report(out).cases
    assert [case["name"] for case in cases] == [
        "attention 1 x 64, 4/2 heads of 16",
        "attention 1 x 64, 4/2 heads of 16, 4 documents",
        "attention 1 x 64, 4/2 heads of 16, window 16",
    ]
    for case in cases:
        assert set(case["step"]) == set(case["forward"]) == {"sdpa", "eager", "batch_invariant"}
        assert {"cudnn", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flex"} <= set(case["cannot"])
