"""GPT2BPETokenizer against transformers' GPT-2 tokenizer and against what Megatron wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_core.errors import DataError
from mt_data.tokenizers import engines
from mt_data.tokenizers.gpt2_bpe import GPT2BPEConfig, GPT2BPETokenizer, build_gpt2_bpe

GOLDEN = os.environ.get("MT_GOLDEN")
needs_golden = pytest.mark.skipif(not GOLDEN, reason="MT_GOLDEN is not set: no files written by Megatron")


@pytest.fixture(scope="module")
def ours(gpt2_files: dict[str, str]) -> GPT2BPETokenizer:
    return build_gpt2_bpe(GPT2BPEConfig(**gpt2_files))


@pytest.fixture(scope="module")
def reference(gpt2_files: dict[str, str]) -> Any:
    return transformers_gpt2(gpt2_files)


def transformers_gpt2(files: dict[str, str]) -> Any:
    from transformers import GPT2TokenizerFast

    return GPT2TokenizerFast(vocab=files["vocab_file"], merges=files["merge_file"])


def test_agrees_with_transformers_on_awkward_text(
    ours: GPT2BPETokenizer, reference: Any, adversarial: list[str]
) -> None:
    assert isinstance(ours._engine, engines.TiktokenEngine)
    for text in adversarial:
        assert ours.encode(text) == reference(text).input_ids, text
        assert ours.decode(ours.encode(text)) == text


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text(alphabet="ab'st <|endoftext|>\n é日🙂́", max_size=60))
def test_agrees_with_transformers_on_any_text(ours: GPT2BPETokenizer, reference: Any, text: str) -> None:
    ids = ours.encode(text)
    assert ids == reference(text).input_ids
    assert ours.decode(ids) == text


@pytest.mark.slow
def test_agrees_on_every_kind_of_character(ours: GPT2BPETokenizer, reference: Any) -> None:
    """Both libraries carry tables of letters, digits and white space of their own, which may age apart."""
    # From 0x20000 on there are only large blocks of one kind: ideographs, private use, and what is not assigned.
    tried = [*range(0x3000), *range(0x3000, 0x20000, 7), *range(0x20000, 0x110000, 101)]
    points = [c for c in tried if not 0xD800 <= c < 0xE000]
    texts = [f"a{chr(c)}1{chr(c)} {chr(c)}!{chr(c)}  {chr(c)}" for c in points]
    for start in range(0, len(texts), 500):
        text = "\n".join(texts[start : start + 500])
        assert ours.encode(text) == reference(text).input_ids


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["x", "ab", "日本", "=-", "1", "\n"])
def test_a_megabyte_without_a_space(ours: GPT2BPETokenizer, reference: Any, unit: str) -> None:
    text = unit * (1_100_000 // len(unit)) + "a"
    assert ours.encode(text) == reference._tokenizer.encode_batch_fast([text])[0].ids


def test_long_white_space_takes_the_other_way_to_the_same_ids(
    ours: GPT2BPETokenizer, adversarial: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text + " " * 9 + text for text in adversarial]
    expected = [ours.encode(text) for text in texts]
    monkeypatch.setattr(engines, "LONG_WHITESPACE", 5)
    assert [ours.encode(text) for text in texts] == expected


def test_encode_array_is_the_same_ids_without_a_list(ours: GPT2BPETokenizer) -> None:
    ids = ours.encode_array("Hello <|endoftext|>")
    assert isinstance(ids, np.ndarray)
    assert ids.dtype.kind in "iu"
    assert ids.tolist() == ours.encode("Hello <|endoftext|>")
    assert ids[-1] == ours.special.eod == ours.vocab_size - 1


def test_sentinels_and_special_tokens_are_added_once(gpt2_files: dict[str, str]) -> None:
    ours = build_gpt2_bpe(
        GPT2BPEConfig(**gpt2_files, vocab_extra_ids=12, tokenizer_special_tokens=["<sep>", "<extra_id_1>"])
    )
    eod = ours.special.eod
    assert eod is not None
    assert ours.vocab_size == eod + 1 + 13
    assert ours.special.sentinels[:3] == (eod + 3, eod + 2, eod + 4)
    assert ours.encode("<extra_id_10><sep>") == [ours.special.sentinels[10], eod + 1]


def test_falls_back_to_tokenizers_where_ranks_alone_would_merge_otherwise(
    tmp_path: Path, gpt2_files: dict[str, str], adversarial: list[str]
) -> None:
    """(a, bc) is listed and (ab, c) is not: merging by the rank of the result would join "ab" and "c"."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = json.loads(Path(gpt2_files["vocab_file"]).read_text(encoding="utf-8"))
    merges = ["j q", "q z", "j qz"]
    for pair in merges:
        vocab.setdefault(pair.replace(" ", ""), len(vocab))
    files = {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}
    files["vocab_file"].write_text(json.dumps(vocab), encoding="utf-8")
    old = Path(gpt2_files["merge_file"]).read_text(encoding="utf-8")
    files["merge_file"].write_text(old + "\n".join(merges), encoding="utf-8")
    ours = build_gpt2_bpe(GPT2BPEConfig(**{key: str(path) for key, path in files.items()}))

    lines = [line for line in files["merge_file"].read_text(encoding="utf-8").split("\n")[1:] if line]
    reference = Tokenizer(models.BPE(vocab, [tuple(line.split(" ")) for line in lines]))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.add_special_tokens(["<|endoftext|>"])
    assert isinstance(ours._engine, engines.TokenizersEngine)
    assert ours.encode("jqz") == [vocab["jq"], vocab["z"]]
    for text in ["jqz qzjqz", *adversarial]:
        assert ours.encode(text) == reference.encode(text).ids
        assert ours.decode(ours.encode(text)) == text


