"""Files, environment variables, versions and objects of a program."""

from __future__ import annotations

import importlib.metadata
import operator
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import reduce
from typing import Any

import torch
from packaging.version import Version
from safetensors.torch import save_file

from mt_accelerate.operations import (
    on_tensors,
)
from mt_accelerate.state import PartialState
from mt_accelerate.without_plugin import models
from mt_core.errors import ConfigError
from mt_core.parallel.context import wait_for_all

MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, SAMPLER_NAME = "pytorch_model", "optimizer", "scheduler", "sampler"
SCALER_NAME, RNG_STATE_NAME, SAFE_MODEL_NAME = "scaler.pt", "random_states", "model"
WEIGHTS_NAME, WEIGHTS_INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"
SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
PROFILE_PATTERN_NAME = "profile_{suffix}.json"
COMPARISONS = {">": "gt", ">=": "ge", "==": "eq", "!=": "ne", "<=": "le", "<": "lt"}


class PrecisionType(StrEnum):
    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(StrEnum):
    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"


def wait_for_everyone() -> None:
    wait_for_all()


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The program's own module."""
    return models.unwrap(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_compiled=keep_torch_compile)


def is_compiled_module(module: Any) -> bool:
    return hasattr(module, "_orig_mod")


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """torch.save on the first rank, or on the ranks that call it with save_on_each_node; with safe_serialization
    tensors by name as safetensors."""
    if not save_on_each_node and not PartialState().is_main_process:
        return
    if safe_serialization:
        save_file({name: value.contiguous() for name, value in obj.items()}, f, metadata={"format": "pt"})
    else:
        torch.save(obj, f)


def load(f: Any, map_location: Any = None, **options: Any) -> Any:
    """torch.load without running pickled code. Raises ConfigError for weights_only=False."""
    if options.pop("weights_only", True) is False or options:
        raise ConfigError("load(weights_only=False) would run code of the file; leave it out")
    return torch.load(f, map_location=map_location, weights_only=True)


def str_to_bool(value: str) -> int:
    """1 or 0. Raises ValueError for other words."""
    if value.lower() in ("y", "yes", "t", "true", "on", "1"):
        return 1
    if value.lower() in ("n", "no", "f", "false", "off", "0"):
        return 0
    raise ValueError(f"{value!r} is no truth value; it can be true or false")


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    return str_to_bool(os.environ.get(key, str(default))) == 1


def parse_choice_from_env(key: str, default: str = "no") -> str:
    return os.environ.get(key, default)


def get_int_from_env(env_keys: list[str], default: int) -> int:
    """Value of the first variable that is set."""
    return next((int(os.environ[key]) for key in env_keys if key in os.environ), default)


@contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """Upper-case variables within the block."""
    before = dict(os.environ)
    os.environ.update({name.upper(): str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def clear_environment() -> Iterator[None]:
    """No variables within the block."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        _restore(before)


def _restore(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Raises ValueError for another operation than those of versions."""
    if operation not in COMPARISONS:
        raise ValueError(f"operation {operation!r}; it can be {', '.join(COMPARISONS)}")
    if isinstance(library_or_version, str):
        library_or_version = Version(importlib.metadata.version(library_or_version))
    return bool(getattr(operator, COMPARISONS[operation])(library_or_version, Version(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    return compare_versions("torch", operation, version)


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def is_fp16_available() -> bool:
    return True


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether a port of this machine is taken; default 29500."""
    with socket.socket() as connection:
        return connection.connect_ex(("localhost", int(port or 29500))) == 0


def listify(value: Any) -> Any:
    """Tensors and arrays in nested values as lists and numbers."""

    def as_list(array: Any) -> Any:
        return array.tolist() if hasattr(array, "tolist") else array

    return on_tensors(as_list, value)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """The entries of source in destination, also of nested ones."""
    for key, value in source.items():
        destination[key] = merge_dicts(value, destination.setdefault(key, {})) if isinstance(value, dict) else value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """attr: names with dots between them."""
    return reduce(getattr, attr.split("."), obj)


def tqdm(*arguments: Any, main_process_only: bool = True, **options: Any) -> Any:
    """A progress bar, on the main process of each node."""
    from tqdm.auto import tqdm as bar

    hidden = main_process_only and not PartialState().is_local_main_process
    return bar(*arguments, **{**options, "disable": hidden or options.get("disable", False)})
