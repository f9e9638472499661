"""Tokenizers in GGUF files that the `gguf` package wrote, against the tokenizers that they were made of."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mt_ckpt.gguf.file import GGUFFile
from mt_ckpt.gguf.tokenizer import tokenizer_files

TEXTS = [
    "Hello world, it's 2026; 12345 numbers\n\n  and   spaces\t\n",
    "naïve 日本語 e\u0301 <|im_start|>user\nHi<|im_end|>!",
    "def f(x):\r\n    return x**2  # DON'T",
]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As published with Llama 3; Qwen 2 takes one digit at a time."""


def by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


SPLITTINGS = {
    "gpt-2": (GPT2, None),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]), None),
    "llama-bpe": (by_pattern(LLAMA3), None),
    "qwen2": (by_pattern(LLAMA3.replace("{1,3}", "")), normalizers.NFC()),
}


def trained(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer, normalizer = SPLITTINGS[name]
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    control = [AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=control, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def write(tokenizer: Tokenizer, file: Path, name: str, *, add_bos: bool | None = None) -> GGUFFile:
    content = json.loads(tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = {token["content"] for token in content["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(
        [
            {"name": "default", "template": "{{ messages[0].content }}"},
            {"name": "tool_use", "template": "{{ tools }}"},
        ]
    )
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(file)


@pytest.mark.parametrize("name", SPLITTINGS)
def test_text_becomes_the_same_ids(name: str, tmp_path: Path) -> None:
    original = trained(name)
    files = tokenizer_files(write(original, tmp_path / "m.gguf", name, add_bos=False).metadata)
    read = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in TEXTS:
        ids = read.encode(text).ids
        assert ids == original.encode(text).ids
        assert read.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
    assert read.encode("<|im_end|>").ids == [1]


def test_roles_and_the_chat_template_come_along(tmp_path: Path) -> None:
    files = tokenizer_files(write(trained("smollm"), tmp_path / "m.gguf", "smollm").metadata)
    settings = json.loads(files["tokenizer_config.json"])
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert settings["chat_template"] == "{{ messages[0].content }}"
    assert files["additional_chat_templates/tool_use.jinja"] == b"{{ tools }}"
    generation = json.loads(files["generation_config.json"])
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (0, 1)


@pytest.mark.parametrize(
    ("name", "said", "adds"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_the_first_token_is_added_where_the_file_or_its_kind_says_so(name, said, adds, tmp_path: Path) -> None:
    files = tokenizer_files(write(trained(name), tmp_path / "m.gguf", name, add_bos=said).metadata)
    read = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert (read.encode("Hi").ids[0] == 0) == adds
    assert read.encode("Hi", add_special_tokens=False).ids[0] != 0


def test_an_unknown_way_to_split_gives_no_tokenizer(tmp_path: Path) -> None:
    files = tokenizer_files(write(trained("gpt-2"), tmp_path / "m.gguf", "some-other").metadata)
    # Ids of the ends need no vocabulary.
    assert set(files) == {"generation_config.json"}
    stated = json.loads(files["generation_config.json"])
    assert (stated["bos_token_id"], stated["eos_token_id"]) == (0, 1)
