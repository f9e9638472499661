"""Imported by the server from which test ranks are forked: does, once, what each of them would do."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import suppress
from typing import Any

from pydantic import BaseModel

from mt_core._huge_pages import move_to_huge_pages
from mt_core.config.schema import CORE_SECTIONS
from mt_core.kinds import Lazy
from mt_core.plugins import load_plugins


def load_code() -> None:
    """Import what the specs of all installed plugins point to, but for commands; what cannot be imported is left."""
    host = load_plugins()
    for kind in host.kinds.keys() - {"commands"}:
        for spec in host.registry(kind):
            for value in vars(spec).values():
                if isinstance(value, Lazy):
                    with suppress(ImportError):
                        complete(value.load())


def complete(loaded: Any) -> None:
    """Build the validator of a type of configuration, which pydantic defers until the first value."""
    if isinstance(loaded, type) and issubclass(loaded, BaseModel):
        loaded.model_rebuild()


def end() -> None:
    """End the server without taking down its modules: Triton's, which torch imports, would write a list of leaks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


atexit.register(end)
load_code()
for section in CORE_SECTIONS.values():
    complete(section)
# The garbage collector of a rank goes over its own objects only: not over all of torch's, whose pages it would copy.
gc.collect()
gc.freeze()
move_to_huge_pages()
