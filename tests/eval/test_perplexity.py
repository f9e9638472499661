"""Perplexity: windows, words and bytes, against the model's forward pass and cases worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.command_on_ranks import fork_ranks
from tests.eval.conftest import KEYS

from mt_core.errors import ConfigError, DataError
from mt_data.indexed import IndexedDatasetWriter
from mt_eval import Perplexity, TextSet, evaluate
from mt_eval.evaluation import read_evaluation, samples_path
from mt_eval.perplexity.task import windows
from mt_eval.perplexity.texts import ptb, wikitext
from mt_infer.text import TextGenerator

LENGTH = 32
TEXT = "A text of some hundred bytes, in which no window of the model's length has room: " * 3


def forward_loss(generator: TextGenerator, tokens: Sequence[int], stride: int) -> float:
    """Sum over tokens 1, 2, ... of the negative log-probability under the window that Megatron's rule gives them: the
    first one that reaches so far, of those that begin at multiples of the stride."""
    total = 0.0
    for target in range(1, len(tokens)):
        start = max(0, math.ceil((target - LENGTH) / stride)) * stride
        with torch.no_grad():
            logits = generator.model(torch.tensor([tokens[start:target]]))
        total -= float(logits[0, -1].double().log_softmax(-1)[tokens[target]])
    return total


@pytest.mark.slow
@pytest.mark.parametrize("stride", [32, 8, 5, 1])
def test_each_token_is_predicted_once_in_the_window_of_megatrons_rule(
    generator: TextGenerator, tmp_path, stride
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    task = Perplexity(TextSet("text", str(tmp_path / "text.txt")), generator.tokenizer, LENGTH, stride=stride)
    samples = list(task.samples(generator, 0))
    assert sum(sample.weight for sample in samples) == len(TEXT) - 1
    metrics = task.metrics(samples)
    expected = forward_loss(generator, list(TEXT.encode()), stride)
    assert metrics["loss"] == pytest.approx(expected / (len(TEXT) - 1), abs=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(expected / (len(TEXT) - 1) / math.log(2), abs=1e-5)


def test_windows_by_hand() -> None:
    found = [(window.start, window.first, window.end) for window in windows(12, 5, 3)]
    # Five targets, then three at a time: 1-5, 6-8, 9-11, each window from 3 tokens further on.
    assert found == [(0, 1, 6), (3, 6, 9), (6, 9, 12)]
    assert list(windows(1, 5, 3)) == []
    with pytest.raises(ConfigError, match=r"overlapping_eval=6 must be from 1 to the window's 5"):
        list(windows(12, 5, 6))


def test_wikitext103_is_megatrons_adjusted_perplexity(generator: TextGenerator, model: Path, tmp_path, mt) -> None:
    file = tmp_path / "wiki.test.tokens"
    file.write_text(" \n = Title = \n The cat 's ( small ) hat , size 1 @.@ 5 . \n")
    # By hand: pieces between single spaces of the stripped text (a line break is a piece of its own), and the text
    # after the rules: " ,", " 's", brackets, " @.@ " and line ends.
    words = 17
    detokenized = "\n= Title =\nThe cat's (small) hat, size 1.5.\n"
    assert wikitext(file.read_text()) == detokenized
    outcome = mt("eval", "wikitext103", model, file, "--overlapping-eval", "7", "--json")
    assert outcome.code == 0, outcome.err
    metrics = json.loads(outcome.out)["tasks"]["wikitext103"]["metrics"]
    loss = forward_loss(generator, list(detokenized.encode()), 7)
    assert metrics["tokens"] == len(detokenized) - 1
    assert metrics["words"] == words - 1
    assert metrics["word_perplexity"] == pytest.approx(min(math.exp(20), math.exp(loss / (words - 1))), rel=1e-4)
    assert metrics["token_ratio"] == pytest.approx((len(detokenized) - 1) / (words - 1))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a @-@ b @,@ c @.@ d", "a-b,c.d"),
        ("x : y ; z ! q ? r .", "x: y; z! q? r ."),
        ('he said " go home " and " stay "', 'he said "go home" and "stay"'),
        ("[ a ] { b } ( c\n)", "[a] {b} (c)"),
        (" = = Two = = \n = = = Three = = =", " == Two ==\n=== Three ==="),
        ("20 \N{DEGREE SIGN} C , N times", "20\N{DEGREE SIGN}C, 1 times"),
        ("the boys ' room", "the boys' room"),
    ],
)
def test_rules_of_wikitext(given: str, wanted: str) -> None:
    assert wikitext(given) == wanted


def test_rules_of_ptb() -> None:
    assert ptb("it 's $ N , did n't \n go # N times") == "it's $1 , didn't\ngo #1 times"


def test_documents_follow_the_token_that_starts_them(generator: TextGenerator, model: Path, tmp_path, mt) -> None:
    """The same texts as JSON lines and as .bin/.idx; several sets in one run."""
    texts = ["First of two.", "", "Zwei: \u00fcber W\u00f6rter."]
    eod = generator.tokenizer.special.eod
    assert eod is not None
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    with IndexedDatasetWriter(tmp_path / "tokens", np.uint16) as writer:
        for text in texts:
            writer.add_document([*text.encode(), eod], [len(text.encode()) + 1])
        writer.finish()
    output = tmp_path / "found.json"
    options = ("--data", f"lines={lines}", "--data", tmp_path / "tokens", "--text-key", "body", "--output", output)
    outcome = mt("eval", "ppl", model, *options)
    assert outcome.code == 0, outcome.err
    found = read_evaluation(output).tasks
    losses = [forward_loss(generator, [eod, *text.encode()], LENGTH) for text in texts]
    num_bytes = sum(len(text.encode()) for text in texts)
    assert found["lines"].metrics["loss"] == pytest.approx(sum(losses) / num_bytes, abs=1e-5)
    assert (found["lines"].metrics["bytes"], found["lines"].metrics["words"]) == (num_bytes, 6)
    ended = [forward_loss(generator, [eod, *text.encode(), eod], LENGTH) for text in texts]
    assert found["tokens"].metrics["loss"] == pytest.approx(sum(ended) / (num_bytes + 3), abs=1e-5)
    assert (found["tokens"].metrics["bytes"], found["tokens"].metrics["words"]) == (num_bytes, 6)


def test_a_killed_evaluation_goes_on_with_the_samples_that_are_left(
    generator: TextGenerator, model: Path, tmp_path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    output = tmp_path / "found.json"

    def run(length: int = LENGTH) -> tuple[float, list[int]]:
        task, counts = Perplexity(TextSet("text", str(tmp_path / "text.txt")), generator.tokenizer, length), []
        found = evaluate(generator, [task], model, output=output, on_sample=lambda task, done: counts.append(done))
        return found.tasks["text"].metrics["loss"], counts

    loss, counts = run()
    assert counts == list(range(len(counts)))
    samples = samples_path(output)
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"".join(lines[:4]) + lines[4][:9])
    assert run() == (loss, counts[3:])
    assert samples.read_bytes() == b"".join(lines)
    assert run() == (loss, counts[-1:])
    with pytest.raises(DataError, match="samples of another evaluation"):
        run(length=16)


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ('{"text": 5}', (), "line 1: no text under 'text'"),
        ('{"body": "a"}', (), "its keys are body (--text-key)"),
        ('{"text": ""}', (), "no document has a token to predict"),
        ('{"text": "a"}', ("--seq-length", "33"), "--seq-length 33: the model's sequences have 32"),
        ('{"text": "a"}', ("--overlapping-eval", "40"), "overlapping_eval=40 must be from 1 to"),
        ('{"text": "a"}', ("--detokenizer", "wiki"), "it can be none, wikitext, ptb"),
        ('{"text": "a"}', ("--data", "found=other"), "two texts have one name"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(mt, model: Path, tmp_path: Path, content, options, words) -> None:
    (tmp_path / "found.jsonl").write_text(content + "\n")
    outcome = mt("eval", "ppl", model, "--data", tmp_path / "found.jsonl", *options)
    assert outcome.code in (2, 4)
    assert "Traceback" not in outcome.err
    assert words in " ".join(outcome.err.split()), outcome.err


def test_a_text_that_does_not_exist_is_found_before_training(tmp_path: Path, mt) -> None:
    for path, words in (("none.jsonl", "matches no file"), ("none.bin", "none.idx")):
        options = [option for key, value in KEYS.items() for option in ("--set", f"{key}={value}")]
        outcome = mt("train", "--run-dir", tmp_path / "run", *options, "--set", f"eval.perplexity.x={tmp_path / path}")
        assert outcome.code == 4, outcome.err
        assert words in " ".join(outcome.err.split())
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_texts_are_measured_during_training_in_its_layout(tmp_path: Path, mt, monkeypatch) -> None:
    fork_ranks(monkeypatch)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    keys = {
        "eval.perplexity.mine": tmp_path / "text.jsonl",
        "eval.interval": 1,
        "parallel.tensor_model_parallel_size": 2,
    }
    options = [option for key, value in {**KEYS, **keys}.items() for option in ("--set", f"{key}={value}")]
    outcome = mt("train", "--nproc", "2", "--run-dir", tmp_path / "run", *options)
    assert outcome.code == 0, outcome.out + outcome.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = {line["iteration"]: line["mine_perplexity"] for line in lines if "mine_perplexity" in line}
    assert list(measured) == [1, 2]
    outcome = mt("eval", "ppl", tmp_path / "run", "--data", f"mine={tmp_path / 'text.jsonl'}", "--json")
    assert measured[2] == pytest.approx(json.loads(outcome.out)["tasks"]["mine"]["metrics"]["perplexity"], rel=1e-5)
