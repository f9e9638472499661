"""Rules that take single lines out of a document; each says of a line whether it goes."""

from __future__ import annotations

import re
from collections.abc import Callable

from mt_data.corpora.clean_options import CleanOptions

_CITATIONS = re.compile(r"\[(?:\d+|edit|citation needed)\]")
_TERMINAL = (".", "!", "?", '"', "'", "\u201d", "\u2019", "\u00bb", "\u3002", "\uff01", "\uff1f", "\u300d", "\u2026")
_POLICIES = re.compile(r"terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies", re.I)

LineRule = Callable[[str], bool]


def remove_citations(text: str) -> tuple[str, int]:
    """The text without the citation marks of Wikipedia, and how many there were. Source: C4."""
    return _CITATIONS.subn("", text)


def no_terminal_punctuation(line: str) -> bool:
    """The line ends otherwise than a sentence; an ellipsis of three dots is no end. Source: C4."""
    return not line.endswith(_TERMINAL) or line.endswith("...")


def mentions_javascript(line: str) -> bool:
    """A line about turning Javascript on. Source: C4."""
    return "javascript" in line.lower()


def mentions_policy(line: str) -> bool:
    """A line of legal boilerplate. Source: C4 (its code; the paper names "privacy policy" and "cookies")."""
    return _POLICIES.search(line) is not None


def line_rules(options: CleanOptions) -> dict[str, LineRule]:
    """The rules that are on, by the name under which removed lines are counted. Sources: C4.

    A line counts under the first rule it breaks.
    """
    rules: dict[str, LineRule] = {}
    if options.terminal_punctuation:
        rules["line_without_terminal_punctuation"] = no_terminal_punctuation
    if (minimum := options.min_words_per_line) is not None:
        rules["line_with_few_words"] = lambda line: len(line.split()) < minimum
    if options.javascript_lines:
        rules["line_about_javascript"] = mentions_javascript
    if options.policy_lines:
        rules["line_about_policies"] = mentions_policy
    return rules


def filter_lines(text: str, rules: dict[str, LineRule], repeated: bool) -> tuple[str, dict[str, int]]:
    """The text without the lines that a rule (or `repeated`: an earlier line of the same text) removes, and counts.

    Blank lines stay, since they separate paragraphs; where nothing is removed the text is unchanged.
    """
    kept, removed, seen = [], dict[str, int](), set[str]()
    for line in text.split("\n"):
        bare = line.strip()
        reason = next((name for name, rule in rules.items() if rule(bare)), None) if bare else None
        if repeated and bare and reason is None:
            reason = "repeated_line" if bare in seen else None
            # Lines that a rule removes do not count as seen.
            seen.add(bare)
        if reason is None:
            kept.append(line)
        else:
            removed[reason] = removed.get(reason, 0) + 1
    return ("\n".join(kept) if removed else text), removed
