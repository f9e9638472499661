"""What Python's logging warns of while a run is built and trains, for log.txt beside the terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType


class LoggedWarnings(logging.Handler):
    """A context in which `receive` gets the text of every record of the level WARNING and above, of all loggers. The
    terminal shows it as it does without."""

    def __init__(self, receive: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._receive = receive

    def __enter__(self) -> LoggedWarnings:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._receive(self.format(record))
        if logging.lastResort is not None and self._replaces_last_resort():
            logging.lastResort.handle(record)

    def _replaces_last_resort(self) -> bool:
        """Whether logging would print the record to stderr by itself, were it not for such contexts: of several, the
        first does it for all."""
        handlers = logging.getLogger().handlers
        return handlers[0] is self and all(isinstance(handler, LoggedWarnings) for handler in handlers)
