"""Recall: the match of answers by hand-made cases, and a trained retriever through the commands."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from tests.retrieval.conftest import Trained
from tests.retrieval.corpus import PASSAGES, TRAINED

from mt_core.errors import DataError
from mt_data.questions import Question, read_questions
from mt_retrieval.dpr import read_training_questions
from mt_retrieval.evaluation import has_answer, measure_recall
from mt_retrieval.evidence import TSVEvidence
from mt_retrieval.retriever import Retriever


@pytest.mark.parametrize(
    ("answer", "text", "match", "expected"),
    [
        ("New York", "in new-york. New  YORK!", "string", True),
        ("New York", "a new, york", "string", False),
        ("ork", "New York", "string", False),
        ("caf\u00e9", "the cafe\u0301 is open", "string", True),  # one character, and a letter with a mark
        ("cafe", "the caf\u00e9 is open", "string", False),
        ("14.5", "it was 14.5 m", "string", True),
        ("14 . 5", "it was 14.5 m", "string", True),
        ("a\u00a0b", "A B", "string", True),  # separators are none of the tokens
        ("U.S.", "the U.S. army", "string", True),
        ("", "anything", "string", True),  # as in DPR: no tokens are part of any
        (r"19[0-9]{2}$", "in 1987\nand then", "regex", True),
        (r"^new york", "a\nNEW YORK", "regex", True),
        (r"19[0-9", "in 19[0-9", "regex", False),
        ("caf\u00e9", "CAFE\u0301", "regex", True),
    ],
)
def test_an_answer_is_found_as_dpr_defines_it(answer: str, text: str, match, expected: bool) -> None:
    assert has_answer(["no such thing", answer], text, match) is expected


def test_recall_counts_questions_with_an_answer_up_to_each_place(tmp_path: Path) -> None:
    path = tmp_path / "passages.tsv"
    path.write_text("id\ttext\ttitle\n1\tone\tt\n2\ttwo\tt\n3\tthree\tone\n")
    questions = [
        Question("a", ("one", "uno")),
        Question("b", ("three",)),
        Question("c", ("four",)),
        Question("d", ("two",)),
    ]
    rows = np.array([[2, 0, 1], [2, 1, 0], [0, 1, 2], [-1, -1, -1]])
    recall = measure_recall(questions, rows, TSVEvidence(path))
    assert recall.first_hits.tolist() == [1, 0, -1, -1]  # titles are not searched
    assert [recall.at(k) for k in (1, 2, 3)] == [0.25, 0.5, 0.5]


def test_a_trained_retriever_is_measured_by_the_command(trained: Trained, tmp_path: Path, mt) -> None:
    """On questions about passages that it has not been trained on. By chance recall@5 is 5 / 240 = 0.02."""
    output, questions = tmp_path / "result.json", trained.world.folder / "questions.tsv"
    found = mt("retrieve", "evaluate", trained.embeddings, questions, "--top-k", 1, "--top-k", 5, "--output", output)
    assert found.code == 0, found.err
    result = json.loads(output.read_text())
    assert found.lines == [["recall@1", f"{result['recall']['1']:.4f}"], ["recall@5", f"{result['recall']['5']:.4f}"]]
    assert result["recall"]["5"] > 0.85
    assert result["questions"] == PASSAGES - TRAINED
    assert result["checkpoint"]["sha256"] == result["embedded"]["encoder"]["sha256"]
    assert result["made_with"]["precision"] == "fp32"
    vectors = tmp_path / "questions.npy"
    retriever = Retriever.open(trained.embeddings, device="cpu")
    assert retriever.search([], 5) == []
    np.save(vectors, retriever.encoder.questions([question.text for question in read_questions(questions)]))
    passages = tmp_path / "passages.npy"
    np.save(passages, np.concatenate(retriever.index.matrices))
    again = mt(
        *("retrieve", "evaluate", passages, questions, "--evidence", trained.world.passages),
        *("--question-embeddings", vectors, "--top-k", 1, "--top-k", 5, "--match", "regex"),
    )
    assert again.lines == found.lines


def test_validation_reports_the_rank_of_the_positive(trained: Trained) -> None:
    assert trained.validation["valid_average_rank"] < 2  # of 128 passages; by chance 63.5
    assert trained.validation["valid_top1_acc"] > 0.7
    assert trained.validation["valid_top20_acc"] == 1.0


def test_search_shows_passages(trained: Trained, mt) -> None:
    words = trained.world.texts[200].split()[:3]
    found = mt("retrieve", "search", trained.embeddings, f"{' '.join(words)}?", "--top-k", 3, "--json")
    passages = json.loads(found.out)["passages"]
    assert passages[0]["id"] == 1200
    assert passages[0]["text"] == trained.world.texts[200]
    assert [one["score"] for one in passages] == sorted((one["score"] for one in passages), reverse=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", r"has no questions"),
        ("who?\n", r"line 1 has 1 fields; it must have two"),
        ("who?\t['a'\n", r"line 1: the answers \['a' are no list as Python or JSON writes it"),
        ("who?\t__import__('os').getcwd()\n", r"are no list as Python or JSON writes it"),
        ("who?\t[]\n", r"they must be a list of texts"),
        ("who?\t[1]\n", r"they must be a list of texts"),
    ],
)
def test_files_that_are_no_questions(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "questions.tsv"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        read_questions(path)


@pytest.mark.parametrize("read", [read_questions, read_training_questions])
def test_compressed_files_that_are_damaged(tmp_path: Path, read) -> None:
    whole = gzip.compress(b"who?\t['a']\n" * 1000)
    cases = {
        "cut": (whole[:-20], r"was cut short: its compressed data ends too early"),
        "bits": (whole[:20] + b"\xff" * 9 + whole[29:], r"is damaged gzip data"),
        "plain": (b"who?", r"is damaged gzip data"),
        "bytes": (gzip.compress(b"\xff"), r"is no UTF-8"),
    }
    for name, (content, words) in cases.items():
        path = tmp_path / f"{name}.gz"
        path.write_bytes(content)
        with pytest.raises(DataError, match=words):
            read(path)
    with pytest.raises(DataError, match=r"none.gz cannot be read: No such file"):
        read(tmp_path / "none.gz")


def test_a_line_of_json_ends_with_a_newline_alone(tmp_path: Path) -> None:
    """U+2028 is a line separator to Python's splitlines, and an ordinary character of a JSON string."""
    path = tmp_path / "train.jsonl.gz"
    record = {"question": "a\u2028b", "positive_ctxs": [{"title": "t", "text": "c"}]}
    path.write_bytes(gzip.compress(f"{json.dumps(record, ensure_ascii=False)}\n \n{json.dumps(record)}".encode()))
    assert [one.question for one in read_training_questions(path)] == ["a\u2028b"] * 2


def test_answers_are_read_as_python_and_json_write_them(tmp_path: Path) -> None:
    path = tmp_path / "questions.tsv"
    path.write_text('one\t[\'a\', "b\'s"]\ntwo\t["c"]\n')
    assert [question.answers for question in read_questions(path)] == [("a", "b's"), ("c",)]
