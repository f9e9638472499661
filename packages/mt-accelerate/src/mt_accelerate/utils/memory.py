"""Memory of a program's run."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

OUT_OF_MEMORY = ("CUDA out of memory", "DefaultCPUAllocator: can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED")


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorator: calls function(batch_size, ...) with nine tenths of the size again after each error for want of
    memory. Raises RuntimeError where none fits, TypeError for a function without a first parameter."""
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )

    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        if len(inspect.signature(function).parameters) < len(arguments) + 1:
            raise TypeError(f"{function.__name__} is called with batch_size first; leave that out of the call")
        size = starting_batch_size
        while size > 0:
            release_memory()
            try:
                return function(size, *arguments, **options)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            size = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError("No executable batch size found, reached zero.")

    return wrapper


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)


def release_memory(*objects: Any) -> list[None]:
    """None for each object; frees what torch keeps for reuse."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [None] * len(objects)


def convert_bytes(size: float) -> str:
    """A number of bytes with a unit, for people."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0 or unit == "TB":
            break
        size /= 1024.0
    return f"{round(size, 2)} {unit}"
