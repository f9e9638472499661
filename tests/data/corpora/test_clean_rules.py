"""Each cleaning rule with cases worked out by hand, and against plain formulas."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_core.errors import ConfigError, DataError
from mt_data.corpora.clean_options import PRESETS, CleanOptions, preset
from mt_data.corpora.cleaning import Cleaner
from mt_data.corpora.rules import Document, duplicate_ngram_share, duplicate_shares, filter_lines, top_ngram_share

CITED = {"removed_citation": 3}
UNENDED = {"line_without_terminal_punctuation": 2}
ENGLISH = "The people of the old city have lived with the river, and they say that it will be there for ever. "
PROSE = """Bridges were built of wood until the flood of that spring took all four of them away. Afterwards the
council asked a mason from the coast to plan one of stone, with five arches and a gate at either end. He needed
eleven summers, two loans and the lead from a chapel roof, yet what he left has carried carts, armies and trams
without repair, and nobody living can say which of its blocks had to be replaced."""


def reason(text: str, *settings: str) -> str:
    return Cleaner(preset("none").replace(settings))(text)[2]


def repaired(text: str, *settings: str) -> tuple[str, dict[str, int]]:
    return Cleaner(preset("none").replace(settings)).repair(text)


@pytest.mark.parametrize(
    ("setting", "text", "wanted", "changes"),
    [
        ("fix_text=true", "schÃ¶n &amp; gut", "schön & gut", {"fixed_text": 1}),
        ("remove_citations=true", "True.[12] Or[edit] not[citation needed] [a]", "True. Or not [a]", CITED),
        ("terminal_punctuation=true", 'Menu\nIt is.\nHome...\nHe said "no"', 'It is.\nHe said "no"', UNENDED),
        ("min_words_per_line=3", "one two three\none two\n\nx", "one two three\n", {"line_with_few_words": 2}),
        ("javascript_lines=true", "Please enable JavaScript.\nText", "Text", {"line_about_javascript": 1}),
        ("policy_lines=true", "This site uses cookies.\nText", "Text", {"line_about_policies": 1}),
        ("repeated_lines=true", "a\nb\n\na \n\nb\nc", "a\nb\n\n\nc", {"repeated_line": 2}),
    ],
)  # fmt: skip
def test_what_is_mended(setting: str, text: str, wanted: str, changes: dict[str, int]) -> None:
    assert repaired(text, setting) == (wanted, changes)
    assert repaired(text) == (text, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "name", "stays", "goes"),
    [
        ("min_chars=5", "too_few_chars", "12345", "1234"),
        ("max_chars=5", "too_many_chars", "12345", "123456"),
        ("min_words=3", "too_few_words", "a b c", "a b"),
        ("max_words=3", "too_many_words", "a b c", "a b c d"),
        ("min_tokens=4", "too_few_tokens", "It's 25%.", "It's 25"),
        ("min_sentences=2", "too_few_sentences", 'It is. "Is it?"', "It is 3.5 long."),
        ("lorem_ipsum=true", "lorem_ipsum", "ipsum", "A Lorem Ipsum dolor"),
        ("curly_brackets=true", "curly_bracket", "f(x)", "f() { }"),
        ("min_mean_word_length=3", "mean_word_length", "aaa bbb", "aaa bb"),
        ("max_mean_word_length=3", "mean_word_length", "aaa bbb", "aaa bbbb"),
        ("max_hash_ratio=0.25", "hash_ratio", "# a b c", "#a #b c d"),
        ("max_ellipsis_ratio=0.25", "ellipsis_ratio", "a b c d...", "a... b… c d"),
        ("max_bullet_line_share=0.5", "bullet_lines", "- a\nb", "- a\n\u2022 b\nc"),
        ("max_ellipsis_line_share=0.5", "ellipsis_lines", "a...\nb", "a...\nb\u2026\nc"),
        ("min_alphabetic_word_share=0.5", "alphabetic_words", "a1 2", "1 2 c"),
        ("min_stop_words=2", "stop_words", "The end (of) it", "the The word"),
        ("max_duplicate_line_share=0.25", "duplicate_lines", "a\nb\nc\na", "a\nb\na"),
        ("max_duplicate_line_char_share=0.5", "duplicate_lines", "aaa\naaa", "aa\nb\naa\naa"),
        ("max_duplicate_paragraph_share=0.3", "duplicate_paragraphs", "a\n\nb\n\nc\n\na", "a\n\na"),
        ("max_duplicate_paragraph_char_share=0.3", "duplicate_paragraphs", "aa\n\nbbbb\n\naa", "aa\n\nb\n\naa"),
        ("top_ngrams=true", "top_ngram", "a b c d e f g h i j", "a b c a b d e f g h"),
        ("duplicate_ngrams=true", "duplicate_ngram", "a b c d e f g h", "a b c d e x a b c d e"),
        ("languages=en", "language", ENGLISH, "Les habitants de la ville vivent avec la rivière depuis toujours."),
        ("languages=en,fr", "language", "Les habitants de la ville vivent.", "Die Leute aus der Stadt wohnen dort."),
    ],
)  # fmt: skip
def test_each_document_rule(setting: str, name: str, stays: str, goes: str) -> None:
    assert reason(stays, setting) == ""
    assert reason(goes, setting) == name
    assert reason(goes) == ""


def test_blank_documents_go_whatever_the_rules() -> None:
    assert reason(" \n\t") == "empty"


@pytest.mark.slow
def test_an_uncertain_language_goes() -> None:
    assert reason("ok ok ok 12", "languages=en", "min_language_probability=0.99") == "language"


def test_blocked_words_match_whole_words_in_any_case(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("bad word\nass\n")
    assert reason("A Bad Word here", f"blocked_words_file={path}") == "blocked_word"
    assert reason("A class of badwords", f"blocked_words_file={path}") == ""
    path.write_text("\n")
    with pytest.raises(DataError, match="holds no word"):
        reason("x", f"blocked_words_file={path}")


def test_tokens_are_counted_by_the_tokenizer_given(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}
    splitter = {"type": "WhitespaceSplit"}
    tokenizer = {"version": "1.0", "pre_tokenizer": splitter, "model": model, "added_tokens": []}
    path.write_text(json.dumps(tokenizer))
    assert reason("a,b c.d", "min_tokens=3") == ""
    assert reason("a,b c.d", "min_tokens=3", f"tokenizer_file={path}") == "too_few_tokens"
    path.write_text("{}")
    with pytest.raises(DataError, match=r"is no tokenizer\.json"):
        reason("a", "min_tokens=3", f"tokenizer_file={path}")


@pytest.mark.slow
def test_the_openwebtext_preset_is_megatrons_recipe() -> None:
    cleaner = Cleaner(preset("openwebtext"))
    assert cleaner(ENGLISH * 7)[2] == ""
    assert cleaner(ENGLISH * 3)[2] == "too_few_tokens"
    assert cleaner("Les habitants de la ville vivent avec la rivière. " * 20)[2] == "language"


@pytest.mark.slow
def test_c4_and_gopher_keep_running_text_and_drop_what_they_name() -> None:
    line = "In the year {} the people of town {} had to be content with {} loaves."
    prose = "\n".join(line.format(year, year % 7, year * 3) for year in range(1800, 1812))
    text, changes, why, _ = Cleaner(preset("c4"))(prose + "\nHome | About")
    assert (text, changes, why) == (prose, {"line_without_terminal_punctuation": 1}, "")
    assert Cleaner(preset("c4"))("Then write function f() { return; } there.\n" + prose)[2] == "curly_bracket"
    assert Cleaner(preset("gopher"))(PROSE)[2] == ""
    assert Cleaner(preset("gopher"))(ENGLISH * 20)[2] == "top_ngram"


@pytest.mark.slow
def test_wrong_settings_say_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r'did you mean "min_words"'):
        preset("none").replace(["min_wods=3"])
    with pytest.raises(ConfigError, match=r"--set min_words=many: .*integer"):
        preset("none").replace(["min_words=many"])
    with pytest.raises(ConfigError, match=r'--preset \'gofer\' .*did you mean "gopher"'):
        preset("gofer")
    with pytest.raises(ConfigError, match="languages='english' is not known"):
        Cleaner(CleanOptions(languages=("english",)))
    assert preset("openwebtext").replace(["languages=none", "min_tokens=none"]) == CleanOptions(fix_text=True)


def test_every_option_is_described_and_presets_differ_from_nothing() -> None:
    assert all(field.description for field in CleanOptions.model_fields.values())
    assert [name for name, options in PRESETS.items() if options == CleanOptions()] == ["none"]


@pytest.mark.slow
@given(st.text())
def test_lines_are_untouched_without_a_reason(text: str) -> None:
    assert filter_lines(text, {}, repeated=False) == (text, {})


def naive_top(words: list[str], n: int) -> float:
    counts = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    if not counts or max(counts.values()) == 1:
        return 0.0
    most = max(counts.values())
    length = max(sum(map(len, gram)) for gram, count in counts.items() if count == most)
    return most * length / sum(map(len, words))


def naive_duplicate(words: list[str], n: int) -> float:
    seen, covered = set(), set()
    for i in range(len(words) - n + 1):
        gram = tuple(words[i : i + n])
        covered.update(range(i, i + n) if gram in seen else ())
        seen.add(gram)
    return sum(len(words[i]) for i in covered) / max(1, sum(map(len, words)))


@given(st.lists(st.sampled_from(["a", "bb", "ccc", "dé"]), min_size=1, max_size=40), st.integers(1, 6))
def test_ngram_shares_equal_the_plain_count(words: list[str], n: int) -> None:
    document = Document(" ".join(words))
    assert top_ngram_share(document, n) == pytest.approx(naive_top(words, n))
    assert duplicate_ngram_share(document, n) == pytest.approx(naive_duplicate(words, n))


def test_duplicate_shares_by_hand() -> None:
    assert duplicate_shares(["aa", "b", "aa", "aa"]) == (0.5, 4 / 7)
    assert duplicate_shares([]) == (0.0, 0.0)


def test_the_report_counts_changes_of_kept_documents(write_jsonl: Any, run: Any) -> None:
    from mt_data.corpora.cleaning import clean

    path = write_jsonl("a.jsonl", ["One is.\nMenu\nFoot", "Menu", "Two are."])
    total = clean([path], CleanOptions(terminal_punctuation=True), run()).total
    assert (total.kept, total.dropped["empty"].count) == (2, 1)
    assert total.changed["line_without_terminal_punctuation"].count == 2
    assert total.characters_written == len("One is.") + len("Two are.")
