"""Objects of a program whose state is saved with the model's (`Accelerator.register_for_checkpointing`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mt_core.errors import CheckpointError, ConfigError


def file_of(folder: str | Path, number: int) -> Path:
    """Under Accelerate's name."""
    return Path(folder) / f"custom_checkpoint_{number}.pkl"


def require_states(objects: Sequence[Any]) -> None:
    """Raises ConfigError for objects without state_dict and load_state_dict."""
    without = [
        type(one).__name__ for one in objects if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))
    ]
    if without:
        raise ConfigError(
            f"register_for_checkpointing: {', '.join(without)}: an object has to have state_dict() and "
            "load_state_dict(state)"
        )


def save_states(objects: Sequence[Any], folder: str | Path) -> None:
    for number, one in enumerate(objects):
        torch.save(one.state_dict(), file_of(folder, number))


def load_states(objects: Sequence[Any], folder: str | Path) -> None:
    """Raises CheckpointError where a file is missing, or holds other than tensors, numbers, strings and containers."""
    for number, one in enumerate(objects):
        path = file_of(folder, number)
        try:
            # weights_only: a pickle could run code. Files of Accelerate that hold
            # other objects are refused, as the error says.
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{path}: the state of the {type(one).__name__} that register_for_checkpointing was given cannot be "
                f"read: {error}"
            ) from error
        one.load_state_dict(state)
