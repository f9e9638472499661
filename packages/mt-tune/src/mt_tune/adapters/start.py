"""Values that adapters have before the first step and that do not come from their own random streams: those of a PEFT
folder (adapter.load), and those that follow from the weights of the base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mt_core.checkpoint_lookup import open_start
from mt_core.nn.layout import LayoutModule
from mt_core.parallel.context import ParallelContext
from mt_core.train.callbacks import Callback, Run
from mt_core.train.checkpoint.state import MODEL
from mt_tune.adapters.base import NAME, adapters
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.peft_folder import read_values
from mt_tune.adapters.targets import WEIGHT, weight_layout
from mt_tune.quantized_weights.weight import QuantizedWeight


class AdapterStart(Callback):
    """Before the first step of a run that does not continue another."""

    def __init__(self, config: AdapterConfig) -> None:
        self.config = config

    def on_train_start(self, run: Run) -> None:
        if not self.config.is_on or run.resumed_from is not None:
            return
        engine, source = run.engine, self.config.load
        if source is not None:
            read_base = partial(_weight_named, run.model, run.ctx)
            values: Any = read_values(Path(source), run.model, run.config, run.host, run.ctx, read_base)
        elif has_stored_adapter(run):
            return
        else:
            values = values_of_base(run.model, run.ctx)
        set_values(engine, dict(values))


def has_stored_adapter(run: Run) -> bool:
    """Whether the checkpoint that the run starts from has values of adapters, which it has read."""
    load = run.config.checkpoint.load
    return load is not None and any(f".{NAME}." in name for name in open_start(load, run.host).shapes())


def set_values(engine: Any, values: Mapping[str, Tensor]) -> None:
    """Set parameters of a run, given by their canonical names and values, whatever divides them over ranks."""
    if not values:
        return
    state = engine.checkpointed()
    layouts = {name: layout for name, layout in engine.layouts.items() if name in values}
    state.load_model(CanonicalValues(values), layouts)
    state.copy_from_model()


def values_of_base(model: nn.Module, ctx: ParallelContext) -> Iterator[tuple[str, Tensor]]:
    """Canonical name -> value of what adapters take from the weights of their layers. Collective."""
    modules = dict(model.named_modules())
    for path, adapter in adapters(model).items():
        if type(adapter).takes_from_base:
            layer = modules[path.removesuffix(f".{NAME}")]
            assert isinstance(layer, LayoutModule)
            for name, value in adapter.started(canonical_weight(layer, ctx)).items():
                yield f"{path}.{name}", value


@torch.no_grad()
def canonical_weight(layer: LayoutModule, ctx: ParallelContext) -> Tensor:
    """[..., out, in] of all ranks, on CPU. Collective over those that divide it."""
    layout, held = weight_layout(layer), getattr(layer, WEIGHT)
    assert layout is not None
    weight = held.dense(ctx.params_dtype) if isinstance(held, QuantizedWeight) else held.detach()
    if isinstance(weight, DTensor):  # FSDP2
        weight = weight.full_tensor()
    return layout.to_canonical(weight, ctx).cpu()


def _weight_named(model: nn.Module, ctx: ParallelContext, name: str) -> Tensor | None:
    layer = dict(model.named_modules()).get(name.rpartition(".")[0])
    return canonical_weight(layer, ctx) if isinstance(layer, LayoutModule) else None


class CanonicalValues:
    """Canonical tensors in memory as a `CheckpointReader`."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = {MODEL + name: value for name, value in values.items()}
        self.metadata: Mapping[str, Any] = {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self._values.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: value.dtype for name, value in self._values.items()}

    def read(self, name: str) -> Tensor:
        return self._values[name]

    def files(self) -> Mapping[str, bytes]:
        return {}
