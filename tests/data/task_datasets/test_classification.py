"""MNLI, QQP and RACE: their files, and the sequences made of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SplitRequest
from mt_data.datasets.multiple_choice import MultipleChoiceDataConfig, build_multiple_choice
from mt_data.datasets.pair_encoding import PairRules, clean_text, encode_pair
from mt_data.datasets.text_classification import (
    GlueDataConfig,
    TextClassificationDataConfig,
    build_text_classification,
)
from mt_data.datasets.text_files import bare_encoder
from mt_data.tokenizers.null import NullConfig, build_null

MNLI = [
    *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"),
    *("sentence1_parse", "sentence2_parse", "sentence1", "sentence2", "label1", "gold_label"),
]
QQP = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
CLS, SEP, PAD = 2, 3, 0


def reference_pair(a: list[int], b: list[int], length: int) -> tuple[list[int], list[int], list[int]]:
    """Megatron's rule, place by place: cut the whole one short of the length, then SEP, then padding."""
    ids, types = [CLS, *a, SEP, *b], [0] * (len(a) + 2) + [1] * len(b)
    if len(ids) >= length:
        ids, types = ids[: length - 1], types[: length - 1]
    ids, types = [*ids, SEP], [*types, 1]
    missing = length - len(ids)
    return ids + [PAD] * missing, types + [0] * missing, [1] * len(ids) + [0] * missing


ids = st.lists(st.integers(5, 90), max_size=30)


@given(ids, ids, st.integers(4, 40))
def test_a_pair_is_cut_and_padded_as_megatron_does(a: list[int], b: list[int], length: int) -> None:
    found = encode_pair(a, b, PairRules(length, CLS, SEP, PAD))
    expected = reference_pair(a, b, length)
    for key, values in zip(("tokens", "tokentype_ids", "padding_mask"), expected, strict=True):
        assert found[key].tolist() == values, key


@given(ids, ids, st.integers(4, 40))
def test_longest_first_keeps_something_of_both(a: list[int], b: list[int], length: int) -> None:
    found = encode_pair(a, b, PairRules(length, CLS, SEP, PAD, "longest_first"))
    left_a, left_b = list(a), list(b)
    while len(left_a) + len(left_b) > length - 3:
        (left_a if len(left_a) > len(left_b) else left_b).pop()
    text = found["tokens"][: int(found["padding_mask"].sum())].tolist()
    first = text.index(SEP)
    assert text[0] == CLS
    assert text[-1] == SEP
    kept = (first - 1, len(text) - first - 2)
    assert kept[0] + kept[1] == len(left_a) + len(left_b)
    assert abs(kept[0] - len(left_a)) <= 1  # which one loses the odd token is open
    assert text[1:first] == a[: kept[0]]
    assert text[first + 1 : -1] == b[: kept[1]]


@pytest.mark.parametrize(("before", "after"), [([], []), ([CLS], []), ([], [SEP]), ([CLS], [SEP]), ([CLS, CLS], [SEP])])
def test_what_a_tokenizer_puts_around_each_text_is_taken_off(before: list[int], after: list[int]) -> None:
    class Around:
        def encode(self, text: str) -> list[int]:
            return [*before, *map(ord, text), *after]

    encode = bare_encoder(Around())  # type: ignore[arg-type]
    assert encode("") == []
    assert encode("abc") == [97, 98, 99]


def test_clean_text() -> None:
    assert clean_text("a\tb\n c  .  d . e") == "a b c. d. e"


