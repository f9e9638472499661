"""Registered rewards that compare mathematical answers by math-verify (pip install "mt-tune[rewards]").

math-verify ends expressions that take too long by SIGALRM, which needs the main thread: worker processes call functions
there.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mt_core.errors import ConfigError
from mt_tune.rewards.base import text_of
from mt_tune.rewards.options import column, read_options
from mt_tune.rewards.reward_specs import RewardFunction

PARSE_SECONDS, VERIFY_SECONDS = 10, 5
"""Limits of one expression, and of one comparison."""


@dataclass(frozen=True)
class AccuracyOptions:
    """column: of the right answers. after: a text such as "</think>", behind whose last place the answer stands; a
    completion without it has the reward 0. numbers: answers may be plain numbers too, without LaTeX around them."""

    column: str = "solution"
    after: str | None = None
    numbers: bool = False


def build_accuracy(options: Mapping[str, Any]) -> RewardFunction:
    """1 where the answer has the value of the right one, 0 where it has another or cannot be read, None where the right
    one cannot be read (as TRL's accuracy_reward and, with `after`, reasoning_accuracy_reward)."""
    keys = read_options(AccuracyOptions, "accuracy", options)
    is_right = _comparison(keys.numbers)

    def judge(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        right = column(columns, keys.column, "accuracy")
        pairs = zip(completions, right, strict=True)
        answers = [(answer_behind(text_of(completion), keys.after), str(wanted)) for completion, wanted in pairs]
        return [0.0 if answer is None else is_right(answer, wanted) for answer, wanted in answers]

    return judge


@dataclass(frozen=True)
class CosineOptions:
    """max_length: tokens at which the reward reaches its value for long completions. The values: at the shortest and at
    max_length."""

    max_length: int
    column: str = "solution"
    shortest_right: float = 1.0
    longest_right: float = 0.5
    shortest_wrong: float = -1.0
    longest_wrong: float = -0.5


def build_cosine(options: Mapping[str, Any]) -> RewardFunction:
    """Accuracy by length (arXiv 2502.03373, appendix C.1): half a cosine from the value of the shortest completion to
    that of the longest, one for right answers and one for wrong ones."""
    keys = read_options(CosineOptions, "cosine_accuracy", options)
    if keys.max_length < 1:
        raise ConfigError(f"rewards.options.cosine_accuracy.max_length={keys.max_length} must be at least 1")
    accuracy = build_accuracy({"column": keys.column})

    def value(right: float | None, length: int) -> float | None:
        if right is None:
            return None
        ends = (keys.shortest_right, keys.longest_right) if right else (keys.shortest_wrong, keys.longest_wrong)
        share = (1 + math.cos(math.pi * min(length / keys.max_length, 1.0))) / 2
        return ends[1] + share * (ends[0] - ends[1])

    def judge(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any) -> Any:
        right = accuracy(completions=completions, **columns)
        return [value(is_right, len(ids)) for is_right, ids in zip(right, completion_ids, strict=True)]

    return judge


def answer_behind(text: str, after: str | None) -> str | None:
    """The text behind the last mark; None where there is no mark."""
    if after is None:
        return text
    _, mark, behind = text.rpartition(after)
    return behind if mark else None


def _comparison(numbers: bool) -> Callable[[str, str], float | None]:
    """A function of (answer, right answer) by math-verify."""
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ConfigError('the reward accuracy needs math-verify: pip install "mt-tune[rewards]"') from error
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,  # the box before any other expression
        try_extract_without_anchor=False,
    )
    forms = [latex, ExprExtractionConfig()] if numbers else [latex]

    def is_right(answer: str, right: str) -> float | None:
        parse_seconds, verify_seconds = _limits()
        gold = parse(right, parsing_timeout=parse_seconds)
        if not gold:
            return None
        read = parse(answer, extraction_config=forms, extraction_mode="first_match", parsing_timeout=parse_seconds)
        # The right answer first: the comparison is not symmetric.
        return float(verify(gold, read, timeout_seconds=verify_seconds))

    return is_right


def _limits() -> tuple[int | None, int | None]:
    """Seconds; none outside of the main thread, where SIGALRM cannot be used."""
    if threading.current_thread() is threading.main_thread():
        return PARSE_SECONDS, VERIFY_SECONDS
    for name in ("parser", "grader"):
        logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)
    return None, None
