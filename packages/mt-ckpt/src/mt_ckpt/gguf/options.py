"""What `mt convert` requests of a GGUF file beside the options of all formats."""

from __future__ import annotations

from dataclasses import dataclass

from mt_core.checkpoint_specs import ConvertOptions


@dataclass(frozen=True, kw_only=True)
class GGUFOptions(ConvertOptions):
    """importance_matrix: a file of llama.cpp, by which the errors of quantized weights are weighed."""

    importance_matrix: str | None = None
