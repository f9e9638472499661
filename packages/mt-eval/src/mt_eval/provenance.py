"""What produced a result: the checkpoint, the versions, the layout."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mt_ckpt.contents import checkpoint_fingerprint
from mt_core.checkpoint_lookup import find_checkpoint
from mt_core.config.schema import Config
from mt_core.versions import installed_versions

PACKAGES = ("mt-core", "mt-models", "mt-data", "mt-ckpt", "mt-infer", "mt-eval", "torch", "transformers", "lm-eval")


def describe_model(path: str | Path, config: Config) -> dict[str, Any]:
    """What decides the numbers: the checkpoint by its content, the tokenizer, layout and precision."""
    # A run directory means its newest checkpoint, which may be another one tomorrow: the path and the hash of that one
    # are kept.
    checkpoint = find_checkpoint(path)
    return {
        "checkpoint": str(checkpoint),
        "checkpoint_hash": checkpoint_fingerprint(checkpoint),
        "family": config.model.family,
        "tokenizer": config.tokenizer.tokenizer_type,
        "layout": config.parallel.model_dump(mode="json", exclude_defaults=True),
        "precision": config.precision.dtype,
        "inference": config.inference.model_dump(mode="json", exclude_defaults=True),
    }


def describe_run(device: str) -> dict[str, Any]:
    """Versions of packages, the machine, the time."""
    return {
        "versions": installed_versions(PACKAGES),
        "python": platform.python_version(),
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
