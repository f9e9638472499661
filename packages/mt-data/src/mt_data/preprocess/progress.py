"""The progress of a run, as it is shown."""

from __future__ import annotations

from typing import Protocol

from mt_data.preprocess.options import Counts


class Progress(Protocol):
    """Called from the thread that runs `preprocess`. `rich_progress` draws it; `SilentProgress` does nothing."""

    def note(self, text: str) -> None:
        """A sentence for the user, such as which part of the corpus is done."""
        ...

    def begin(self, total_bytes: int) -> None:
        """The plan is made: this many bytes of input are to be worked through."""
        ...

    def advance(self, counts: Counts, reused: bool) -> None:
        """A shard is done, or (reused) was done by an earlier run."""
        ...

    def join(self, shards: int) -> None:
        """All shards are done and are now joined into the outputs."""
        ...


class SilentProgress:
    """Watches without a word."""

    def note(self, text: str) -> None: ...

    def begin(self, total_bytes: int) -> None: ...

    def advance(self, counts: Counts, reused: bool) -> None: ...

    def join(self, shards: int) -> None: ...
