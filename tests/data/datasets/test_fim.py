"""Fill-in-the-middle: nothing lost, the same for every reader, the marks where they belong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_core.errors import ConfigError
from mt_core.interfaces import SplitRequest
from mt_data.datasets.fim import FIMDataConfig, FIMDataset, FIMRules, build_fim, rearrange_documents
from mt_data.tokenizers.byte_level import ByteLevelTokenizer

PREFIX, MIDDLE, SUFFIX = 261, 262, 263
IDS = {"prefix": PREFIX, "middle": MIDDLE, "suffix": SUFFIX}
TOKENIZER = ByteLevelTokenizer(3)
EOD = 256


def rules(**keys: Any) -> FIMRules:
    return FIMRules.of(FIMDataConfig(fim_token_ids=IDS, **keys), TOKENIZER)


def put_back(tokens: list[int]) -> list[int]:
    """Undo the arrangement of one document."""
    if not tokens or tokens[0] != PREFIX:
        return tokens
    suffix_at, middle_at = tokens.index(SUFFIX), tokens.index(MIDDLE)
    if suffix_at == 1:  # suffix, prefix, middle: the last two run into one another
        return tokens[middle_at + 1 :] + tokens[2:middle_at]
    return tokens[1:suffix_at] + tokens[middle_at + 1 :] + tokens[suffix_at + 1 : middle_at]


def split_documents(tokens: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in tokens:
        if token == EOD:
            found.append([])
        else:
            found[-1].append(token)
    return found


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=5), st.integers(0, 2**32), st.integers(0, 2))
def test_every_document_can_be_put_back(texts: list[str], seed: int, cut: int) -> None:
    tokens: list[int] = []
    for text in texts:
        tokens += [*TOKENIZER.encode(text), EOD]
    tokens = tokens[cut:]  # a window may begin inside a character
    arranged = rearrange_documents(
        np.array(tokens, np.int64), rules(fim_rate=0.8), TOKENIZER, np.random.default_rng(seed)
    )
    assert [put_back(part) for part in split_documents(arranged.tolist())] == split_documents(tokens)


def test_rates() -> None:
    window = np.array([*TOKENIZER.encode("some text"), EOD] * 2000, np.int64)

    def firsts(**keys: Any) -> list[list[int]]:
        arranged = rearrange_documents(window, rules(**keys), TOKENIZER, np.random.default_rng(5))
        return [part[:2] for part in split_documents(arranged.tolist()) if part]

    assert all(first[0] != PREFIX for first in firsts(fim_rate=0.0))
    assert all(first[0] == PREFIX for first in firsts(fim_rate=1.0))
    chosen = [first for first in firsts(fim_rate=0.3, fim_spm_rate=0.25) if first[0] == PREFIX]
    assert 0.25 < len(chosen) / 2000 < 0.35
    # A prefix-first document can have an empty prefix, so a few more begin with both marks.
    assert 0.2 < sum(first == [PREFIX, SUFFIX] for first in chosen) / len(chosen) < 0.45


def test_fragments_and_left_alone_prefixes() -> None:
    text = "keep me|other|fragment"
    chosen = rules(fim_rate=1.0, fim_split_sample="|", fim_fragment_rate=1.0, fim_no_prefix="keep")
    arranged = rearrange_documents(
        np.array(TOKENIZER.encode(text), np.int64), chosen, TOKENIZER, np.random.default_rng(0)
    ).tolist()
    bar = TOKENIZER.encode("|")[0]
    places = [k for k, token in enumerate(arranged) if token == bar]
    assert TOKENIZER.decode(arranged[: places[0]]) == "keep me"
    assert TOKENIZER.decode(put_back(arranged[places[0] + 1 : places[1]])) == "other"
    assert TOKENIZER.decode(put_back(arranged[places[1] + 1 :])) == "fragment"


def test_samples_are_the_same_in_any_order_and_keep_their_length(write_tokens: Callable[..., str]) -> None:
    name = write_tokens("code", [[*TOKENIZER.encode(f"def f{i}(): return {i}"), EOD] for i in range(50)])
    config = FIMDataConfig(data_path=[name], split="1", fim_token_ids=IDS)  # type: ignore[list-item]
    request = SplitRequest("train", 30, 64, 1)
    first, second = build_fim(config, TOKENIZER, request), build_fim(config, TOKENIZER, request)
    assert isinstance(first, FIMDataset)
    assert isinstance(second, FIMDataset)
    backward = {k: second[k] for k in reversed(range(10))}
    arranged = 0
    for k in range(10):
        sample = first[k]
        for field, array in sample.items():
            assert array.shape == (64,)
            np.testing.assert_array_equal(array, backward[k][field])
        np.testing.assert_array_equal(sample["tokens"][1:], sample["labels"][:-1])
        arranged += int((sample["tokens"] == MIDDLE).sum())
    assert arranged > 5


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, r'data\.fim_prefix_token="<fim_prefix>" is 12 ids'),
        ({"fim_token_ids": {**IDS, "suffix": PREFIX}}, "must differ"),
        ({"fim_token_ids": {**IDS, "suffix": 264}}, "past the tokenizer's 264 ids"),
        ({"fim_token_ids": {"front": 1}}, "allowed are prefix, middle, suffix"),
        ({"fim_token_ids": IDS, "fim_fragment_rate": 0.5}, r"only counts with data\.fim_split_sample"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FIMRules.of(FIMDataConfig(**keys), TOKENIZER)
