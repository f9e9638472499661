"""rollouts.jsonl of a run directory: each completion that was trained on, with its rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from mt_core.errors import DataError
from mt_tune.rl.rollout import Group

ROLLOUTS_FILE = "rollouts.jsonl"


def write_rollouts(
    path: Path, step: int, groups: Sequence[Group], advantages: Sequence[float], hashes: Mapping[int, str]
) -> None:
    """Appends a line for each completion. advantages: of each completion, the mean over its tokens. hashes: of the
    weights of a version, where a copy of them generated."""
    each = iter(advantages)
    with path.open("a", encoding="utf-8") as file:
        for group in groups:
            for number, rollout in enumerate(group.rollouts):
                line = {
                    "step": step,
                    "prompt_number": group.position,
                    "completion_number": number,
                    "prompt": group.prompt.content,
                    "completion": rollout.text,
                    "reward": rollout.reward,
                    "rewards": rollout.rewards,
                    "advantage": next(each),
                    "tokens": rollout.length,
                    "finish": rollout.finish,
                    "versions": [min(rollout.versions), max(rollout.versions)],
                    "token_versions": [[version, len(list(same))] for version, same in groupby(rollout.versions)],
                    "weights": {version: hashes[version] for version in {*rollout.versions} & hashes.keys()},
                    "source": group.prompt.where,
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_rollouts(path: Path) -> list[Mapping[str, Any]]:
    """The lines of the file in the order of steps. A run that was resumed has drawn some again: the last one counts.

    Raises DataError for a file that is missing or damaged; a last line that is still being written is left out.
    """
    latest = {(line["step"], line["prompt_number"], line["completion_number"]): line for line in _lines(path)}
    return [latest[key] for key in sorted(latest)]


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        texts = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); a run of mt tune grpo writes it, with rl.write_rollouts=true"
        ) from error
    for number, text in enumerate(texts, 1):
        if not text.endswith("\n"):
            return
        try:
            yield json.loads(text)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is no JSON: {error}") from error
