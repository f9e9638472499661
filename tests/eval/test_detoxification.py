"""Detoxification: metrics and selection by hand, scorers over HTTP, and a model that unlearns a word."""

from __future__ import annotations

import json
import random
import socketserver
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.eval.conftest import train
from tests.models.rule_tasks import SMALL, write_vocabulary

from mt_cli.main import run
from mt_core.config.loading import load_config
from mt_core.errors import ConfigError, DataError
from mt_core.plugins import load_plugins
from mt_core.train import Trainer
from mt_core.train.trained_model import load_trained_model
from mt_eval.detoxification import loop, scorers
from mt_eval.detoxification.annotation import annotate, read_lines, select_least_toxic, toxicity_metrics
from mt_eval.detoxification.loop import FINETUNING, Detoxification, Plan
from mt_eval.detoxification.scorers import build_classifier


class WordScorer:
    """toxicity: the share of words that begin with b."""

    def __init__(self) -> None:
        self.judged = 0

    def scores(self, texts: Sequence[str]) -> list[Mapping[str, float] | None]:
        self.judged += len(texts)
        words = [text.split() for text in texts]
        return [{"toxicity": sum(word.startswith("b") for word in of) / len(of)} for of in words]


def lines(*completions: Sequence[float | None], prompts: Sequence[float | None] = ()) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"completions": [{"text": "t", "scores": None if one is None else {"toxicity": one}} for one in of]}
        for of in completions
    ]
    for line, score in zip(found, prompts, strict=False):
        line["prompt_scores"] = None if score is None else {"toxicity": score}
    return found


def test_metrics_by_hand() -> None:
    found = toxicity_metrics(lines([0.1, 0.9], [0.5, None], [0.2, 0.4], [None], prompts=(0.8, 0.3, None, 0.9)))
    # Largest scores 0.9, 0.5, 0.4: one of three prompts above one half.
    assert found["prompts"] == 3
    assert found["expected_maximum_toxicity"] == pytest.approx(0.6)
    assert found["maximum_toxicity_deviation"] == pytest.approx(((0.3**2 + 0.1**2 + 0.2**2) / 3) ** 0.5)
    assert found["toxicity_probability"] == pytest.approx(1 / 3)
    assert (found["toxic_prompts_prompts"], found["toxic_prompts_toxicity_probability"]) == (1, 1.0)
    assert (found["nontoxic_prompts_prompts"], found["nontoxic_prompts_expected_maximum_toxicity"]) == (1, 0.5)
    assert found["mean_toxicity"] == pytest.approx((0.1 + 0.9 + 0.5 + 0.2 + 0.4) / 5)
    assert found["texts"] == 5


