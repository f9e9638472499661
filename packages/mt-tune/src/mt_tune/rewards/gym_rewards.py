"""The registered reward of reasoning-gym's tasks (pip install reasoning-gym)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mt_core.errors import ConfigError, DataError
from mt_tune.rewards.base import text_of
from mt_tune.rewards.options import column, read_options
from mt_tune.rewards.reward_specs import RewardFunction

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class GymOptions:
    """tagged: the answer stands in the last <answer>...</answer>, and a completion without one has no answer; false:
    the whole completion is the answer."""

    tagged: bool = True


def build_reasoning_gym(options: Mapping[str, Any]) -> RewardFunction:
    """The score from 0 to 1 that a row's task gives the answer. Rows are reasoning-gym's items: the columns question,
    answer and metadata (an object or its JSON), which names the task (source_dataset)."""
    keys = read_options(GymOptions, "reasoning_gym", options)
    try:
        from reasoning_gym.factory import get_score_answer_fn
    except ImportError as error:
        raise ConfigError("the reward reasoning_gym needs the package: pip install reasoning-gym") from error

    def answer_of(text: str) -> str | None:
        answers = ANSWER.findall(text)
        return (answers[-1].strip() if answers else None) if keys.tagged else text.strip()

    def judge(completions: Sequence[Any], **columns: Any) -> list[float]:
        names = ("question", "answer", "metadata")
        entries = zip(*(column(columns, name, "reasoning_gym") for name in names), strict=True)
        scores = []
        for completion, values in zip(completions, entries, strict=True):
            entry = entry_of(dict(zip(names, values, strict=True)))
            score = get_score_answer_fn(entry["metadata"]["source_dataset"])
            scores.append(float(score(answer_of(text_of(completion)), entry)))
        return scores

    return judge


def entry_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """An item of reasoning-gym from a row. Raises DataError for metadata that name no task."""
    metadata = json.loads(row["metadata"]) if isinstance(row["metadata"], str) else row["metadata"]
    if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
        raise DataError('the column metadata has no "source_dataset", which names the task of reasoning-gym')
    return {"question": row["question"], "answer": row["answer"], "metadata": metadata}
