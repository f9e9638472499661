"""Questions with passages as samples, by hand: bytes are tokens, so that a text is its own reference."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_core.config.loading import load_config
from mt_core.data.building import build_datasets, build_tokenizer
from mt_core.errors import MtError
from mt_core.plugins import PluginHost, load_plugins

CHUNK = 8
KEYS = [
    "model.family=gpt",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.position_embedding_type=rope",
    "data.dataset_type=retro_sft",
    "data.chat_template=plain",
    "data.seq_length=96",
    f"data.retro_chunk_length={CHUNK}",
    "train.train_iters=1",
]
CITY = {"title": "Atlas", "text": "Rome lies in Italy."}
QUESTION: dict[str, Any] = {"question": "Where is Rome?", "answers": ["Italy", "Europe"], "ctxs": [CITY, "Not this."]}
EOD = 256


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return load_plugins()


def samples(host: PluginHost, path: Path, *options: str) -> list[dict[str, np.ndarray]]:
    """In the order of the file."""
    config = load_config(overrides=[*KEYS, f'data.train_data_path=["{path}"]', *options], host=host).config
    dataset = build_datasets(config, build_tokenizer(config, host), "train", host)["train"]
    places = {dataset.describe(index): index for index in range(len(dataset))}
    return [dict(dataset[places[where]]) for where in sorted(places)]


def lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def text_of(tokens: np.ndarray) -> str:
    return "".join("|" if token == EOD else "" if token > EOD else chr(token) for token in tokens.tolist())


def learned(sample: dict[str, np.ndarray]) -> str:
    return text_of(sample["labels"][sample["loss_mask"] > 0])


def test_a_sample_by_hand(host, tmp_path: Path) -> None:
    """The prompt ends with a chunk, and both passages are neighbours of every chunk."""
    (sample,) = samples(host, lines(tmp_path / "qa.jsonl", QUESTION))
    prompt = "User: title: Atlas, source: Rome lies in Italy.\n\nWhere is Rome?\n\nAssistant:"
    filler = -len(prompt) % CHUNK
    assert filler
    whole = "|" * filler + prompt + " Italy"
    assert text_of(sample["tokens"]) == whole
    assert learned(sample) == " Italy|"
    (first, *_), first_chunk = np.flatnonzero(sample["loss_mask"]), (filler + len(prompt)) // CHUNK
    assert first == first_chunk * CHUNK - 1, "the last token of a chunk predicts the answer's first"
    assert sample["neighbor_tokens"].shape == sample["neighbor_mask"].shape == (96 // CHUNK, 2, 2 * CHUNK)
    for tokens, mask in zip(sample["neighbor_tokens"], sample["neighbor_mask"], strict=True):
        assert [text_of(row[own > 0]) for row, own in zip(tokens, mask, strict=True)] == [
            "title: Atlas, so",
            "Not this.",
        ]


@pytest.mark.parametrize(
    ("options", "prompt", "neighbors"),
    [
        (["data.ft_neighbours=0"], "User: Where is Rome?\n\nAssistant:", ["title: Atlas, so", "Not this."]),
        (["data.ft_neighbours=0", "data.encode_passages=false"], "User: Where is Rome?\n\nAssistant:", ["", ""]),
        (
            ["data.ft_neighbours=1", "data.reuse_top=false"],
            "User: title: Atlas, source: Rome lies in Italy.\n\nWhere is Rome?\n\nAssistant:",
            ["Not this.", ""],
        ),
        # Of 57 tokens 7 are the answer's; the prompt has six chunks, and 16 tokens beside the question's 32.
        (
            ["data.seq_length=56"],
            "User: title: Atlas, \n\nWhere is Rome?\n\nAssistant:",
            ["title: Atlas, so", "Not this."],
        ),
    ],
)
def test_which_passages_are_read_where(host, tmp_path: Path, options, prompt, neighbors) -> None:
    (sample,) = samples(host, lines(tmp_path / "qa.jsonl", QUESTION), *options)
    assert text_of(sample["tokens"]).lstrip("|") == prompt + " Italy"
    assert learned(sample) == " Italy|"
    mask = sample["neighbor_mask"][0] > 0
    assert [text_of(row[own]) for row, own in zip(sample["neighbor_tokens"][0], mask, strict=True)] == neighbors


def test_files_of_megatron(host, tmp_path: Path) -> None:
    """A JSON array, with the keys that its releases read."""
    records = [
        {"question": "Q1", "answer": "one", "sub-paragraphs": ["T", "text"]},
        {"question": "Q2", "answers": ["two", "zwei"], "sub_paragraph": "plain"},
        {"question": "Q3", "longform_answer": "three"},
        {"question": "Q4", "answer": ["B"], "qa_type": "multi_choice_qa", "multichoice_options": ["red", "blue"]},
        {"question": "Q5", "answers": []},
    ]
    path = tmp_path / "nq_QA_train.json"
    path.write_text(json.dumps(records))
    found = samples(host, path)
    assert [text_of(sample["tokens"]).lstrip("|") for sample in found] == [
        "User: title: T, source: text\n\nQ1\n\nAssistant: one",
        "User: plain\n\nQ2\n\nAssistant: two",
        "User: Q3\n\nAssistant: three",
        "User: Q4\n(A) red\n(B) blue\n\nAssistant: B",
    ]


def test_of_a_conversation_the_last_answer_is_learned(host, tmp_path: Path) -> None:
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "Who?"), ("assistant", "Me")]
    record = {"messages": [{"role": role, "content": text} for role, text in turns], "passages": ["P"]}
    (sample,) = samples(host, lines(tmp_path / "chat.jsonl", record))
    assert text_of(sample["tokens"]).lstrip("|") == "User: Hi\n\nAssistant: Hello|\n\nUser: P\n\nWho?\n\nAssistant: Me"
    assert learned(sample) == " Me|"


def test_an_answer_that_is_too_long_is_cut(host, tmp_path: Path) -> None:
    path = lines(tmp_path / "qa.jsonl", {**QUESTION, "answers": ["x" * 90]}, {**QUESTION, "question": "?" * 99})
    for _ in range(2):  # the second time from the cache
        (sample,) = samples(host, path)
        assert learned(sample) == " " + "x" * 64
        assert text_of(sample["tokens"]).lstrip("|").startswith("User: Where is Rome?\n\nAssistant: xxx")


@pytest.mark.parametrize(
    ("record", "options", "words"),
    [
        ({"text": "no question"}, [], "record 1 needs a text under question, or messages; its keys are text"),
        ({"question": "Q", "answers": "A", "ctxs": "C"}, [], "ctxs must be a list of passages, and is a string"),
        ({"question": "Q", "answers": ["A"], "ctxs": [3]}, [], 'ctxs 1 must be a text, {"title": ..., "text": ...} or'),
        ({"question": "Q", "answers": [3]}, [], "answers must be a list of texts"),
        ({"messages": [{"role": "assistant", "content": "A"}]}, [], "has no message of the user"),
        ({"question": "Q"}, [], "no record has an answer within data.seq_length=96"),
        (QUESTION, ["data.seq_length=24", "data.on_too_long=error"], "question and answer have 39 tokens, more than"),
        (QUESTION, ["data.seq_length=90"], "90 is not a multiple of data.retro_chunk_length=8"),
        (QUESTION, ["data.chat_template_file=t.jinja"], "data.chat_template_file=t.jinja are both given"),
    ],
)
def test_what_cannot_be_used_is_named(host, tmp_path: Path, record, options, words) -> None:
    with pytest.raises(MtError) as caught:
        samples(host, lines(tmp_path / "qa.jsonl", record), *options)
    assert words in " ".join(str(caught.value).split())


def test_tab_separated_questions(host, tmp_path: Path) -> None:
    path = tmp_path / "nq-train.qa.csv.gz"
    path.write_bytes(gzip.compress(b"Q1\t['one', 'eins']\nwithout answers\nQ2\t[\"two\"]\n"))
    found = samples(host, path, "data.on_error=skip")
    assert [text_of(sample["tokens"]).lstrip("|") for sample in found] == [
        "User: Q1\n\nAssistant: one",
        "User: Q2\n\nAssistant: two",
    ]
    with pytest.raises(MtError, match="line 2 has 1 fields; it must have two"):
        samples(host, path)


def test_records_that_cannot_be_used_are_left_out_on_request(host, tmp_path: Path) -> None:
    path = lines(tmp_path / "qa.jsonl", {"question": 3}, QUESTION)
    assert len(samples(host, path, "data.on_error=skip")) == 1
