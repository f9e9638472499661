"""PEFT folders on a model that serves: several in one batch, each position of a row with its own.

A hook of each adapted layer computes, for every adapter that positions of the row name, the change of these positions
alone. The base's product is one for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mt_ckpt.model import build_model, model_config
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_tune.adapters.base import NAME, Adapter, adapters
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.low_rank import with_parts
from mt_tune.adapters.on_base import SECTION
from mt_tune.adapters.peft_folder import read_values
from mt_tune.adapters.peft_reading import described_section
from mt_tune.adapters.start import CanonicalValues, canonical_weight
from mt_tune.adapters.targets import adaptable_layers
from mt_tune.adapters.vectors import VectorAdapter

UNSERVED = ("linear_kv_up_proj",)
"""Layers whose matrix decoding takes itself, for all rows of a batch."""
Rows = list[tuple[str, Tensor | None]]
"""Adapter -> numbers of the positions that are computed with it; None: all of the row."""


@dataclass
class _Loaded:
    number: int
    layers: dict[str, Adapter]


class PeftAdapterSet:
    """See mt_infer.adapters.AdapterSet."""

    def __init__(self, model: nn.Module, config: Config, ctx: ParallelContext, host: PluginHost) -> None:
        if config.section(AdapterConfig).is_on:
            raise ConfigError("the model has an adapter itself; merge it first (mt ckpt merge-adapter)")
        if ctx.sequence_parallel:
            raise ConfigError("parallel.sequence_parallel=true divides rows, which adapters need whole; leave it out")
        if getattr(model, "conditioned_by", ()):
            raise ConfigError(
                f"{type(model).__name__} encodes inputs beside tokens, which adapters are not served with"
            )
        self.model, self.config, self.ctx, self.host = model, config, ctx, host
        self._loaded: dict[str, _Loaded] = {}
        self._hooked: set[str] = set()
        self._numbers = count(1)
        self._rows: Rows = []

    @property
    def names(self) -> Collection[str]:
        return self._loaded.keys()

    def key(self, name: str | None) -> bytes:
        return b"" if name is None else f"adapter {self._loaded[name].number}".encode()

    def load(self, name: str, folder: Path) -> None:
        if name in self._loaded:
            raise ConfigError(f"there is an adapter {name} already; unload it first")
        layers = self._read(folder)
        for path in layers.keys() - self._hooked:
            module = self.model.get_submodule(path)
            module.register_forward_pre_hook(partial(self._before, path))
            module.register_forward_hook(partial(self._after, path))
            self._hooked.add(path)
        self._loaded[name] = _Loaded(next(self._numbers), layers)

    def unload(self, name: str) -> None:
        del self._loaded[name]

    @contextmanager
    def using(self, runs: Sequence[tuple[str | None, int]]) -> Iterator[None]:
        self._rows = rows_of(runs, self.ctx.device)
        try:
            yield
        finally:
            self._rows = []

    # -- layers ------------------------------------------------------------------------------------------

    def _of_layer(self, path: str) -> Iterator[tuple[Adapter, Tensor | None]]:
        for name, rows in self._rows:
            adapter = self._loaded[name].layers.get(path)
            if adapter is not None:
                yield adapter, rows

    def _before(self, path: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        for adapter, rows in self._of_layer(path):
            if type(adapter).before is not Adapter.before:
                x = changed(x, rows, adapter.before)
        return (x, *args[1:])

    def _after(self, path: str, module: Any, args: tuple[Any, ...], out: Any) -> Any:
        x, joined = args[0], torch.cat(out, -1) if isinstance(out, tuple) else out
        for adapter, rows in self._of_layer(path):
            inputs = x if rows is None else x.index_select(1, rows)
            joined = changed(joined, rows, partial(_adapted, adapter, inputs, module))
        return joined.split([block.shape[-1] for block in out], -1) if isinstance(out, tuple) else joined

    # -- reading -----------------------------------------------------------------------------------------

    def _read(self, folder: Path) -> dict[str, Adapter]:
        """Path of a layer of this process -> its adapter, with values."""
        described = CanonicalValues({})
        model = {"family": self.config.model.family, **self.config.model.model_dump(mode="json", exclude_defaults=True)}
        described.metadata = {"config": {"model": model, SECTION: described_section(folder)}}
        config = model_config(described, self.host)
        whole = build_model(config, self.host, "meta")
        all_adapters = {path.removesuffix(f".{NAME}"): adapter for path, adapter in adapters(whole).items()}
        refuse_unserved(all_adapters, config)
        values = dict(read_values(folder, whole, config, self.host, ParallelContext(), self._read_base))
        layers = {layer.path: layer for layer in adaptable_layers(self.model, config, self.host)}
        return {
            path: self._local(adapter, layers[path], config, values)
            for path, adapter in all_adapters.items()
            if path in layers
        }

    def _local(self, whole: Adapter, layer: Any, config: Config, values: dict[str, Tensor]) -> Adapter:
        sizes = {"inputs": whole.sizes[2], "outputs": whole.sizes[3]} if isinstance(whole, VectorAdapter) else {}
        kind: Any = type(whole)
        adapter: Adapter = kind(with_parts(layer, whole.parts), config.section(AdapterConfig), self.ctx, **sizes)
        for name, layout in adapter.layouts.items():
            value = values[f"{layer.path}.{NAME}.{name}"]
            with torch.no_grad():
                getattr(adapter, name).copy_(layout.to_local(value.to(self.ctx.device), self.ctx))
        return adapter.eval().requires_grad_(False)

    def _read_base(self, name: str) -> Tensor | None:
        module: Any = dict(self.model.named_modules()).get(name.rpartition(".")[0])
        return canonical_weight(module, self.ctx) if module is not None and self.ctx.world.size == 1 else None


def _adapted(adapter: Adapter, x: Tensor, module: Any, out: Tensor) -> Tensor:
    return adapter.after(x, out, module)


def changed(row: Tensor, rows: Tensor | None, change: Any) -> Tensor:
    """[1, T, ...] with the change of some of its positions."""
    if rows is None:
        result: Tensor = change(row)
        return result
    return row.index_copy(1, rows, change(row.index_select(1, rows)).to(row.dtype))


def rows_of(runs: Sequence[tuple[str | None, int]], device: torch.device) -> Rows:
    """Positions of each adapter, in the order in which the row first has it."""
    starts = [0, *accumulate(length for _, length in runs)]
    names = dict.fromkeys(name for name, _ in runs if name is not None)
    if len(names) == 1 and all(name is not None for name, _ in runs):
        return [(name, None) for name in names]
    positions: Rows = []
    for name in names:
        ranges = [range(s, s + n) for (owner, n), s in zip(runs, starts[:-1], strict=True) if owner == name]
        positions.append((name, torch.tensor([row for rows in ranges for row in rows], device=device)))
    return positions


def refuse_unserved(all_adapters: dict[str, Adapter], config: Config) -> None:
    """Raise ConfigError for adapters that a batch of several cannot have."""
    options = config.section(AdapterConfig)
    unserved = [
        path
        for path, adapter in all_adapters.items()
        if adapter.kind not in ("linear", "embedding") or path.endswith(UNSERVED) or path.endswith("output_adapter")
    ]
    if unserved or options.modules_to_save or options.trainable_token_indices:
        what = f"{unserved[0]} has an adapter" if unserved else "whole modules or rows of the embedding are trained"
        raise ConfigError(
            f"{what}, which is not served beside others: experts, routers, LM heads, the up projections of latent "
            "attention, trained tokens and modules_to_save; merge it (mt ckpt merge-adapter) and serve the result"
        )
