"""The errors a user of mt can meet, each with one sentence that says what to change.

Every error here is shown without a traceback by the command line; anything else is a defect of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class MtError(Exception):
    """Something the user can put right; the message says what was given, what is allowed, what to change."""

    exit_code = 1


class ConfigError(MtError, ValueError):
    """A configuration that cannot be: an unknown key, a wrong type, values that contradict one another."""

    exit_code = 2


class PluginError(MtError):
    """A plugin that cannot be loaded, or a name that no plugin (or more than one) registers."""

    exit_code = 3


class DataError(MtError):
    """Data that is missing, empty, damaged or of another format than said."""

    exit_code = 4


class CheckpointError(MtError):
    """A checkpoint that is missing, incomplete, damaged or does not fit the model."""

    exit_code = 5


class TrainingError(MtError):
    """Training that must not go on, for instance because the loss is not finite."""

    exit_code = 6


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A trailing ` (did you mean "x"?)`, or nothing when no known word is near to the given one."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f' (did you mean "{near[0]}"?)' if near else ""


class Problems:
    """Errors of checks that do not depend on one another, to be reported all at once."""

    def __init__(self) -> None:
        self.errors: list[MtError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """An MtError of the block is kept, and the next check runs."""
        try:
            yield
        except MtError as error:
            self.errors.append(error)

    def stop_if_any(self) -> None:
        """Raise the only error as it is, or one error with a line for each. Errors of one type keep it; a mixture is a
        ConfigError."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            types = {type(error) for error in self.errors}
            raised = types.pop() if len(types) == 1 else ConfigError
            # dict.fromkeys: several checks may find the same problem.
            raise raised("\n".join(dict.fromkeys(str(error) for error in self.errors)))
