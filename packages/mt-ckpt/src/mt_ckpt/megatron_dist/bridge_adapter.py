"""Checkpoints of adapters that Megatron-Bridge writes: a `torch_dist` folder with tensors of adapters alone, and
run_config.yaml, whose section `peft` says what they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_ckpt.megatron.folder import find_iteration
from mt_ckpt.megatron.pieces import Entry
from mt_ckpt.megatron_dist.index import METADATA_FILE, RUN_CONFIG, holds_adapters, read_index, require_backend
from mt_ckpt.megatron_dist.keys import entries_of, parse
from mt_core.config.files import parse_yaml
from mt_core.errors import CheckpointError

MARK = ".adapter."
"""Stands between the name of an adapted layer and that of a parameter of its adapter."""


def detect(path: Path) -> bool:
    """Whether `path` is, or its tracker names, an iteration of a run that Megatron-Bridge trained an adapter in."""
    try:
        folder = find_iteration(path)
    except CheckpointError:
        return False
    return (folder / METADATA_FILE).is_file() and holds_adapters(folder)


def read_run_config(path: Path) -> Mapping[str, Any]:
    """The contents of run_config.yaml. Raises CheckpointError for one without a section `peft`."""
    file = find_iteration(path) / RUN_CONFIG
    content = parse_yaml(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("peft"), dict):
        raise CheckpointError(f"{file}: has no section peft, which describes the adapter")
    return content


def read_adapters(path: Path) -> Mapping[str, Mapping[str, Entry]]:
    """Canonical path of a layer -> name of a parameter of its adapter -> its tensor.

    Raises CheckpointError for an incomplete folder, and for tensors that belong to no adapter.
    """
    folder = find_iteration(path)
    require_backend(folder)
    adapters: dict[str, dict[str, Entry]] = {}
    others: list[str] = []
    for stored, tensor in read_index(folder).tensors.items():
        key = parse(stored)
        if key is None or key.state is not None:
            continue
        for entry in entries_of(key.model_key.removeprefix("model."), tensor):
            layer, mark, parameter = entry.name.partition(MARK)
            if mark:
                adapters.setdefault(layer, {})[parameter] = entry
            else:
                others.append(stored)
    if others:
        raise CheckpointError(f"{folder}: nothing takes {', '.join(sorted(set(others))[:5])}: no adapters of layers")
    return adapters
