"""List patterns of layers: parsed with Python's meaning, never evaluated, written as they are read."""

from __future__ import annotations

import pytest

from mt_core.config.layer_pattern import layers_with_experts, parse_pattern, pattern_of, read_pattern
from mt_core.errors import ConfigError

KEY = "model.some_key"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("([0]*1+[1]*3)", [0, 1, 1, 1]),
        ("[1,0]*2", [1, 0, 1, 0]),
        ("2*[0, 1,]", [0, 1, 0, 1]),
        ("([1]+[0]*2)*2", [1, 0, 0, 1, 0, 0]),
        ("[1]*(2*2)", [1, 1, 1, 1]),
        ("[]", []),
        ("[0]*0+[1]", [1]),
    ],
)
def test_patterns_mean_what_they_mean_in_python(text, expected) -> None:
    assert parse_pattern(text, KEY) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3", "is a number, not a list"),
        ("[2]", "has the entry 2"),
        ("[0]*", "ends too early"),
        ("([1]", "ends too early"),
        ("[1]]", r"has '\]' behind its end"),
        ("[1]+2", "adds a number"),
        ("[1]*[1]", "multiplies two lists"),
        ("[[1]]", r"has '\[' in a list"),
        ("[1 1]", "has '1' where ',' belongs"),
        ("[1]*9999999999", "more than 100000 entries"),
        ("[-1]", "has '-', which is no part"),
        ("", "ends too early"),
    ],
)
def test_what_is_no_pattern_is_refused(text, words) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_pattern(text, KEY)
    assert "([0]*1+[1]*23)" in str(caught.value)
    assert str(caught.value).startswith(f"{KEY}={text!r} ")


def test_every_nth_layer() -> None:
    assert layers_with_experts(2, 5) == [True, False, True, False, True]
    assert layers_with_experts(1, 3) == [True] * 3


def test_a_pattern_has_an_entry_for_each_layer() -> None:
    assert read_pattern("[0,1]*2", 4, KEY) == [False, True, False, True]
    with pytest.raises(ConfigError, match=r"model.some_key='\[1\]\*5' has 5 entries; .* model.num_layers=6"):
        read_pattern("[1]*5", 6, KEY)
    with pytest.raises(ConfigError, match="model.moe.moe_layer_freq='.1.' has 1 entries"):
        layers_with_experts("[1]", 2)


def test_nothing_is_evaluated() -> None:
    with pytest.raises(ConfigError, match="has '_', which is no part of a pattern"):
        read_pattern("__import__('os').getcwd()", 6, KEY)


@pytest.mark.parametrize("layers", [[True] * 3, [False, True, True], [True, False, True], [False] * 2])
def test_a_pattern_is_written_as_it_is_read(layers) -> None:
    assert read_pattern(pattern_of(layers), len(layers), KEY) == layers