def write_table(path: Path, columns: list[str], rows: list[dict[str, str]]) -> str:
    lines = ["\t".join(columns)] + ["\t".join(row.get(name, "-") for name in columns) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def mnli_rows(count: int) -> list[dict[str, str]]:
    labels = ["contradiction", "entailment", "neutral"]
    return [
        {"index": str(n), "sentence1": 'wa"a wbb', "sentence2": "wcc . wdd", "gold_label": labels[n % 3]}
        for n in range(count)
    ]


def build(path: str, wordpiece: Any, task: str = "mnli", split: Any = "train", **keys: Any) -> Any:
    config = GlueDataConfig(dataset_type=task, **{f"{split}_data_path": [path]}, **keys)
    return build_text_classification(config, wordpiece, SplitRequest(split, None, 24, 3))


def test_mnli(tmp_path: Path, wordpiece: Any) -> None:
    dataset = build(write_table(tmp_path / "train.tsv", MNLI, mnli_rows(9)), wordpiece)
    samples = [dataset[number] for number in range(len(dataset))]
    assert sorted(int(sample["uid"]) for sample in samples) == list(range(9))
    assert all(int(sample["labels"]) == int(sample["uid"]) % 3 for sample in samples)
    assert all(sample["loss_mask"] == 1 for sample in samples)
    a, b = wordpiece.encode('wa"a wbb'), wordpiece.encode("wcc. wdd")
    assert samples[0]["tokens"].tolist() == reference_pair(a, b, 24)[0]
    assert "train.tsv, line " in dataset.describe(0)


def test_a_test_file_has_no_labels(tmp_path: Path, wordpiece: Any) -> None:
    path = write_table(tmp_path / "test.tsv", MNLI[:10], mnli_rows(4))
    dataset = build(path, wordpiece, split="test")
    assert [int(dataset[number]["labels"]) for number in range(4)] == [-1] * 4
    assert [float(dataset[number]["loss_mask"]) for number in range(4)] == [0.0] * 4
    with pytest.raises(DataError, match=r'test\.tsv, line 2: the file has no column "gold_label", so it is a test set'):
        build(path, wordpiece)


def test_colas_published_test_file_has_other_columns(tmp_path: Path, wordpiece: Any) -> None:
    """index and sentence, named; the other files have four columns without names, also with a byte-order mark."""
    for name, mark in (("plain", ""), ("marked", "\ufeff")):
        path = tmp_path / f"{name}.tsv"
        path.write_text(f"{mark}index\tsentence\n7\twa wbb.\n9\twcc.\n", encoding="utf-8")
        dataset = build(str(path), wordpiece, "cola", "test")
        samples = {int(one["uid"]): one for one in (dataset[number] for number in range(len(dataset)))}
        assert {uid: int(one["labels"]) for uid, one in samples.items()} == {7: -1, 9: -1}
        first = wordpiece.encode("wa wbb.")
        assert samples[7]["tokens"].tolist()[1 : 1 + len(first)] == first
    (tmp_path / "train.tsv").write_text("gj04\t1\t\twa wbb.\ngj04\t0\t*\twcc.\n")
    labelled = build(str(tmp_path / "train.tsv"), wordpiece, "cola")
    assert {int(labelled[number]["uid"]): int(labelled[number]["labels"]) for number in range(2)} == {0: 1, 1: 0}


def test_qqp_and_lines_that_do_not_fit(tmp_path: Path, wordpiece: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"id": str(n), "question1": f"wa{n}", "question2": "wb", "is_duplicate": str(n % 2)} for n in range(6)]
    path = Path(write_table(tmp_path / "train.tsv", QQP, rows))
    good = build(str(path), wordpiece, "qqp")
    assert sorted((int(good[n]["uid"]), int(good[n]["labels"])) for n in range(6)) == [(n, n % 2) for n in range(6)]
    with path.open("a") as file:
        file.write("7\t1\t2\tonly four\n8\t1\t2\t\tb\t1\n9\t1\t2\ta\tb\t5\nten\t1\t2\ta\tb\t1\n")
    with pytest.raises(
        DataError, match=r"train\.tsv, line 8: 4 fields, the first line names 6 columns.*data\.on_error"
    ):
        build(str(path), wordpiece, "qqp")
    with caplog.at_level(logging.WARNING, logger="mt_data"):
        assert len(build(str(path), wordpiece, "qqp", on_error="skip")) == 6
    for words in ("left out 4 lines", "line 9: question1 is empty", "is_duplicate is '5', known are 0, 1", "'ten'"):
        assert words in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("index\tsentence1\n1\ta\n", "line 1: there is no column sentence2; the columns must be index, sentence1"),
        ("", "line 1: there is no column index, sentence1, sentence2"),
        ("index\tsentence1\tsentence2\tgold_label\n1\ta\tb\tmaybe\n", "gold_label is 'maybe', known are contradiction"),
        (b"index\tsentence1\tsentence2\tgold_label\n2\t\xff\tb\tneutral\n", "cannot be read"),
        ("index\tsentence1\tsentence2\tgold_label\n", "the train split of .* is empty"),
    ],
)  # fmt: skip
def test_bad_tables(tmp_path: Path, wordpiece: Any, text: str | bytes, message: str) -> None:
    path = tmp_path / "train.tsv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DataError, match=message) as raised:
        build(str(path), wordpiece)
    assert "train.tsv" in str(raised.value)


