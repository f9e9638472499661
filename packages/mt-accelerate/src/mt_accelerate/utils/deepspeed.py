"""Names that scripts import from `accelerate.utils.deepspeed` and use only with DeepSpeed."""

from __future__ import annotations

from typing import Any

from mt_accelerate.refused_names import DEEPSPEED
from mt_core.errors import ConfigError


class DummyOptim:
    """Raises ConfigError when it is made."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise ConfigError(f"{type(self).__name__} is DeepSpeed's: {DEEPSPEED}")


class DummyScheduler(DummyOptim):
    """Raises ConfigError when it is made."""
