"""The error report when ranks fail: the first failure, then the ranks that ended because of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from mt_core.launch.failure import Failure


def in_order(failures: Iterable[Failure]) -> list[Failure]:
    """The cause first. Failures that followed another are sorted last: clocks of different hosts are not comparable."""
    known = {failure.rank: failure for failure in failures}
    for failure in list(known.values()):
        if failure.cause is not None:  # announced by a rank of another node, whose record may not be available here
            cause = Failure.from_dict(failure.cause)
            known.setdefault(cause.rank, cause)
    return sorted(known.values(), key=lambda failure: (failure.followed, failure.time))


def report(failures: Iterable[Failure], ended: Collection[int] = ()) -> str:
    """Text for the terminal. ended: ranks that had not failed and were ended by the launcher."""
    first, *others = in_order(failures)
    paragraphs = [f"{first.where} failed first:\n\n{_what(first)}"]
    paragraphs += [_stack(other) for other in others if other.rank in first.late and other.traceback]
    paragraphs.append("\n".join(_rest(first, others, ended)))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def _what(failure: Failure) -> str:
    """The message of an MtError; any other exception with its traceback."""
    if failure.expected or not failure.traceback:
        return f"{failure.exception}: {failure.message}"
    return failure.traceback.rstrip()


def _stack(failure: Failure) -> str:
    return f"The late {failure.where} was here:\n\n{failure.traceback.rstrip()}"


def _rest(first: Failure, others: Sequence[Failure], ended: Collection[int]) -> list[str]:
    """One line for each way in which other ranks ended."""
    groups: dict[str, list[int]] = {}
    for other in others:
        groups.setdefault(_how(first, other), []).append(other.rank)
    lines = [f"{ranks(numbers)} {how}." for how, numbers in groups.items()]
    return lines + (
        [f"{ranks(ended)} had not failed and {'was' if len(ended) == 1 else 'were'} ended."] if ended else []
    )


def _how(first: Failure, other: Failure) -> str:
    if other.followed:
        return "followed"
    if (other.exception, other.message) == (first.exception, first.message):
        return "failed with the same error"
    return f"failed later with {other.exception}: {other.message.splitlines()[0] if other.message else 'no message'}"


def ranks(numbers: Collection[int]) -> str:
    """ "Rank 1", "Ranks 0, 2-5 and 9"."""
    ordered = sorted(numbers)
    spans: list[list[int]] = []
    for number in ordered:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    shown = [part for span in spans for part in _span(span)]
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"Rank{'' if len(ordered) == 1 else 's'} {text}"


def _span(span: list[int]) -> list[str]:
    return [str(number) for number in span] if len(span) < 3 else [f"{span[0]}-{span[-1]}"]


def followed_by(failure: Failure, cause: Failure, **changes: object) -> Failure:
    """The record of a rank that ended because of another's failure, which it carries along."""
    carried = dataclasses.asdict(dataclasses.replace(cause, cause=None))
    return dataclasses.replace(failure, followed=True, cause=carried, exit_code=cause.exit_code, **changes)  # type: ignore[arg-type]
