"""What `mt convert` requests of a GGUF file beside the options of all formats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GGUFOptions(ConvertOptions):
    """importance_matrix: a file of llama.cpp, by which the errors of quantized weights are weighed."""

    importance_matrix: Path | None = None


def options_for(saver: str, importance_matrix: Path | None, **options: Any) -> ConvertOptions:
    """Raises ConfigError for an importance matrix with another format."""
    if importance_matrix is None:
        return ConvertOptions(**options)
    if saver != "gguf":
        raise ConfigError(f"--imatrix {importance_matrix} means nothing to the format {saver}; leave it out")
    return GGUFOptions(importance_matrix=importance_matrix, **options)
