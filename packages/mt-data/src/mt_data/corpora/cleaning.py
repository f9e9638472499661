"""`mt data clean`: repair texts, take bad lines out, drop bad documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import DataError
from mt_data.corpora.clean_options import CleanOptions
from mt_data.corpora.report import CorpusReport
from mt_data.corpora.requires import require, versions
from mt_data.corpora.rules import (
    DOCUMENT_RULES,
    REPETITION_RULES,
    Document,
    LanguageRule,
    Rule,
    filter_lines,
    line_rules,
    remove_citations,
)
from mt_data.corpora.running import RunOptions, Verdict, batch_filter, drop, run_locked_filter
from mt_data.corpora.state import source_identity
from mt_data.corpora.streaming import Reading, RunBatch, opened
from mt_data.preprocess.readers import Record, expand_globs

_PIECES = re.compile(r"'(?:s|t|re|ve|m|ll|d)|[^\W\d_]+|\d+|(?:[^\w\s]|_)+")


def clean(inputs: Iterable[str | Path], options: CleanOptions, run: RunOptions) -> CorpusReport:
    """Clean the documents of the input files (globs) into `run.output`, a file each.

    Raises DataError for unusable input, ConfigError for options that cannot be.
    """
    sources = expand_globs(inputs)
    task = CleanTask(options, run.reading)
    # Builds the rules in this process before any file is read: a missing package or word list ends the command at once.
    opened(task)
    return run_locked_filter("clean", task, sources, run)


@dataclass(frozen=True)
class CleanTask:
    """The work of `clean` on a batch."""

    options: CleanOptions
    reading: Reading

    def identity(self) -> dict[str, Any]:
        files = {name: getattr(self.options, name) for name in ("tokenizer_file", "blocked_words_file")}
        return {
            "command": "clean",
            **asdict(self.reading),
            # Thresholds, plus the content of the files that rules read and the versions of the packages that decide
            # them.
            **self.options.model_dump(mode="json"),
            "files": [source_identity(file, f"{name}=") for name, file in files.items() if file],
            "versions": versions("mt-data", "ftfy", "py3langid"),
        }

    def open(self) -> RunBatch:
        cleaner = Cleaner(self.options)
        key = self.reading.key

        def judge(record: Record, ordinal: int) -> Verdict:
            text, changes, reason, detail = cleaner(record.value[key])
            return drop(reason, detail) if reason else Verdict(({**record.value, key: text},), changes=changes)

        return batch_filter(judge, key)


class Cleaner:
    """Cleans one text at a time: text repair, then the line rules, then the document rules, in a fixed order."""

    def __init__(self, options: CleanOptions) -> None:
        self.options = options
        self.fix_text: Callable[[str], str] | None = require("ftfy").fix_text if options.fix_text else None
        self.line_rules = line_rules(options)
        self.rules = document_rules(options)

    def __call__(self, text: str) -> tuple[str, dict[str, int], str, str]:
        """(text, changes, reason, detail); reason is "" when the document stays."""
        text, changes = self.repair(text)
        if not text.strip():
            return text, changes, "empty", ""
        document = Document(text)
        for name, rule in self.rules.items():
            if (detail := rule(document, self.options)) is not None:
                return text, changes, name, detail
        return text, changes, "", ""

    def repair(self, text: str) -> tuple[str, dict[str, int]]:
        """The text with what can be mended mended, and how often what was changed."""
        changes: dict[str, int] = {}
        if self.fix_text is not None and (fixed := self.fix_text(text)) != text:
            text, changes["fixed_text"] = fixed, 1
        if self.options.remove_citations:
            text, count = remove_citations(text)
            changes |= {"removed_citation": count} if count else {}
        text, removed = filter_lines(text, self.line_rules, self.options.repeated_lines)
        return text, changes | removed


def document_rules(options: CleanOptions) -> dict[str, Rule]:
    """All document rules by name, cheap ones first; the first that finds something gives the reason."""
    rules = {rule.__name__: rule for rule in DOCUMENT_RULES}
    if options.blocked_words_file is not None:
        rules["blocked_word"] = blocked_word_rule(options.blocked_words_file)
    if options.min_tokens is not None:
        rules["too_few_tokens"] = too_few_tokens_rule(options.tokenizer_file)
    if options.languages:
        rules["language"] = LanguageRule(options)
    # The n-gram rules last: they hash every word of the document.
    return rules | {rule.__name__: rule for rule in REPETITION_RULES}


def blocked_word_rule(path: Path) -> Rule:
    """A rule that finds the words and phrases of a file, one a line, as whole words in any case. Source: C4."""
    try:
        words = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"blocked_words_file={path} cannot be read: {error}") from error
    if not words:
        raise DataError(f"blocked_words_file={path} holds no word; leave the option out, or name another file")
    # Lookarounds in place of \b, which would fail at entries that begin or end with a mark.
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)", re.IGNORECASE)

    def blocked_word(document: Document, options: CleanOptions) -> str | None:
        match = pattern.search(document.text)
        return match.group() if match else None

    return blocked_word


def too_few_tokens_rule(tokenizer_file: Path | None) -> Rule:
    """A rule that counts tokens. Source: the OpenWebText recipe, which drops documents under 128 tokens of GPT-2.

    Without a tokenizer the pieces that GPT-2 splits text into before its merges are counted, blanks left out;
    each gives one token or more, so the count is a lower bound of GPT-2's.
    """
    count = _tokenizer_count(tokenizer_file) if tokenizer_file else lambda text: len(_PIECES.findall(text))

    def too_few_tokens(document: Document, options: CleanOptions) -> str | None:
        tokens, minimum = count(document.text), options.min_tokens or 0
        return f"{tokens} tokens, minimum {minimum}" if tokens < minimum else None

    return too_few_tokens


def _tokenizer_count(path: Path) -> Callable[[str], int]:
    if not path.is_file():
        raise DataError(f"tokenizer_file={path} does not exist; name a tokenizer.json")
    try:
        tokenizer = require("tokenizers").Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"tokenizer_file={path} is no tokenizer.json: {error}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
