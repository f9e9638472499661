"""Regular expressions that cut text into the pieces within which byte pairs are merged.

Each is the published one of its tokenizer; ids agree only if this does. `ENGINE_PATTERNS` cut the same pieces in
less time.
"""

from __future__ import annotations

from typing import Literal

PatternName = Literal["v1", "v2", "gpt2", "cl100k", "o200k"]

_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+%s|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*%s"
_SYMBOLS_AND_LINE_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
_V2 = rf"{_CASED % ('', '')}|\p{{N}}|{_SYMBOLS_AND_LINE_ENDS}"
_O200K = rf"{_CASED % (_CONTRACTION, _CONTRACTION)}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_LINE_ENDS}"
# Takes a run of white space but for its last character, which the alternative of the next word (` ?...`) takes:
# "a   b" becomes "a", "  ", " b".
_SPACES = r"\s+(?!\S)"

PATTERNS: dict[PatternName, str] = {
    "v1": rf"[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}|\s+",
    "v2": rf"{_V2}|{_SPACES}|\s+",
    "gpt2": rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}++| ?\p{{N}}++| ?[^\s\p{{L}}\p{{N}}]++|\s++$|{_SPACES}|\s",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    rf"|\s++$|\s*[\r\n]|{_SPACES}|\s",
    "o200k": rf"{_O200K}|{_SPACES}|\s+",
}
"""As published: v1 and v2 by Megatron, gpt2, cl100k and o200k by OpenAI."""

# tiktoken's matcher backtracks over alternatives one by one, but runs a group without look-ahead and possessive
# quantifiers as one automaton. `\z` is `$` where that would mean the end of a line, as in Oniguruma.
ENGINE_PATTERNS: dict[PatternName, str] = {
    "v1": rf"(?:[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n])|{_SPACES}|\s+",
    "v2": rf"(?:{_V2})|{_SPACES}|\s+",
    "gpt2": rf"(?:'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+\z)|{_SPACES}|\s",
    "cl100k": r"(?:'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    rf"|\s+\z|\s*[\r\n])|{_SPACES}|\s",
    "o200k": rf"(?:{_O200K})|{_SPACES}|\s+",
}
"""The same pieces in less time, for tiktoken's regular expressions and for Oniguruma."""
