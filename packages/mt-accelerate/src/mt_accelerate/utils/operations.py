"""`accelerate.utils.operations`, from which programs import names of `accelerate.utils`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Give the names of `mt_accelerate.utils`; those that mt does not have raise RefusedNameError with the reason."""
    if name.startswith("__"):
        raise AttributeError(name)
    import mt_accelerate.utils

    return getattr(mt_accelerate.utils, name)
