"""`accelerate.data_loader`: names that programs import from it."""

from __future__ import annotations

from typing import Any

from mt_accelerate.megatron_lm.data_loaders import skip_first_batches
from mt_accelerate.refused_names import refuse_name
from mt_accelerate.without_plugin.loaders import PreparedLoader

__all__ = ["DataLoaderDispatcher", "DataLoaderShard", "skip_first_batches"]

# Each rank reads its own samples; the ones that a dispatcher would send it are the same.
DataLoaderShard = DataLoaderDispatcher = PreparedLoader


def __getattr__(name: str) -> Any:
    """Names that mt does not have raise RefusedNameError with the reason."""
    return refuse_name("accelerate.data_loader", name)
