"""`accelerate.utils.operations`, from which programs import names of `accelerate.utils`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """As of `mt_accelerate.utils`, which refuses with the reason what mt does not have."""
    if name.startswith("__"):
        raise AttributeError(name)
    import mt_accelerate.utils

    return getattr(mt_accelerate.utils, name)
