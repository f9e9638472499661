"""Overlap with evaluation sets against a plain search, and the rules of GPT-3's appendix C by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_core.errors import ConfigError, DataError
from mt_data.corpora.decontamination import GramTable, collect_grams, count_documents, decontaminate, without_frequent
from mt_data.corpora.options import OverlapOptions
from mt_data.corpora.words import covered_share, cut_pieces, merged, normalized_words

WORDS = st.lists(st.sampled_from("abcd"), max_size=40)


@given(st.lists(WORDS, min_size=1, max_size=5), WORDS, st.integers(1, 4))
def test_matches_are_all_shared_ngrams(evaluation: list[list[str]], document: list[str], n: int) -> None:
    from mt_data.corpora.words import ngram_hashes, word_hashes

    hashes = np.unique(np.concatenate([ngram_hashes(word_hashes(words), n) for words in evaluation]))
    found = [
        p for _, positions, _ in GramTable({n: hashes} if len(hashes) else {}).matches(document) for p in positions
    ]
    grams = {tuple(words[i : i + n]) for words in evaluation for i in range(len(words) - n + 1)}
    assert found == [i for i in range(len(document) - n + 1) if tuple(document[i : i + n]) in grams]


def test_many_ngrams_are_found_and_no_others(write_jsonl: Any) -> None:
    source = random.Random(1)
    texts = [[f"w{source.randrange(10**6)}" for _ in range(30)] for _ in range(500)]
    grams = collect_grams([write_jsonl("eval.jsonl", map(" ".join, texts))], ["text"], 13, 8)
    table = GramTable(grams.grams)
    assert table.count == 500 * 18
    for words in texts[:50]:
        assert [p.tolist() for _, p, _ in table.matches(["x", *words, "y"])] == [list(range(1, 19))]
        assert not any(len(p) for _, p, _ in table.matches(sorted(words)))


@given(st.text(alphabet="ab .,中\n", max_size=80), st.data())
def test_pieces_are_what_is_outside_of_the_windows(text: str, data: st.DataObject) -> None:
    words = normalized_words(text)
    if not words:
        return
    start = data.draw(st.integers(0, len(words) - 1))
    end = data.draw(st.integers(start + 1, len(words)))
    pieces = cut_pieces(text, [(start, end)], 0)
    assert [normalized_words(piece) for piece in pieces if normalized_words(piece)] == [
        part for part in (words[:start], words[end:]) if part
    ]
    wide = cut_pieces(text, [(start, end)], 5)
    assert sum(map(len, wide)) <= sum(map(len, pieces))
    assert all(any(piece in whole for whole in pieces) for piece in wide)


def test_windows_take_words_whole_and_pieces_lose_their_blanks() -> None:
    text = "one two three BAD WORDS, four five six"
    assert cut_pieces(text, [(3, 5)], 0) == ["one two three", "four five six"]
    assert cut_pieces(text, [(3, 5)], 2) == ["one two", "five six"]
    assert cut_pieces(text, [(3, 5)], 100) == []
    assert cut_pieces(text, [(0, 1), (7, 8)], 0) == ["two three BAD WORDS, four five"]


def test_spans_merge_and_cover() -> None:
    assert merged([(5, 7), (0, 2), (2, 3), (6, 9)]) == [(0, 3), (5, 9)]
    assert covered_share([(0, 2), (1, 4)], 8) == 0.5


QUESTION = "Which river flows through the old city that the people of the north built first"


def padded(middle: str, before: int, after: int) -> str:
    def filler(name: str, words: int) -> str:
        return " ".join(f"{name}{i:06d}" for i in range(words))

    return f"{filler('b', before)} {middle} {filler('a', after)}".strip()


def result_of(write_jsonl: Any, run: Any, texts: list[str], **options: Any) -> tuple[list[str], Any]:
    evaluation = write_jsonl("eval.jsonl", [{"question": QUESTION, "answer": ["the Rhine", "x y"]}])
    run_options = run()
    report = decontaminate(
        [write_jsonl("in.jsonl", texts)], [evaluation], ["question", "answer"], OverlapOptions(**options), run_options
    )
    path: Path = run_options.output / "in.jsonl"
    return [json.loads(line)["text"] for line in path.open()], report


def test_a_shared_ngram_is_cut_out_with_200_characters(write_jsonl: Any, run: Any) -> None:
    dirty = padded(f"({QUESTION.upper()}?)", 100, 120)
    clean = padded("nothing of it", 100, 100)
    texts, report = result_of(write_jsonl, run, [clean, dirty])
    # Words have 7 letters and a blank: the 200 characters at each side reach into the 25th word and take it whole.
    assert texts == [clean, padded("", 75, 0), " ".join(f"a{i:06d}" for i in range(25, 120))]
    assert (report.total.read, report.total.kept, report.total.written) == (2, 2, 3)
    assert report.total.changed["document_cut"].count == 1
    assert report.notes["evaluation texts"] == 3
    assert report.notes["of them shorter than 8 words, not searched for"] == 2
    assert report.notes["n-grams searched for"] == len(QUESTION.split()) - 12


def test_a_part_of_the_ngram_is_no_overlap(write_jsonl: Any, run: Any) -> None:
    part = padded(" ".join(QUESTION.split()[:12]), 50, 50)
    assert result_of(write_jsonl, run, [part])[0] == [part]


def test_short_evaluation_texts_count_as_one_ngram(write_jsonl: Any, run: Any) -> None:
    evaluation = write_jsonl("eval.jsonl", ["one two three four five six seven eight"])
    dirty = padded("One two three, four five six seven eight!", 60, 60)
    report = decontaminate([write_jsonl("in.jsonl", [dirty])], [evaluation], ["text"], OverlapOptions(), run())
    assert report.total.changed["document_cut"].count == 1


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"action": "drop"}, padded(QUESTION, 100, 100), "contaminated"),
        ({}, padded(QUESTION, 30, 30), "no_piece_left"),
        ({"max_pieces": 2}, padded(f"{QUESTION} {padded(QUESTION, 80, 0)}", 80, 80), "too_many_pieces"),
        ({"min_share": 0.5}, padded(QUESTION, 2, 2), "no_piece_left"),
        ({"min_share": 0.5}, padded(QUESTION, 50, 50), ""),
    ],
)  # fmt: skip
def test_when_a_document_goes(options: dict[str, Any], text: str, reason: str, write_jsonl: Any, run: Any) -> None:
    texts, report = result_of(write_jsonl, run, [text], **options)
    assert list(report.total.dropped) == ([reason] if reason else [])
    assert texts == ([] if reason else [text])
    if reason:
        assert 'shares "which river flows' in report.total.dropped[reason].examples[0]


@pytest.mark.parametrize(("maximum", "kept"), [(3, 3), (2, 6), (0, 3)])
def test_common_phrases_are_ignored(maximum: int, kept: int, write_jsonl: Any, run: Any) -> None:
    texts = [padded(QUESTION, 10 + i, 0) for i in range(3)] + [padded("x", i, 0) for i in range(3)]
    found, report = result_of(write_jsonl, run, texts, max_documents=maximum)
    assert len(found) == report.total.kept == kept
    if maximum == 2:
        assert report.notes["n-grams ignored as in over 2 documents"] == len(QUESTION.split()) - 12


def test_document_counts_count_a_document_once(tmp_path: Path) -> None:
    np.array([0, 2, 2, 4], "<u4").tofile(tmp_path / "a")
    counts = count_documents([tmp_path / "a"], 5)
    assert counts.tolist() == [1, 0, 2, 0, 1]
    grams = {8: np.array([10, 20], np.uint64), 13: np.array([5, 6, 7], np.uint64)}
    assert {n: g.tolist() for n, g in without_frequent(grams, counts, 1).items()} == {8: [10, 20], 13: [6, 7]}


@pytest.mark.slow
def test_workers_do_not_change_a_byte(write_jsonl: Any, run: Any, files_below: Any, tmp_path: Path) -> None:
    for number in range(2):
        write_jsonl(f"in/{number}.jsonl", [padded(QUESTION if i % 40 == number else "x", i, 90) for i in range(200)])
    evaluation = write_jsonl("eval.jsonl", [QUESTION])
    for n in (1, 2):
        decontaminate([tmp_path / "in/*"], [evaluation], ["text"], OverlapOptions(), run(f"out{n}", workers=n))
    assert files_below(tmp_path / "out1") == files_below(tmp_path / "out2")


def test_evaluation_sets_that_cannot_protect_are_refused(write_jsonl: Any, run: Any) -> None:
    source, short = write_jsonl("in.jsonl", ["x"]), write_jsonl("eval.jsonl", ["too short"])
    with pytest.raises(DataError, match="none of the 1 evaluation texts has 8 words"):
        decontaminate([source], [short], ["text"], OverlapOptions(), run())
    with pytest.raises(DataError, match=r"eval.jsonl:1 has none of --eval-keys question; its keys are 'text'"):
        decontaminate([source], [short], ["question"], OverlapOptions(), run("out2"))
    with pytest.raises(ConfigError, match="must be between 1 and --ngram 13"):
        OverlapOptions(min_ngram=14)
