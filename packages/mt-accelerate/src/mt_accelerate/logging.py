"""`get_logger`, as `accelerate.logging` has it."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from mt_core.launch.environment import read_environment


class MainProcessLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs on the main process, the last rank; with main_process_only=False on all."""

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        # From the launcher's variables, since loggers are made before the Accelerator.
        environment = read_environment()
        if not options.pop("main_process_only", True) or environment.rank == environment.world_size - 1:
            super().log(level, msg, *args, **options)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs.pop("in_order", None)
        return msg, kwargs


def get_logger(name: str, log_level: str | None = None) -> MainProcessLogger:
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return MainProcessLogger(logger, {})
