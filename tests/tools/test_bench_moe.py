"""`mt bench moe`: a rehearsal on a CPU."""

from __future__ import annotations

from mt_tools.bench.moe import PRODUCTS, MoeShape
from mt_tools.bench.report import read_report


def test_products_of_a_token() -> None:
    assert MoeShape(tokens=5, hidden=3, ffn=7, experts=4, topk=2).forward_flops == 5 * 2 * 3 * (2 * 3 * 7)


def test_a_rehearsal(mt, tmp_path) -> None:
    out = tmp_path / "moe.json"
    outcome = mt("bench", "moe", "--rounds", 1, "--out", out)
    assert outcome.code == 0, outcome.err
    cases = read_report(out).cases
    assert [case["name"] for case in cases] == [
        "moe 64 tokens, 8 experts of 64 x 128, top-2",
        "moe 128 tokens, 16 experts of 64 x 32, top-8",
    ]
    for case in cases:
        assert {"dense", "loop"} <= set(case["step"]) == set(case["forward"])
        assert set(case["step"]) | set(case["cannot"]) == {"dense", *PRODUCTS}
