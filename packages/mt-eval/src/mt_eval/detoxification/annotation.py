"""The scores of generated texts, in a file beside them. Killed, the same call goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from mt_core.errors import DataError
from mt_core.paths import writing
from mt_core.specs import TextScorer
from mt_infer.batch_files import whole_lines

COMPLETIONS, TEXT, SCORES, SCORER = "completions", "text", "scores", "scorer"
Line = dict[str, Any]
"""Of a file of `mt generate --output`: a prompt and its completions, each with a text."""


def annotate(
    source: Path,
    target: Path,
    scorer: TextScorer,
    described: Mapping[str, Any],
    *,
    batch: int = 32,
    on_line: Callable[[int], None] = lambda done: None,
) -> None:
    """Copies the lines of `source`, with `scores` (attribute -> score, or null) in each completion.

    described: the scorer and its options, JSON values; a line has them under `scorer`. batch: lines whose texts are
    scored together. Raises DataError for a source that `mt generate` did not write, and for a target with scores of
    other texts or of another scorer.
    """
    # The last line may be unfinished: what is behind the last line break is cut off below.
    done, size = whole_lines(target)
    _require_same(source, target, done, described)
    on_line(done)
    with writing(target, "--output"), target.open("a", encoding="utf-8") as out:
        out.truncate(size)
        left = islice(read_lines(source), done, None)
        while lines := list(islice(left, batch)):
            _add_scores(lines, scorer)
            out.writelines(json.dumps({**line, SCORER: described}, ensure_ascii=False) + "\n" for line in lines)
            # A killed run keeps the batches before the one that was being scored.
            out.flush()
            done += len(lines)
            on_line(done)


def _require_same(source: Path, target: Path, done: int, described: Mapping[str, Any]) -> None:
    """Raises DataError unless the `done` lines of the target are those of the source, with scores of this scorer."""
    if not done:
        if target.exists() and target.stat().st_size:
            raise DataError(f"{target} has no whole line with scores; give another --output, or remove it")
        return
    none: Line = {}
    # Both files are compared from the start: text that was generated anew under the same name must not keep old scores.
    for line, judged in zip_longest(islice(read_lines(source), done), islice(read_lines(target), done), fillvalue=none):
        if judged.get(SCORER) != described:
            found = f"another scorer than {dict(described)}"
        elif _texts(line) != _texts(judged):
            found = f"other texts than those of {source}"
        else:
            continue
        raise DataError(f"{target} has scores of {found}; give another --output, or remove it")


def _texts(line: Line) -> list[str]:
    return [completion[TEXT] for completion in line.get(COMPLETIONS, [])]


def read_lines(path: Path) -> Iterator[Line]:
    """Raises DataError for a file that has no completions."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                yield _parsed(path, number, text)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _parsed(path: Path, number: int, text: str) -> Line:
    try:
        line = json.loads(text)
        if all(isinstance(completion[TEXT], str) for completion in line.get(COMPLETIONS, [])):
            return dict(line)
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise DataError(f'{path}, line {number}: no line of mt generate --output, which has "completions" with a "text"')


def _add_scores(lines: Sequence[Line], scorer: TextScorer) -> None:
    completions = [completion for line in lines for completion in line.get(COMPLETIONS, [])]
    # A text without a word cannot be judged.
    judged = [completion for completion in completions if completion[TEXT].strip()]
    for completion in completions:
        completion[SCORES] = None
    for completion, scores in zip(judged, scorer.scores([one[TEXT] for one in judged]), strict=True):
        completion[SCORES] = None if scores is None else dict(scores)
