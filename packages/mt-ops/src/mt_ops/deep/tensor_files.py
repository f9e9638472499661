"""Files of named tensors in groups, which keep their order; between processes of which one may have no mt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

REQUEST, ANSWER, TOKENS = "request.json", "answer.json", "tokens.safetensors"
FORWARD, BACKWARD, PARAMETERS = "forward", "backward", "parameters"


def save_groups(groups: Mapping[str, Mapping[str, Tensor]], path: Path) -> None:
    order = {group: list(tensors) for group, tensors in groups.items()}
    # Copies, as two names of one tensor are not allowed in a file.
    flat = {
        f"{group}/{name}": tensor.contiguous().clone()
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }
    save_file(flat, path, metadata={"order": json.dumps(order)})


def load_groups(path: Path) -> dict[str, dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        order = json.loads(file.metadata()["order"])
        return {group: {name: file.get_tensor(f"{group}/{name}") for name in names} for group, names in order.items()}


def step_file(folder: Path, number: int) -> Path:
    """File of the recording of a step, from 0 on."""
    return folder / f"step-{number:03}.safetensors"
