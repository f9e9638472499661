"""LAMBADA against the model's forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mt_core.errors import DataError
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_eval import evaluate
from mt_eval.lambada import Lambada
from mt_infer.text import TextGenerator

PASSAGES = ["one two three four", "He saw the the", "short   one", "x" * 50 + " and a longer passage than the model"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lambada.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    return path


def reference(generator: TextGenerator, text: str, strict: bool) -> tuple[bool, float]:
    """Right or wrong, and the log-likelihood, token by token."""
    context, word = text.rsplit(maxsplit=1) if strict else (text[:-1], text[-1])
    tokens = [*context.strip().encode(), *(b" " if strict else b""), *word.encode()][-33:]
    targets = len(word) + strict
    right, total = True, 0.0
    for place in range(len(tokens) - targets, len(tokens)):
        with torch.no_grad():
            logs = generator.model(torch.tensor([tokens[:place]]))[0, -1].log_softmax(-1)
        right &= int(logs.argmax()) == tokens[place]
        total += float(logs[tokens[place]])
    return right, total


@pytest.mark.parametrize("strict", [True, False])
def test_accuracy_is_that_of_the_forward_pass(generator: TextGenerator, model: Path, file: Path, strict: bool) -> None:
    task = Lambada(file, generator.tokenizer, 32, is_strict=strict)
    found = evaluate(generator, [task], model).tasks["lambada"]
    expected = [reference(generator, text, strict) for text in PASSAGES]
    assert found.metrics["accuracy"] == sum(right for right, _ in expected) / len(PASSAGES)
    assert found.metrics["log_likelihood"] == pytest.approx(sum(logs for _, logs in expected) / len(PASSAGES), abs=1e-4)
    assert (found.samples, found.truncated) == (4, 1)


def test_the_likeliest_token_is_right_and_another_is_wrong(generator: TextGenerator, tmp_path: Path) -> None:
    context = "some words befor"
    with torch.no_grad():
        logits = generator.model(torch.tensor([list(context.encode())]))[0, -1]
    letters = [token for token in logits.argsort(descending=True).tolist() if chr(token).isalpha() and token < 128]
    # The loose task judges the last token: make the model's own choice a letter.
    lines = [context + chr(letters[0]), context + chr(letters[1])]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    task = Lambada(tmp_path / "own.jsonl", generator.tokenizer, 32, is_strict=False)
    found = [sample.values["accuracy"] for sample in task.samples(generator, 0)]
    assert int(logits.argmax()) == letters[0]
    assert found == [1.0, 0.0]


class BytesWithStart(ByteLevelTokenizer):
    """Bytes, with an id of no text before and behind each text, as Llama's tokenizer can be set up."""

    def encode(self, text: str) -> list[int]:
        return [257, *super().encode(text), 258]


def test_ids_that_a_tokenizer_adds_are_not_between_context_and_word(generator: TextGenerator, file: Path) -> None:
    task = Lambada(file, BytesWithStart(), 32)
    (found, *_) = task.samples(generator, 0)
    tokens = [257, *b"one two three four"]
    with torch.no_grad():
        logs = generator.model(torch.tensor([tokens]))[0].log_softmax(-1)
    expected = sum(float(logs[place - 1, tokens[place]]) for place in range(len(tokens) - 5, len(tokens)))
    assert found.values["log_likelihood"] == pytest.approx(expected, abs=1e-4)


def test_a_word_longer_than_the_model_is_a_sentence(generator: TextGenerator, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text('{"text": "one two"}\n' + json.dumps({"text": "one " + "x" * 40}))
    task = Lambada(tmp_path / "long.jsonl", generator.tokenizer, 32)
    with pytest.raises(DataError, match="line 2: the last word has 41 tokens; it must have from 1 to 32"):
        list(task.samples(generator, 0))


@pytest.mark.parametrize(("content", "words"), [('{"text": "word"}', "line 1"), ("{}", "line 1"), ("", "no passage")])
def test_a_file_without_passages_is_a_sentence(generator: TextGenerator, tmp_path: Path, content, words) -> None:
    (tmp_path / "bad.jsonl").write_text(content + "\n" if content else "")
    with pytest.raises(DataError, match=words):
        Lambada(tmp_path / "bad.jsonl", generator.tokenizer, 32)
