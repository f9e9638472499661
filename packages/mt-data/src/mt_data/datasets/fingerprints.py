"""Fingerprints of what data sets are made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any


def combined(parts: Sequence[Any]) -> str:
    """SHA-256 (hexadecimal) over JSON values, in their order."""
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
