"""Heads have no presets: use those of the base model, with model.family set to the head's."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {}