def test_tokenizer_and_task_must_fit(tmp_path: Path, wordpiece: Any) -> None:
    path = write_table(tmp_path / "train.tsv", MNLI, mnli_rows(2))
    with pytest.raises(ConfigError, match=r"needs the special tokens cls, sep, pad, and the tokenizer has no cls, sep"):
        build(path, build_null(NullConfig(vocab_size=100)))
    with pytest.raises(ConfigError, match=r'data\.dataset_type="mnlu" must be one of mnli, qqp, .*did you mean "mnli"'):
        build(path, wordpiece, "mnlu")


def texts(path: Path, wordpiece: Any, length: int = 24, **keys: Any) -> list[dict[str, Any]]:
    """The samples of a file with columns of one's own, in its order."""
    config = TextClassificationDataConfig(train_data_path=[str(path)], **keys)
    dataset = build_text_classification(config, wordpiece, SplitRequest("train", None, length, 3))
    return sorted((dataset[number] for number in range(len(dataset))), key=lambda sample: int(sample["uid"]))


def test_json_lines_and_columns_by_place_hold_the_same(tmp_path: Path, wordpiece: Any) -> None:
    rows = [("wa wb", "wc", "no"), ('w"d', "we", "yes")]
    lines, table = tmp_path / "texts.jsonl", tmp_path / "texts.tsv"
    lines.write_text("".join(json.dumps(dict(zip("abl", row, strict=True))) + "\n" for row in rows))
    table.write_text("".join("\t".join(row) + "\n" for row in rows))
    classes = {"labels": ["no", "yes"]}
    named = texts(lines, wordpiece, text_columns=["a", "b"], label_column="l", **classes)
    placed = texts(table, wordpiece, text_columns=[0, 1], label_column=2, header=False, **classes)
    for one, other in zip(named, placed, strict=True):
        assert all(np.array_equal(one[key], other[key]) for key in one.keys() | other.keys())
    assert [int(sample["labels"]) for sample in named] == [0, 1]
    expected = reference_pair(wordpiece.encode("wa wb"), wordpiece.encode("wc"), 24)
    assert [named[0][key].tolist() for key in ("tokens", "tokentype_ids", "padding_mask")] == list(expected)


def test_a_single_text_a_number_and_what_was_cut(tmp_path: Path, wordpiece: Any) -> None:
    path = tmp_path / "texts.tsv"
    path.write_text("\ufefftext\tlabel\nwaa wbb\t2.5\nwa wb wc wd we wf wg\t0\n", encoding="utf-8")
    short, long = texts(path, wordpiece, 8)
    ids = wordpiece.encode("waa wbb")
    assert short["tokens"].tolist() == [CLS, *ids, SEP, *[PAD] * (6 - len(ids))]
    assert not short["tokentype_ids"].any()
    assert (short["labels"], short["labels"].dtype) == (2.5, np.float32)
    assert [int(sample["truncated"]) for sample in (short, long)] == [0, 1]
    assert long["tokens"].tolist() == [CLS, *wordpiece.encode("wa wb wc wd we wf")[:6], SEP]


