"""The layer that is counted: Llama 3 8B's."""

from __future__ import annotations

LENGTH, HIDDEN, FFN, HEADS, GROUPS = 8192, 4096, 14336, 32, 8
