"""Scripts written for Accelerate, on mt: the same names."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import lazy_loader

_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Names that mt does not have raise RefusedNameError with the reason."""
    if name in __all__:
        return _attribute(name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    from mt_accelerate.refused_names import available, refuse_name

    return available(name) or refuse_name("accelerate", name)