def test_added_tokens_that_begin_alike_take_the_longer(gpt2_files: dict[str, str]) -> None:
    ours = build_gpt2_bpe(GPT2BPEConfig(**gpt2_files, tokenizer_special_tokens=["<a", "<a>"]))
    assert isinstance(ours._engine, engines.TokenizersEngine)
    assert ours.encode("<a>") == [ours.vocab_size - 1]


def test_lone_surrogate_is_named(ours: GPT2BPETokenizer) -> None:
    with pytest.raises(DataError, match=r"U\+D800 at character 2"):
        ours.encode("ab\ud800c")


def test_decode_refuses_ids_past_the_vocabulary(ours: GPT2BPETokenizer) -> None:
    with pytest.raises(DataError, match=f"id {ours.vocab_size} is not one of this tokenizer's"):
        ours.decode([0, ours.vocab_size])
    assert ours.decode(ours.encode("é")[:1]) in ("é", "\ufffd")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("vocab_file", None, r"vocab_file='.*' cannot be read: No such file"),
        ("vocab_file", b"", "is empty"),
        ("vocab_file", b"{", r"line 1, column 2: not JSON"),
        ("vocab_file", b'{"\xff": 1}', r"line 1: byte 0xff is no UTF-8"),
        ("vocab_file", b"[1]", "holds a JSON list"),
        ("vocab_file", b'{"a": 1, "a": 2}', "has the key 'a' twice"),
        ("vocab_file", b'{"a": 1, "b": 1}', "gives the id 1 to 'a' and 'b'"),
        ("vocab_file", b'{"a": "1"}', "the id of 'a' is '1'"),
        ("vocab_file", b'{"a": 0}', "lacks the tokens of 255 of the 256 bytes"),
        ("merge_file", None, r"merge_file='.*' cannot be read"),
        ("merge_file", b"#version: 0.2\na b c\n", r"line 2: 'a b c' is not two tokens"),
        ("merge_file", b"zq qqq\n", r"line 1: 'zq qqq' needs the token 'zq'.*must come from one tokenizer"),
        ("merge_file", b"\xc4\xa0 t\n\n\xc4\xa0 t\n", r"line 3: 'Ġ t' stands already in line 1"),
        ("merge_file", b"a b\n\xff\n", "line 2: byte 0xff is no UTF-8"),
    ],
)
def test_bad_files_are_named(
    gpt2_files: dict[str, str], tmp_path: Path, file: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / "bad"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        build_gpt2_bpe(GPT2BPEConfig(**gpt2_files | {file: str(path)}))
    assert str(path) in str(error.value)


def test_vocabulary_without_end_of_text_is_refused(gpt2_files: dict[str, str], tmp_path: Path) -> None:
    vocab = json.loads(Path(gpt2_files["vocab_file"]).read_text(encoding="utf-8"))
    del vocab["<|endoftext|>"]
    (tmp_path / "v.json").write_text(json.dumps(vocab), encoding="utf-8")
    with pytest.raises(DataError, match=r"has no '<\|endoftext\|>'"):
        build_gpt2_bpe(GPT2BPEConfig(**gpt2_files | {"vocab_file": str(tmp_path / "v.json")}))


@pytest.fixture(scope="module")
def golden_files() -> dict[str, str]:
    assert GOLDEN
    folder = Path(GOLDEN) / "data" / "gpt2"
    return {"vocab_file": str(folder / "encoder.json"), "merge_file": str(folder / "vocab.bpe")}


@pytest.mark.slow
@needs_golden
def test_gives_the_ids_that_megatron_wrote(golden_files: dict[str, str]) -> None:
    assert GOLDEN
    ours = build_gpt2_bpe(GPT2BPEConfig(**golden_files))
    assert (ours.vocab_size, ours.special.eod) == (50257, 50256)
    data = Path(GOLDEN) / "data"
    documents = [json.loads(line) for line in (data / "edge.jsonl").read_text(encoding="utf-8").splitlines()]
    info = json.loads((data / "prep" / "info.json").read_text(encoding="utf-8"))
    for key in ("text", "title"):
        ids = [ours.encode(document[key]) for document in documents]
        wanted = info[f"edge_{key}_document"]["sequences_ids"]
        assert [[*document, 50256] for document in ids if document] == wanted
    corpus = [json.loads(line)["text"] for line in (data / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    written = np.fromfile(data / "prep" / "corpus_text_document.bin", dtype="<u2")
    got = np.concatenate([np.append(ours.encode_array(text), 50256) for text in corpus])
    np.testing.assert_array_equal(got, written)


@pytest.mark.slow
@needs_golden
def test_real_vocabulary_agrees_with_transformers(golden_files: dict[str, str], adversarial: list[str]) -> None:
    ours = build_gpt2_bpe(GPT2BPEConfig(**golden_files))
    reference = transformers_gpt2(golden_files)
    assert isinstance(ours._engine, engines.TiktokenEngine)
    for text in adversarial:
        assert ours.encode(text) == reference(text).input_ids
