"""The compiled index against NumPy's shuffles and our NumPy index, and the choice between the two."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_core.errors import ConfigError
from mt_data.datasets import gpt
from mt_data.datasets.gpt import build_index
from mt_data.datasets.gpt_index import GPTIndexPlan, build_gpt_index

LENGTHS = np.array([3, 0, 5, 9], np.int32)
PLAN = GPTIndexPlan(17, 4, 40, 7)


@pytest.fixture(scope="module")
def compiled() -> Any:
    pytest.importorskip("numba", reason="mt-data[fast] is not installed")
    from mt_data.datasets import compiled_index

    return compiled_index


# Sizes on both sides of a power of two, where the mask changes, and of the number of targets drawn at once.
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[5, 1, 0, 70_000], [2, 3, 4, 8, 9], [131_072, 131_073, 16_384, 16_385]])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_compiled_shuffles_are_numpys(compiled: Any, sizes: list[int], dtype: Any) -> None:
    ours, numpys = compiled.CompiledShuffler(99), np.random.RandomState(99)
    for size in sizes:
        mine, theirs = np.arange(size, dtype=dtype), np.arange(size, dtype=dtype)
        reported: list[int] = []
        ours.shuffle(mine, reported.append)
        numpys.shuffle(theirs)
        np.testing.assert_array_equal(mine, theirs)
        assert sum(reported) == size


def test_a_long_compiled_shuffle(compiled: Any) -> None:
    mine, theirs = np.arange(3_000_000, dtype=np.int32), np.arange(3_000_000, dtype=np.int32)
    compiled.CompiledShuffler(1234).shuffle(mine)
    np.random.RandomState(1234).shuffle(theirs)
    np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(lambda lengths: sum(lengths) > 1),
    st.integers(0, 3),
    st.integers(1, 30),
    st.none() | st.integers(1, 300),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1]),
    st.booleans(),
)
def test_compiled_arrays_are_those_of_numpy(
    compiled: Any, lengths: list[int], skipped: int, sequence: int, ask: int | None, seed: int, extra: int, drop: bool
) -> None:
    every = np.array([7] * skipped + lengths + [7], np.int32)
    elements = range(skipped, skipped + len(lengths))
    plan = GPTIndexPlan(sum(lengths), sequence, ask, seed, extra, drop)
    reported: list[tuple[int, int]] = []
    ours = compiled.build_compiled_index(elements, every, plan, lambda done, total: reported.append((done, total)))
    for name, array in build_gpt_index(elements, every, plan).arrays().items():
        np.testing.assert_array_equal(ours.arrays()[name], array, err_msg=name)
        assert ours.arrays()[name].dtype == array.dtype
    assert reported[-1] == (2 * len(elements) * plan.epochs,) * 2


def arrays(engine: Any) -> dict[str, Any]:
    index = build_index(engine, range(4), LENGTHS, PLAN)
    return {name: array.tolist() for name, array in index.arrays().items()}


def test_engines_agree(compiled: Any) -> None:
    assert arrays("numba") == arrays("numpy") == arrays("auto")


def test_numba_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'data\.index_engine="numba" needs numba: pip install "mt-data\[fast\]"'):
        arrays("numba")


@pytest.mark.parametrize(
    ("installed", "worth", "chosen"),
    [(True, 1, "numba"), (True, 10**6, None), (False, 1, "numpy"), (False, 10**6, None)],
)
def test_auto_says_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    installed: bool,
    worth: int,
    chosen: str | None,
) -> None:
    """chosen None: NumPy without a word, for an index that is built at once anyway."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(gpt, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(gpt, "WORTH_COMPILING", worth)
    assert gpt._resolved("auto", 1000) == (chosen or "numpy")
    said = [record.message.split(" for ")[0] for record in caplog.records]
    assert said == ([f'data.index_engine="auto" is {chosen}'] if chosen else [])
    assert ("mt-data[fast]" in caplog.text) == (chosen == "numpy")


def test_auto_leaves_what_is_too_long_for_32_bits_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "find_spec", lambda name: True)
    assert gpt._resolved("auto", 1 << 32) == "numba"
    assert gpt._resolved("auto", (1 << 32) + 1) == "numpy"
