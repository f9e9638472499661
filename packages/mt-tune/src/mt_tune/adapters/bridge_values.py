"""The values of an adapter of Megatron-Bridge for the adapters of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.errors import CheckpointError
from mt_core.parallel.context import ParallelContext
from mt_core.train.checkpoint.state import merged_over_stages
from mt_tune.adapters.base import Adapter, adapters, put
from mt_tune.adapters.bridge_reading import IN, MAGNITUDE, OF_PARTS, OUT, BridgeAdapter
from mt_tune.adapters.low_rank import LowRankAdapter, RankedPart

TENSOR_PARALLEL, EXPERT_PARALLEL = "tensor_model_parallel_size", "expert_model_parallel_size"


def bridge_values(path: Path, model: nn.Module, ctx: ParallelContext) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, canonical value) of the adapters of this process. Collective over pipeline stages.

    Raises CheckpointError for layers that nothing takes, and for tensors whose order of rows is not known.
    """
    folder, all_adapters = BridgeAdapter(path), adapters(model)
    taken = merged_over_stages({adapter.layer_path: True for adapter in all_adapters.values()}, ctx)
    left = sorted(folder.layers.keys() - taken.keys())
    if left:
        raise CheckpointError(f"{path}: nothing takes the adapters of {', '.join(left[:5])}; is it of another base?")
    for at, adapter in all_adapters.items():
        for name, value in layer_values(folder, adapter).items():
            yield f"{at}.{name}", value


def layer_values(folder: BridgeAdapter, adapter: Adapter) -> dict[str, Tensor]:
    """lora_A, lora_B and the magnitude of one layer."""
    path = adapter.layer_path
    if not isinstance(adapter, LowRankAdapter) or path not in folder.layers:
        raise CheckpointError(f"{folder.path}: has no adapter of {path}, which [adapter] makes")
    values = {f"lora_{name}": torch.zeros(adapter.layouts[f"lora_{name}"].shape) for name in "AB"}
    if IN in folder.layers[path]:
        _fill_shared(folder, adapter, values)
    else:
        _fill_parts(folder, adapter, values)
    if "magnitude" in adapter.layouts:
        values["magnitude"] = _magnitude(folder, adapter)
    return values


def _fill_shared(folder: BridgeAdapter, adapter: LowRankAdapter, values: dict[str, Tensor]) -> None:
    """One A for all parts, and B with the rows of the layer."""
    path, is_fc1 = adapter.layer_path, adapter.layer_path.endswith("linear_fc1")
    if is_fc1 and len(adapter.base_layout.shape) == 2 and not _is_gated(adapter):
        _require_one(folder, TENSOR_PARALLEL, path, "which has no gate, whose halves its files have apart")
    if path.endswith("in_proj"):
        _require_one(folder, TENSOR_PARALLEL, path, "whose blocks each rank has its part of")
    a, b = (_stacked(folder, adapter, name) for name in (IN, OUT))
    rows = values["lora_B"].shape[-2]
    if adapter.kind == "output":
        b = b[:rows]  # the rest is padding of the vocabulary
    for part in adapter.ranks:
        put(values["lora_A"], (..., part.columns, slice(None)), a, path)
        _put_rows(values, part, b[..., part.part.rows, :] if b.shape[-2] == rows else b, path)


def _fill_parts(folder: BridgeAdapter, adapter: LowRankAdapter, values: dict[str, Tensor]) -> None:
    """A pair for each part; parts without one stay zero."""
    path, name = adapter.layer_path, adapter.layer_path.rpartition(".")[2]
    labels, stored = OF_PARTS.get(name, ()), folder.layers[path]
    parts = sorted(adapter.ranks, key=lambda part: int(part.part.rows.min()))
    if len(labels) != len(parts):
        raise CheckpointError(
            f"{folder.path}: {path} has adapters of parts ({', '.join(sorted(stored))}), and the model has "
            f"{len(parts)} modules there in Hugging Face's format"
        )
    if name == "linear_fc1":
        _require_one(folder, TENSOR_PARALLEL, path, "whose gate and up each rank halves once more")
    for label, part in zip(labels, parts, strict=True):
        if f"{label}.{IN}" in stored:
            a, b = (_stacked(folder, adapter, f"{label}.{leaf}") for leaf in (IN, OUT))
            put(values["lora_A"], (..., part.columns, slice(None)), a, path)
            # Rows of a part in the order of the layer's.
            order = part.part.rows.argsort().argsort()
            _put_rows(values, part, b[..., order, :] if b.shape[-2] == len(order) else b, path)


def _put_rows(values: dict[str, Tensor], part: RankedPart, b: Tensor, path: str) -> None:
    put(values["lora_B"], (..., part.part.rows, slice(part.rank)), b, path)


def _stacked(folder: BridgeAdapter, adapter: Adapter, name: str) -> Tensor:
    """A tensor of a layer; of experts [E, ...], also where they share one."""
    value, shape = folder.read(adapter.layer_path, name), adapter.base_layout.shape
    if len(shape) == 2:
        return value
    if value.ndim == 2:
        _require_one(folder, EXPERT_PARALLEL, adapter.layer_path, "whose experts share an adapter on each rank")
        value = value[None]
    return value.expand(shape[0], -1, -1) if len(value) == 1 else value


def _magnitude(folder: BridgeAdapter, adapter: Adapter) -> Tensor:
    path = adapter.layer_path
    if MAGNITUDE not in folder.layers[path]:
        raise CheckpointError(f"{folder.path}: {path} has no {MAGNITUDE}")
    if path.endswith("linear_fc1"):
        _require_one(folder, TENSOR_PARALLEL, path, "of whose magnitudes each rank has both halves together")
    value = torch.ones(adapter.layouts["magnitude"].shape)
    put(value, slice(None), folder.read(path, MAGNITUDE), path)
    return value


def _is_gated(adapter: Adapter) -> bool:
    rows: Any = [split for split in adapter.base_layout.splits if split.dim == 0]
    return any(split.sections not in (1, (1,)) for split in rows)


def _require_one(folder: BridgeAdapter, key: str, path: str, why: str) -> None:
    """Raise CheckpointError for rows whose order depends on a layout with more than one rank."""
    if folder.divided(key):
        raise CheckpointError(
            f"{folder.path}: {path}, {why}, was trained with {key}={folder.model[key]}, so that the order of its rows "
            f"is not known: convert it with {key}=1 in Megatron-Bridge, or merge it there"
        )
