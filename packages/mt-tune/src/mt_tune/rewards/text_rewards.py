"""Registered rewards of a completion's text and length. Patterns that take for ever end with the process's deadline."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mt_core.errors import ConfigError
from mt_tune.rewards.base import text_of
from mt_tune.rewards.options import column, read_options
from mt_tune.rewards.reward_specs import RewardFunction

# -- patterns ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegexOptions:
    """pattern: of Python's re, in which "." is any character. full: all of the completion has to match, not a part.
    reward, penalty: of a completion that matches, and of one that does not."""

    pattern: str
    full: bool = False
    reward: float = 1.0
    penalty: float = 0.0


def build_regex(options: Mapping[str, Any]) -> RewardFunction:
    keys = read_options(RegexOptions, "regex", options)
    pattern = _compiled("regex", keys.pattern)
    match = pattern.fullmatch if keys.full else pattern.search

    def judge(completions: Sequence[Any], **columns: Any) -> list[float]:
        return [keys.reward if match(text_of(completion)) else keys.penalty for completion in completions]

    return judge


@dataclass(frozen=True)
class ExactMatchOptions:
    """column: of the right answers. pattern: the last match in the completion is its answer, or its first group;
    without one the whole completion. ignore_case, ignore: characters that do not count, such as "," in numbers."""

    column: str = "answer"
    pattern: str | None = None
    ignore_case: bool = False
    ignore: str = ""


def build_exact_match(options: Mapping[str, Any]) -> RewardFunction:
    """1 where the answer is the right one, 0 where it is another or there is none. Answers are compared as texts,
    without white space at their ends."""
    keys = read_options(ExactMatchOptions, "exact_match", options)
    pattern = None if keys.pattern is None else _compiled("exact_match", keys.pattern)
    unread = str.maketrans("", "", keys.ignore)

    def normal(text: str) -> str:
        text = text.translate(unread).strip()
        return text.casefold() if keys.ignore_case else text

    def answer(text: str) -> str | None:
        if pattern is None:
            return normal(text)
        matches = [*pattern.finditer(text)]
        return normal(matches[-1][1 if pattern.groups else 0] or "") if matches else None

    def judge(completions: Sequence[Any], **columns: Any) -> list[float]:
        right = column(columns, keys.column, "exact_match")
        pairs = zip(completions, right, strict=True)
        return [float(answer(text_of(completion)) == normal(str(wanted))) for completion, wanted in pairs]

    return judge


def _compiled(reward: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"rewards.options.{reward}.pattern={pattern!r} is no regular expression: {error}") from error


@dataclass(frozen=True)
class NoOptions:
    """A reward without options."""


OPEN, CLOSE = "<think>", "</think>"


def build_think_format(options: Mapping[str, Any]) -> RewardFunction:
    """1 for a completion that begins with <think>, has it once and closes it; 0 otherwise (TRL's
    think_format_reward)."""
    read_options(NoOptions, "think_format", options)

    def judge(completions: Sequence[Any], **columns: Any) -> list[float]:
        texts = map(text_of, completions)
        return [float(text.startswith(OPEN) and text.count(OPEN) == 1 and CLOSE in text) for text in texts]

    return judge


# -- lengths and repetitions, in tokens --------------------------------------------------------------


@dataclass(frozen=True)
class OverlongOptions:
    """max_length: L, tokens of a completion. cache: C, the length before it in which the penalty grows."""

    max_length: int
    cache: int


def build_overlong(options: Mapping[str, Any]) -> RewardFunction:
    """The soft penalty of DAPO (arXiv 2503.14476, equation 13): 0 up to L - C tokens, then falling to -1 at L tokens,
    and -1 beyond."""
    keys = read_options(OverlongOptions, "overlong", options)
    if not 0 < keys.cache <= keys.max_length:
        raise ConfigError(f"rewards.options.overlong.cache={keys.cache} must be from 1 to max_length={keys.max_length}")

    def judge(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        excess = [len(ids) - (keys.max_length - keys.cache) for ids in completion_ids]
        return [-min(max(tokens / keys.cache, 0.0), 1.0) for tokens in excess]

    return judge


@dataclass(frozen=True)
class RepetitionOptions:
    """ngram_size: tokens of an n-gram. max_penalty: the limit for a completion that repeats one n-gram alone."""

    ngram_size: int = 3
    max_penalty: float = -1.0


def build_repetition(options: Mapping[str, Any]) -> RewardFunction:
    """max_penalty times the share of a completion's n-grams that are repetitions (arXiv 2502.03373, appendix C.2)."""
    keys = read_options(RepetitionOptions, "repetition", options)
    if keys.max_penalty > 0 or keys.ngram_size < 1:
        raise ConfigError("rewards.options.repetition: max_penalty is at most 0, ngram_size at least 1")

    def penalty(ids: Sequence[int]) -> float:
        ngrams = [tuple(ids[start : start + keys.ngram_size]) for start in range(len(ids) - keys.ngram_size + 1)]
        return keys.max_penalty * (1 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0

    def judge(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [penalty(ids) for ids in completion_ids]

    return judge
