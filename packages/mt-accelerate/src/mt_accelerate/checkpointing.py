"""States and their folders in the layout of Accelerate: weights as safetensors, other objects by torch, read without
running pickled code."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from mt_accelerate.handlers import ProjectConfiguration
from mt_accelerate.operations import on_first_rank
from mt_core.errors import CheckpointError, ConfigError

SAFE_MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME = "model", "optimizer", "scheduler", "scaler.pt"
RNG_STATE_NAME = "random_states"
CHECKPOINTS, NUMBERED = "checkpoints", "checkpoint_"


def numbered(name: str, number: int, suffix: str) -> str:
    """model.safetensors, model_1.safetensors, ..."""
    return f"{name}{f'_{number}' if number else ''}{suffix}"


def save_models(models: Sequence[nn.Module], folder: Path) -> None:
    for number, model in enumerate(models):
        # save_model: tied weights are written once, as from_pretrained and Accelerate expect.
        save_model(model, str(folder / numbered(SAFE_MODEL_NAME, number, ".safetensors")), metadata={"format": "pt"})


def load_models(models: Sequence[nn.Module], folder: Path, *, strict: bool = True) -> None:
    """Raises CheckpointError for a missing file and for tensors that do not fit."""
    for number, model in enumerate(models):
        path = folder / numbered(SAFE_MODEL_NAME, number, ".safetensors")
        try:
            load_model(model, str(path), strict=strict)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path}: weights of {type(model).__name__} cannot be read: {error}") from error


def save_parts(parts: Mapping[str, Any], folder: Path) -> None:
    """Objects with state_dict, by file name."""
    for name, part in parts.items():
        torch.save(part.state_dict(), folder / name)


def load_parts(parts: Mapping[str, Any], folder: Path) -> None:
    """Raises CheckpointError as `read` does."""
    for name, part in parts.items():
        part.load_state_dict(read(folder / name))


def read(path: Path) -> Any:
    """Raises CheckpointError where a file is missing, or holds other than tensors, numbers, strings and containers."""
    try:
        # weights_only: a pickle could run code.
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def random_states() -> dict[str, Any]:
    """States of Python, NumPy, torch and the GPUs of this process, in tensors and plain values."""
    kind, words, position, has_gauss, gauss = np.random.get_state()
    states = {
        "random_state": random.getstate(),
        "numpy_random_seed": (kind, torch.from_numpy(np.asarray(words).astype(np.int64)), position, has_gauss, gauss),
        "torch_manual_seed": torch.get_rng_state(),
    }
    return {**states, "torch_cuda_manual_seed": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else states


def set_random_states(states: Mapping[str, Any]) -> None:
    version, words, gauss = states["random_state"]
    random.setstate((version, tuple(words), gauss))
    kind, numpy_words, *rest = states["numpy_random_seed"]
    np.random.set_state((kind, np.asarray(numpy_words, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch_manual_seed"])
    if torch.cuda.is_available() and "torch_cuda_manual_seed" in states:
        torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])


# -- objects registered by `register_for_checkpointing` ----------------------------------------------


def file_of(folder: str | Path, number: int) -> Path:
    return Path(folder) / f"custom_checkpoint_{number}.pkl"


def require_states(objects: Sequence[Any]) -> None:
    """Raises ConfigError for objects without state_dict and load_state_dict."""
    without = [
        type(obj).__name__ for obj in objects if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"))
    ]
    if without:
        raise ConfigError(
            f"register_for_checkpointing: {', '.join(without)}: an object has to have state_dict() and "
            "load_state_dict(state)"
        )


def save_states(objects: Sequence[Any], folder: str | Path) -> None:
    for number, obj in enumerate(objects):
        torch.save(obj.state_dict(), file_of(folder, number))


def load_states(objects: Sequence[Any], folder: str | Path) -> None:
    """Raises CheckpointError as `read` does."""
    for number, obj in enumerate(objects):
        obj.load_state_dict(read(file_of(folder, number)))


# -- folders that `save_state` and `load_state` name -------------------------------------------------


def next_folder(project: ProjectConfiguration) -> Path:
    """Collective: the oldest folders above project.total_limit are removed. Raises ConfigError without
    automatic_checkpoint_naming."""
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        raise ConfigError(
            "save_state() without a folder needs ProjectConfiguration(project_dir=..., "
            "automatic_checkpoint_naming=True); give save_state(DIR)"
        )
    folder = Path(project.project_dir) / CHECKPOINTS
    on_first_rank(lambda: _remove_oldest(folder, project.total_limit))
    return folder / f"{NUMBERED}{project.iteration}"


def newest_folder(project_dir: str | None) -> Path:
    """Raises ConfigError where there is none."""
    folders = _numbered_folders(Path(project_dir) / CHECKPOINTS) if project_dir is not None else []
    if not folders:
        raise ConfigError(f"load_state() without a folder finds no checkpoint below project_dir={project_dir}")
    return folders[-1]


def _numbered_folders(folder: Path) -> list[Path]:
    numbers = {path: path.name.removeprefix(NUMBERED) for path in folder.glob(f"{NUMBERED}*")}
    return sorted((path for path, number in numbers.items() if number.isdigit()), key=lambda path: int(numbers[path]))


def _remove_oldest(folder: Path, limit: int | None) -> None:
    """Makes place for one more."""
    folders = _numbered_folders(folder)
    for oldest in folders[: max(len(folders) + 1 - limit, 0)] if limit else ():
        shutil.rmtree(oldest)