def test_an_attribute_that_the_scorer_does_not_give(tmp_path: Path) -> None:
    (tmp_path / "scored.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines([None], [0.1, 0.9])))
    for use in (
        lambda: toxicity_metrics(read_lines(tmp_path / "scored.jsonl"), "toxicty"),
        lambda: select_least_toxic(tmp_path / "scored.jsonl", tmp_path / "kept.jsonl", 0.5, 1, "toxicty"),
    ):
        with pytest.raises(DataError, match="--attribute toxicty .did you mean .*: the scores are toxicity"):
            use()


def test_the_least_toxic_half_of_all_texts(tmp_path: Path) -> None:
    texts = {"a": 0.5, "b": None, "c": 0.1, "d": 0.9, "e": 0.3}
    rows = [{"completions": [{"text": name, "scores": score and {"toxicity": score}}]} for name, score in texts.items()]
    (tmp_path / "scored.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert select_least_toxic(tmp_path / "scored.jsonl", tmp_path / "kept.jsonl", 0.5, seed=1) == 2
    kept = [json.loads(line)["text"] for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert sorted(kept) == ["c", "e"]
    with pytest.raises(DataError, match=r"4 of 5 texts have a score, and a share of 0.1 keeps none"):
        select_least_toxic(tmp_path / "scored.jsonl", tmp_path / "kept.jsonl", 0.1, seed=1)


WORDS = {"name": "words", "options": {}}


def test_scores_of_a_killed_annotation_are_not_requested_again(tmp_path: Path) -> None:
    source, target = tmp_path / "texts.jsonl", tmp_path / "scored.jsonl"
    texts = ["bad", "good", "", "bad good", "fine"]
    source.write_text("".join(json.dumps({"completions": [{"text": text}]}) + "\n" for text in texts))
    annotate(source, target, WordScorer(), WORDS, batch=2)
    whole = target.read_bytes()
    kept = whole.splitlines(keepends=True)
    target.write_bytes(b"".join(kept[:3]) + kept[3][:7])
    scorer = WordScorer()
    annotate(source, target, scorer, WORDS, batch=2)
    assert (target.read_bytes(), scorer.judged) == (whole, 2)
    found = [line["completions"][0]["scores"] for line in read_lines(target)]
    assert found == [{"toxicity": 1.0}, {"toxicity": 0.0}, None, {"toxicity": 0.5}, {"toxicity": 0.0}]
    with pytest.raises(DataError, match="scores of another scorer than"):
        annotate(source, target, scorer, {**WORDS, "name": "http"})
    source.write_text(source.read_text().replace("fine", "bad"))
    with pytest.raises(DataError, match="scores of other texts than those of"):
        annotate(source, target, scorer, WORDS)
    assert target.read_bytes() == whole
    target.write_text("notes")
    with pytest.raises(DataError, match="has no whole line with scores"):
        annotate(source, target, scorer, WORDS)
    assert target.read_text() == "notes"
    source.write_text("{}\n[]\n")
    with pytest.raises(DataError, match="line 2"):
        list(read_lines(source))


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any], list[tuple[int, Any]]]]:
    """URL, requests, answers (status, JSON) in the order in which they are given."""
    requests: list[Any] = []
    answers: list[tuple[int, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, answer = answers.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/score", requests, answers
    http.shutdown()
    thread.join()
    http.server_close()


class Greeting(socketserver.BaseRequestHandler):
    """An answer of another protocol."""

    def handle(self) -> None:
        self.request.recv(65536)
        self.request.sendall(b"hello\r\n")


def test_scorers_over_http(server, monkeypatch: pytest.MonkeyPatch) -> None:
    url, requests, answers = server
    monkeypatch.setattr(scorers, "FIRST_WAIT", 0.0)
    answers += [(503, {}), (200, {"scores": [{"toxicity": 0.25}, None]})]
    assert scorers.HttpScorer(url).scores(["a", "b"]) == [{"toxicity": 0.25}, None]
    assert requests == [{"texts": ["a", "b"]}] * 2
    for answer, words in (([], "2 entries"), ({"scores": [{}]}, "2 entries"), ({"scores": [{"t": 2}, None]}, "0 to 1")):
        answers.append((200, answer))
        with pytest.raises(DataError, match=words):
            scorers.HttpScorer(url).scores(["a", "b"])
    answers.append((403, {}))
    with pytest.raises(DataError, match="status 403"):
        scorers.HttpScorer(url).scores(["a"])


def test_an_answer_of_another_protocol_ends_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(scorers, "time", SimpleNamespace(sleep=waits.append))
    with socketserver.TCPServer(("127.0.0.1", 0), Greeting) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        try:
            with pytest.raises(DataError, match="no answer after 6 attempts: hello"):
                scorers.HttpScorer(f"http://127.0.0.1:{server.server_address[1]}").scores(["a"])
        finally:
            server.shutdown()
    assert waits == [1, 2, 4, 8, 16]  # none behind the last attempt


def test_perspective_is_requested_for_six_attributes(server) -> None:
    url, requests, answers = server
    value = {"summaryScore": {"value": 0.5}}
    answers += [(200, {"attributeScores": {name.upper(): value for name in scorers.ATTRIBUTES}}), (400, {})]
    scorer = scorers.PerspectiveScorer("secret", url, workers=1)
    text = "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 20000
    assert scorer.scores([text, "klingon"]) == [dict.fromkeys(scorers.ATTRIBUTES, 0.5), None]
    assert len(requests[0]["comment"]["text"].encode()) == 20480
    assert set(requests[0]["requestedAttributes"]) == {name.upper() for name in scorers.ATTRIBUTES}
    answers += [(403, {})]
    with pytest.raises(DataError) as failed:
        scorer.scores(["a"])
    assert "secret" not in str(failed.value)


def test_a_checkpoint_that_does_not_say_its_length_is_refused_first(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(metadata={"config": {"model": {"family": "gpt"}}})
    monkeypatch.setattr(loop, "find_checkpoint", Path)
    monkeypatch.setattr(loop, "open_checkpoint", lambda path, host: found)
    with pytest.raises(ConfigError, match="hf does not say .*; give --train data.seq_length=N"):
        Detoxification(Plan("hf", num_samples=1), tmp_path / "work", WordScorer())
    Detoxification(Plan("hf", num_samples=1, train=("data.seq_length=8",)), tmp_path / "work", WordScorer())


def test_settings_of_the_finetuning_can_be_put_right_until_it_has_begun(tmp_path: Path) -> None:
    def begin(*train: str, num_samples: int = 1) -> None:
        plan = Plan("model", num_samples, train=("data.seq_length=8", *train))
        Detoxification(plan, tmp_path, WordScorer())

    begin("optimizer.lr=fast")
    begin("optimizer.lr=1e-3")
    with pytest.raises(ConfigError, match="was begun with num_samples=1, now 2"):
        begin("optimizer.lr=1e-3", num_samples=2)
    (tmp_path / "run").mkdir()
    begin("optimizer.lr=1e-3")
    with pytest.raises(ConfigError, match=r"was begun with train=.*1e-3.*, now .*1e-4"):
        begin("optimizer.lr=1e-4")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned which texts are toxic: those with the word red."""
    folder = tmp_path_factory.mktemp("classifier")
    draw = random.Random(1)
    texts = [" ".join(draw.choices(["red", "dog", "cat", "sun"], weights=(1, 3, 3, 3), k=4)) for _ in range(200)]
    rows = [json.dumps({"text": text, "label": "toxic" if "red" in text else "fine"}) for text in texts]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    settings = [
        *SMALL,
        f"tokenizer.vocab_file={write_vocabulary(folder)}",
        f'data.train_data_path=["{folder}/train.jsonl"]',
        "data.dataset_type=text_classification",
        'data.labels=["fine", "toxic"]',
        "model.num_classes=2",
        "checkpoint.best_metric=null",
    ]
    Trainer(load_config(preset="mnli-bert-tiny", overrides=settings), run_dir=folder / "run").train()
    return folder / "run"


@pytest.mark.slow
def test_a_finetuned_classifier_as_a_scorer(classifier: Path, tmp_path: Path, capsys) -> None:
    """Probabilities are those of one forward pass for each text."""
    texts = ["dog red", "cat sun dog", "sun", "", "dog " * 30]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"completions": [{"text": text}]}) + "\n" for text in texts))
    command = ["eval", "toxicity", str(source), "--scorer", "classifier", "--json"]
    options = ("--scorer-option", f"checkpoint={classifier}", "--scorer-option", "attribute=insult")
    assert run([*command, *options, "--attribute", "insult"]) == 0
    assert json.loads(capsys.readouterr().out)["toxicity_probability"] == 1 / 4
    trained = load_trained_model(classifier, load_plugins())
    found = [line["completions"][0]["scores"] for line in read_lines(tmp_path / "texts.scored.jsonl")]
    for text, scores in zip(texts, found, strict=True):
        if not text:
            assert scores is None
            continue
        tokens = torch.tensor([[2, *trained.tokenizer.encode(text)[:14], 3]])
        with torch.no_grad():
            odds = trained.model(tokens, torch.zeros_like(tokens))[0].exp()
        assert scores == {"insult": pytest.approx(float(odds[1] / odds.sum()), abs=1e-5)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs --scorer-option checkpoint=PATH"),
        ({"checkpoint": "RUN", "class": "2"}, r"class=2: the classes of the model are 0 \(fine\), 1 \(toxic\)"),
        ({"checkpoint": "RUN", "class": "toxic"}, "give the number of a class"),
        ({"checkpoint": "RUN", "atribute": "a"}, 'has no option atribute .did you mean "attribute"'),
    ],
)
def test_options_of_a_classifier(classifier: Path, options: dict[str, str], words: str) -> None:
    given = {name: value.replace("RUN", str(classifier)) for name, value in options.items()}
    with pytest.raises(ConfigError, match=words):
        build_classifier(given, load_plugins())


def test_the_finetunings_settings_are_a_configuration() -> None:
    """Its learning rate is below the lowest one of a training without arguments."""
    for preset in (None, "gpt-tiny", "gpt2-124m", "llama3.2-1b"):
        config = load_config(preset=preset, overrides=[*FINETUNING, "train.train_iters=78"]).config
        assert (config.optimizer.lr, config.optimizer.min_lr) == (2e-5, 0)


@pytest.mark.slow
def test_a_model_unlearns_a_word(tmp_path: Path) -> None:
    """A model of two words, one of which is toxic, is finetuned on what it says without it."""
    (tmp_path / "words.jsonl").write_text(
        "".join(json.dumps({"text": word * 8}) + "\n" for word in ["bad ", "ok "] * 40)
    )
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": " "}) + "\n" + json.dumps({"prompt": "ok "}) + "\n")
    base = {
        "data.dataset_type": "gpt",
        "data.data_path": json.dumps([str(tmp_path / "words.jsonl")]),
        "data.split": '"1"',
        "data.corpus_bytes": None,
        "train.eval_iters": 0,
        "train.train_iters": 60,
        "train.micro_batch_size": 16,
        "optimizer.lr": 1e-2,
    }
    model = train(tmp_path / "model", **base)
    plan = Plan(
        str(model),
        num_samples=24,
        prompts=str(tmp_path / "prompts.jsonl"),
        texts=(f"words={tmp_path / 'words.jsonl'}",),
        share=0.4,
        max_tokens=24,
        continuations=12,
        continuation_tokens=8,
        train=("optimizer.lr=1e-2", "train.train_iters=20", "train.micro_batch_size=8", "train.num_threads=1"),
    )
    steps: list[str] = []

    def detoxified(scorer: WordScorer) -> dict[str, dict[str, float]]:
        steps.clear()
        return Detoxification(plan, tmp_path / "work", scorer, on_step=steps.append, command=run).run()

    report = detoxified(WordScorer())
    assert report["before"]["toxicity_probability"] > 0.4
    assert report["after"]["mean_toxicity"] < 0.5 * report["before"]["mean_toxicity"]
    assert report["after"]["words_perplexity"] > report["before"]["words_perplexity"]
    assert json.loads((tmp_path / "work" / "report.json").read_text())["after"] == report["after"]
    again = WordScorer()
    assert detoxified(again) == report
    assert again.judged == 0
    with pytest.raises(ConfigError, match="was begun with num_samples=24"):
        Detoxification(Plan(str(model), num_samples=25), tmp_path / "work", WordScorer())
