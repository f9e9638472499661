"""When a search ends, by hand: transformers' rules, with sums of log-probabilities as scores (length_penalty 0)."""

from __future__ import annotations

import pytest

from mt_infer.sampling.beam_search import BeamSearch, Candidate
from mt_infer.sampling.parameters import EarlyStopping, SamplingParameters

END = 9
STEPS: list[list[list[Candidate]]] = [
    [[(-1.0, END), (-1.1, 1), (-2.0, 2), (-9.0, 3)]],  # ended: -1.0; running: -1.1, -2.0
    [[(-0.3, 4), (-0.4, END)], [(-5.0, 4), (-6.0, 5)]],  # ended: -1.0, -1.5; running: -1.4, -7.0
    [[(-0.05, END), (-8.0, 5)], [(-1.0, 6), (-2.0, 7)]],  # ended: -1.0, -1.45; running: -8.0, -9.0
]


def search(early_stopping: EarlyStopping) -> BeamSearch:
    sampling = SamplingParameters(num_beams=2, n=2, max_tokens=5, length_penalty=0.0, early_stopping=early_stopping)
    own = BeamSearch(sampling, frozenset({END}), 5)
    generated: list[list[int]] = [[]]
    for candidates in STEPS:
        following = own.advance(candidates, generated)
        generated = [[*generated[one.parent], one.token] for one in following]
        if own.is_done:
            break
    return own


@pytest.mark.parametrize(
    ("early_stopping", "expected"),
    [(True, {(END,): -1.0, (1, END): -1.5}), (False, {(END,): -1.0, (1, 4, END): -1.45})],
)
def test_a_search_goes_on_while_its_best_beam_can_improve(early_stopping, expected) -> None:
    own = search(early_stopping)
    assert own.is_done
    assert {one.tokens: one.score for one in own.finished} == pytest.approx(expected)
