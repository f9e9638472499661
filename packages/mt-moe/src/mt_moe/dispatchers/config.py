"""Options of dispatchers. Imports no torch."""

from __future__ import annotations

from mt_core.config.schema import Section


class NoOptions(Section):
    """Of dispatchers that have nothing to choose."""
