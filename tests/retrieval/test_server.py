"""`mt retrieve serve`: answers, limits, and who may ask; and an index as a retriever of `mt eval qa`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from tests.retrieval.conftest import Trained

from mt_core.errors import ConfigError
from mt_infer.server.options import ServerOptions
from mt_retrieval.retriever import Retriever, build_index_retriever
from mt_retrieval.server import create_app


@pytest.fixture(scope="module")
def client(trained: Trained) -> TestClient:
    retriever = Retriever.open(trained.embeddings, device="cpu")
    return TestClient(create_app(retriever, ServerOptions()), base_url="http://127.0.0.1")


def test_search_answers_with_passages(client: TestClient, trained: Trained) -> None:
    questions = [" ".join(trained.world.texts[row].split()[:3]) for row in (190, 210)]
    found = client.post("/search", json={"questions": questions, "top_k": 2}).json()["results"]
    assert [passages[0]["id"] for passages in found] == [1190, 1210]
    assert [len(passages) for passages in found] == [2, 2]
    assert found[0][0]["title"] == trained.world.titles[190]
    assert client.get("/health").json() == {"status": "ok", "passages": 240, "index": "exact"}


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        ({"questions": []}, {}, 400, "questions: "),
        ({"questions": ["a"], "top_k": 0}, {}, 400, "top_k: "),
        ({"questions": ["a"], "k": 1}, {}, 400, "k: this server has no such field"),
        ({"questions": ["a"]}, {"host": "example.org"}, 403, "the request is for the host 'example.org'"),
    ],
)
def test_requests_that_are_refused(client: TestClient, body, headers, status: int, words: str) -> None:
    answer = client.post("/search", json=body, headers=headers)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


@pytest.mark.slow
def test_an_index_finds_passages_for_questions(trained: Trained, mt, tmp_path: Path) -> None:
    """For a decoder that answers with them, too."""
    retriever = build_index_retriever({"path": str(trained.embeddings)}, "cpu")
    titles, texts = trained.world.titles, trained.world.texts
    found = retriever.passages([" ".join(texts[row].split()[:3]) for row in (190, 210)], 2)
    assert [passages[0] for passages in found] == [(titles[row], texts[row]) for row in (190, 210)]
    assert [len(passages) for passages in found] == [2, 2]
    assert retriever.description()["path"] == str(trained.embeddings)
    gpt = ["num_layers=1", "hidden_size=16", "num_attention_heads=2", "position_embedding_type=rope"]
    keys = [*(f"model.{key}" for key in gpt), "data.seq_length=256", "data.corpus_bytes=1000000", "train.train_iters=1"]
    keys += ["train.micro_batch_size=1", "train.eval_iters=0", "lr_schedule.lr_warmup_iters=0"]
    run = tmp_path / "run"
    assert mt("train", "--run-dir", run, *(word for key in keys for word in ("--set", key))).code == 0
    (tmp_path / "qa.jsonl").write_text(json.dumps({"question": texts[190], "answers": ["a"]}) + "\n")
    command = ["eval", "qa", run, "--data", tmp_path / "qa.jsonl", "--max-tokens", 2, "--output", tmp_path / "qa.json"]
    found = mt(*command, "--retriever", "index", "--retriever-option", f"path={trained.embeddings}", "--top-k", 3)
    assert found.code == 0, found.err
    samples = (tmp_path / "qa.samples.jsonl").read_text().splitlines()
    assert json.loads(samples[1])["details"]["passages"] == 3
    assert json.loads(samples[0])["evaluation"]["tasks"]["qa"]["retriever"]["top_k"] == 3
    for options, words in (({}, "needs --retriever-option path=INDEX"), ({"pat": "x"}, "no option pat.*path")):
        with pytest.raises(ConfigError, match=words):
            build_index_retriever(options, "cpu")
