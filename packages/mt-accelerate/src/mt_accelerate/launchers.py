"""`notebook_launcher`, which programs and libraries import beside the Accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mt_core.errors import ConfigError


def notebook_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int | None = None, **options: Any
) -> None:
    """Call function(*args) in this process. num_processes: one for each CUDA device unless given.

    Raises ConfigError for several processes, which `mt launch` starts: forks of a notebook cannot use a device that it
    has used.
    """
    number = max(torch.cuda.device_count(), 1) if num_processes is None else num_processes
    machines = int(options.get("num_nodes", 1))
    if number * machines > 1:
        raise ConfigError(
            f"notebook_launcher(num_processes={number}, num_nodes={machines}): several processes are started by mt "
            "launch --num_processes N FILE; num_processes=1 runs the function here"
        )
    function(*args)
