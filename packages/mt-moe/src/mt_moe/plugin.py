"""What mt-moe registers: in this version only its word on configurations that ask for experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_core.errors import ConfigError
from mt_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from mt_core.config.schema import Config


@hookimpl
def mt_check_config(config: Config) -> None:
    """Refuse `model.moe` before anything is built: no feed-forward named "moe" would be found."""
    if getattr(config.model, "moe", None) is None:
        return
    from importlib.metadata import version

    raise ConfigError(f"model.moe: mt-moe {version('mt-moe')} brings no mixture-of-experts layer; remove model.moe")
