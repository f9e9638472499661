"""Imported by the server from which test ranks are forked: brings in, once, the code that runs ask plugins for."""

from __future__ import annotations

from contextlib import suppress

from mt_core.plugins import load_plugins
from mt_core.specs import Lazy


def load_code() -> None:
    """Import what the specs of all installed plugins point to, but for commands; what cannot be imported is left."""
    host = load_plugins()
    for registry in (host.models, host.tokenizers, host.datasets, host.feed_forwards, host.optimizers, host.callbacks):
        for spec in registry:
            for value in vars(spec).values():
                if isinstance(value, Lazy):
                    with suppress(ImportError):
                        value.load()


load_code()
