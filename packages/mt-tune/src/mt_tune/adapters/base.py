"""What all adapters of a layer share: where they are called, how they are turned off, the tensors that they store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, Split, sequence_axes
from mt_core.parallel.context import ParallelContext
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.targets import Layer, Part

NAME = "adapter"
"""Name of the child of an adapted layer."""
Values = Mapping[str, Tensor]
"""Name of a parameter of an adapter -> its canonical value."""
Take = Callable[[str], Tensor]
"""Name of a tensor in a PEFT folder, without the prefix of all -> the tensor."""
Names = Mapping[Part, str]
"""Part of a layer -> the module by whose name PEFT stores its adapter."""


class Adapter(LayoutModule):
    """Changes the output of the layer that it is a child of. `is_on`: False leaves the layer as its base is."""

    peft_type: ClassVar[str] = "LORA"
    covers_tied_weight: ClassVar[bool] = False
    """Whether token embeddings and a tied LM head are changed alike."""
    takes_from_base: ClassVar[bool] = False
    """Whether initial values follow from the weight of the layer."""
    multiplies_rows: ClassVar[bool] = False
    """Whether rows of experts are multiplied, so that products may not sum those of a token."""

    def __init__(self, layer: Layer, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.is_on = True
        self.layer_path, self.kind, self.parts = layer.path, layer.kind, layer.parts
        self.base_layout = layer.layout

    def declare(self, name: str, layout: ParameterLayout | None) -> None:
        """See LayoutModule.declare. The checkpoint of a base has no such parameter."""
        super().declare(name, None if layout is None else replace(layout, added=True))

    def before(self, x: Tensor, groups: Any = None) -> Tensor:
        """The input of the layer, of this one's. groups: of experts, the rows of each."""
        return x

    def after(self, x: Tensor, out: Tensor, layer: LayoutModule, **options: Any) -> Tensor:
        """The output of the adapted layer from that of its base."""
        raise NotImplementedError

    def started(self, weight: Tensor) -> Values:
        """Initial values that follow from the canonical weight of the layer."""
        return {}

    def merged(self, weight: Tensor, values: Values) -> Tensor:
        """The canonical weight [..., out, in] of a layer that computes the same without the adapter, in fp32."""
        raise NotImplementedError

    def merged_bias(self, bias: Tensor, values: Values) -> Tensor:
        """The canonical bias of such a layer, in fp32."""
        return bias.float()

    def effective_weight(self, weight: Tensor) -> Tensor:
        """The same of this rank's part of the weight, differentiable, in its dtype."""
        raise NotImplementedError(f"{self.layer_path} is used by its weight alone, which {type(self).__name__} has not")

    # -- PEFT's tensors ------------------------------------------------------------------------------

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        """(name in PEFT's format without its prefix, tensor), of canonical values. names: of the parts."""
        raise NotImplementedError

    def imported(self, take: Take, names: Names) -> Iterator[tuple[str, Tensor]]:
        """(name of a parameter, canonical value). take: gives a tensor of the folder by its name."""
        raise NotImplementedError

    @classmethod
    def peft_keys(cls, all_adapters: Sequence[Any], options: AdapterConfig) -> dict[str, Any]:
        """Keys of adapter_config.json of all adapters of a model."""
        raise NotImplementedError

    @classmethod
    def shared_tensors(cls, all_adapters: Sequence[Any]) -> Values:
        """Tensors that all adapters of a model have together, by their names behind `base_model.`."""
        return {}

    # -- layouts that follow from the base weight's ----------------------------------------------------

    @property
    def output_splits(self) -> tuple[Split, ...]:
        """Splits of a vector of output features."""
        dim = len(self.base_layout.shape) - 2
        return tuple(replace(split, dim=0) for split in self.base_layout.splits if split.dim == dim)

    @property
    def input_splits(self) -> tuple[Split, ...]:
        """Splits of a vector of input features."""
        dim = len(self.base_layout.shape) - 1
        return tuple(replace(split, dim=0) for split in self.base_layout.splits if split.dim == dim)

    @property
    def output_padding(self) -> Mapping[int, int]:
        dim = len(self.base_layout.shape) - 2
        return {0: self.base_layout.padded[dim]} if dim in self.base_layout.padded else {}

    @property
    def cuts_inputs(self) -> bool:
        """Whether ranks have different input features."""
        return bool(self.input_splits)

    def output_vector(self, init: Init) -> ParameterLayout:
        """Layout of one number for each output feature, which multiplies it."""
        size, splits = self.base_layout.shape[-2], self.output_splits
        # A replicated vector is applied to each rank's positions: its gradient is partial where these differ.
        partial = () if splits else (self.base_layout.partial_gradient or self._on_positions)
        return ParameterLayout((size,), init, splits, padded=self.output_padding, partial_gradient=partial)

    @property
    def _on_positions(self) -> tuple[Any, ...]:
        return sequence_axes(self.ctx) if self.cuts_inputs or self.kind == "embedding" else ()

    def coverage(self) -> Tensor:
        """[out] bool: rows that have an adapter."""
        covered = torch.zeros(self.base_layout.shape[-2], dtype=torch.bool)
        for part in self.parts:
            covered[part.rows] = True
        return covered

    def local_coverage(self) -> Tensor | None:
        """Coverage of this rank's rows; None: all have one."""
        covered = self.coverage()
        return None if covered.all() else self.to_local_rows(covered)

    def of_covered(self, vector: Tensor, other: float) -> Tensor:
        """A canonical vector [out], with `other` for rows without an adapter."""
        return torch.where(self.coverage(), vector, other)

    def to_local_rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a constant [out, ...]."""
        layout = ParameterLayout(tuple(whole.shape), _constant, self.output_splits, padded=self.output_padding)
        return layout.to_local(whole, self.ctx).contiguous().to(self.ctx.device)


def _constant(tensor: Tensor, generator: torch.Generator) -> None:
    raise AssertionError("a constant is not drawn")


def put(matrix: Tensor, where: Any, values: Tensor, name: str) -> None:
    """Raises ConfigError for values of another shape than the place."""
    if matrix[where].shape != values.shape:
        raise ConfigError(
            f"{name}: the adapter has {list(values.shape)}, and [adapter] makes it {list(matrix[where].shape)}; set "
            "adapter.rank and adapter.rank_pattern as the adapter's r, or the base that it was made for"
        )
    matrix[where] = values.to(matrix.dtype)


# -- where adapters are called --------------------------------------------------------------------------


def attach(layer: nn.Module, adapter: Adapter) -> None:
    """Make the adapter a child of the layer, called before and behind it. Hooks leave the layer's class, its name and
    the names of its parameters as they are."""
    layer.add_module(NAME, adapter)
    if type(adapter).before is not Adapter.before:
        layer.register_forward_pre_hook(_before)
    layer.register_forward_hook(_after, with_kwargs=True)


def _before(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    adapter = adapter_of(layer)
    return (adapter.before(*args[:2]), *args[1:]) if adapter is not None and adapter.is_on else None


def _after(layer: Any, args: tuple[Any, ...], options: dict[str, Any], out: Any) -> Any:
    adapter = adapter_of(layer)
    if adapter is None or not adapter.is_on:
        return out
    if len(args) > 1:  # of experts: the rows of each
        options = {"groups": args[1], **options}
    if not isinstance(out, tuple):
        return adapter.after(args[0], out, layer, **options)
    # A layer of several blocks, which it returns apart.
    changed = adapter.after(args[0], torch.cat(out, -1), layer, **options)
    return changed.split([block.shape[-1] for block in out], -1)


def adapter_of(layer: nn.Module) -> Adapter | None:
    adapter = layer._modules.get(NAME)
    return adapter if isinstance(adapter, Adapter) else None


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """Canonical path of each adapter -> the adapter."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Adapter)}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model computes what its base does: the reference of preference losses."""
    turned_off = [adapter for adapter in adapters(model).values() if adapter.is_on]
    for adapter in turned_off:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in turned_off:
            adapter.is_on = True
