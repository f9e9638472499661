"""Which scores of attention are counted as FLOPs."""

from typing import Literal

Convention = Literal["full", "seen"]
"""Which scores count. full: all S x S, as a kernel that ignores the mask computes them (the convention of
PaLM's MFU). seen: those of the keys that causality and windows let a query see."""