def test_texts_of_a_decoder_end_with_eod(tmp_path: Path) -> None:
    path = tmp_path / "texts.tsv"
    path.write_text("a\tb\tlabel\n1 2\t3\tno\n")
    keys = {"text_columns": ["a", "b"], "labels": ["no", "yes"], "sequence_format": "eod"}
    (sample,) = texts(path, build_null(NullConfig(vocab_size=9)), 8, **keys)
    eod = build_null(NullConfig(vocab_size=9)).special.eod
    assert sample["tokens"].tolist() == [1, 2, eod, 3, eod, eod, eod, eod]
    assert sample["padding_mask"].tolist() == [1] * 5 + [0] * 3


def test_other_lines_are_another_data_set_and_another_place_is_not(tmp_path: Path, wordpiece: Any) -> None:
    """By the fingerprint, which a resumed run compares."""
    files = {"a": mnli_rows(4), "b": mnli_rows(4), "c": mnli_rows(5)}
    found = [build(write_table(tmp_path / name, MNLI, rows), wordpiece).fingerprint() for name, rows in files.items()]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("keys", "text", "error", "message"),
    [
        ({}, "text\nwa\n", DataError, 'no column "label", so it is a test set'),
        ({}, "words\tlabel\n", DataError, "no column text; the columns must be text and, .* They are words, label"),
        ({"labels": ["0", "1"]}, "text\tlabel\nwa\t0\nwb\t2\n", DataError, "line 3: label is '2', known are 0, 1"),
        ({}, "text\tlabel\nwa\tgood\n", DataError, "line 2: label is 'good', it must be a number"),
        ({}, "text\tlabel\n", DataError, "is empty"),
        (
            {"uid_column": "n"},
            f"n\ttext\tlabel\n{2**63}\twa\t1\n",
            DataError,
            "n is '9.*8', which is no number of at",
        ),
        ({"text_columns": ["a", "b", "c"]}, "", ValueError, "must name one column, or two"),
        ({"labels": ["1"]}, "", ValueError, "two or more different classes"),
        ({"header": False}, "", ValueError, "text, label is a name; give places from 0"),
    ],
)
def test_bad_texts(tmp_path: Path, wordpiece: Any, keys: Any, text: str, error: Any, message: str) -> None:
    (tmp_path / "texts.tsv").write_text(text)
    with pytest.raises(error, match=message):
        texts(tmp_path / "texts.tsv", wordpiece, **keys)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "wa"', "line 2: not JSON"),
        ("[1]", "line 2: must be an object with the keys text"),
        ("[" * 100_000, "line 2: JSON nested too deeply"),
        ('{"text": "wa", "label": ' + "1" * 5000 + "}", "line 2: Exceeds the limit .* for integer"),
        ('{"txt": "wa", "label": 1}', "line 2: there is no column text; .* They are txt, label"),
        ('{"text": "wa", "label": 3}', "line 2: label is '3', known are 0, 1"),
    ],
)
def test_bad_json_lines(tmp_path: Path, wordpiece: Any, line: str, message: str) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "wa", "label": 1}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        texts(tmp_path / "texts.jsonl", wordpiece, labels=["0", "1"])


ARTICLE = {
    "article": "waa wbb.\nwcc",
    "questions": ["wa _ wb.", "wdd ?"],
    "options": [["wea", "web", "wec", "wed"], ["wfa", "wfb", "wfc", "wfd"]],
    "answers": ["C", "A"],
}


def race(folder: Path, wordpiece: Any, length: int = 32, **keys: Any) -> Any:
    config = MultipleChoiceDataConfig(train_data_path=[str(folder)], **keys)
    return build_multiple_choice(config, wordpiece, SplitRequest("train", None, length, 3))


def test_race(tmp_path: Path, wordpiece: Any) -> None:
    (tmp_path / "1.txt").write_text(json.dumps(ARTICLE) + "\n" + json.dumps(ARTICLE) + "\n")
    (tmp_path / "2.txt").write_text(json.dumps(ARTICLE, indent=2), encoding="utf-8-sig")
    dataset = race(tmp_path, wordpiece)
    samples = {int(sample["uid"]): sample for sample in (dataset[number] for number in range(6))}
    assert sorted(samples) == list(range(6))
    assert [int(samples[number]["labels"]) for number in range(6)] == [2, 0] * 3
    article = wordpiece.encode("waa wbb. wcc")
    for option, text in enumerate(["wa wea wb.", "wa web wb.", "wa wec wb.", "wa wed wb."]):
        tokens, types, padding = reference_pair(wordpiece.encode(text), article, 32)
        assert samples[4]["tokens"][option].tolist() == tokens
        assert samples[4]["tokentype_ids"][option].tolist() == types
        assert samples[4]["padding_mask"][option].tolist() == padding
    expected = reference_pair(wordpiece.encode("wdd ? wfd"), article, 32)[0]
    assert samples[1]["tokens"][3].tolist() == expected
    places = {int(dataset[number]["uid"]): dataset.describe(number) for number in range(6)}
    assert places[2].endswith("1.txt, line 2, question 1")
    assert places[5].endswith("2.txt, line 1, question 2")


def test_a_long_question_is_cut_to_max_qa_length(tmp_path: Path, wordpiece: Any) -> None:
    long = {**ARTICLE, "questions": ["wa " * 50, "wb"]}
    (tmp_path / "1.txt").write_text(json.dumps(long))
    sample = next(s for s in (race(tmp_path, wordpiece, max_qa_length=5)[n] for n in range(2)) if s["uid"] == 0)
    np.testing.assert_array_equal(sample["tokens"][:, 6], SEP)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(ARTICLE) + "\n{broken\n", r"1\.txt, line 2, column 2: no JSON"),
        ("[1]", r"1\.txt, line 1: must be an object"),
        (json.dumps(ARTICLE, indent=1) + "\n\n[1]", r"1\.txt, line 27: must be an object"),
        ("\n[" + "1" * 5000 + "]", r"1\.txt, line 2: Exceeds the limit .* for integer"),
        ('{"article": "a"}', "line 1 has no questions, options, answers; its keys are article"),
        (json.dumps({**ARTICLE, "answers": ["A"]}), "has 2 questions, 2 options, 1 answers; they must be as many"),
        (json.dumps({**ARTICLE, "answers": ["A", "E"]}), "question 2: the answer is 'E', must be one of A, B, C, D"),
        (json.dumps({**ARTICLE, "options": [["a"], ["b"]]}), "question 1 has 1 options, must have 4"),
        (json.dumps({**ARTICLE, "article": 3}), "line 1: article must be a text"),
        (json.dumps({**ARTICLE, "questions": "ab"}), "line 1: questions must be a list"),
        (json.dumps({**ARTICLE, "questions": ["a", 1]}), "question 2: question and options must be texts"),
    ],
)
def test_bad_articles(tmp_path: Path, wordpiece: Any, text: str, message: str) -> None:
    (tmp_path / "1.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        race(tmp_path, wordpiece)


def test_a_folder_without_files_names_those_within(tmp_path: Path, wordpiece: Any) -> None:
    (tmp_path / "middle").mkdir()
    (tmp_path / "middle" / "1.txt").write_text(json.dumps(ARTICLE))
    with pytest.raises(DataError, match="is no folder with .txt files; name those within it: .*middle"):
        race(tmp_path, wordpiece)
