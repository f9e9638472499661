"""Adapters that train vectors alone: IA3 (Liu et al., 2022) and VeRA (Kopiczko et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, ones, sequence_axes, zeros
from mt_core.nn.linear import column_parallel_linear, linear, row_parallel_linear
from mt_core.parallel.context import ParallelContext
from mt_tune.adapters.base import Adapter, Names, Take, Values, put
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.dropout import InputDropout
from mt_tune.adapters.targets import Layer, fits


class ScalingAdapter(Adapter):
    """IA3: y = l * (W x + b), or W (l * x) + b of the layers that adapter.feedforward_targets names; l starts at 1."""

    scaling: Tensor
    covered: Tensor | None
    peft_type = "IA3"

    def __init__(self, layer: Layer, config: AdapterConfig, ctx: ParallelContext) -> None:
        super().__init__(layer, ctx)
        scaled = {any(fits(n, p) for n in part.names for p in config.feedforward_targets) for part in layer.parts}
        if scaled == {True, False} or (scaled == {True} and len(layer.parts) > 1):
            raise ConfigError(
                f"adapter.feedforward_targets scales the input of {layer.path}, which several modules share "
                f"({', '.join(part.names[0] for part in layer.parts)}); leave it out, so that outputs are scaled"
            )
        self.scales_input = scaled == {True}
        self.declare("scaling", self.scaling_layout())
        self.register_buffer("covered", self.local_coverage(), persistent=False)

    def scaling_layout(self) -> ParameterLayout:
        return self._input_vector() if self.scales_input else self.output_vector(ones)

    def _input_vector(self) -> ParameterLayout:
        base = self.base_layout
        splits = self.input_splits
        partial = () if splits else base.partial_gradient or (sequence_axes(self.ctx) if base.splits else ())
        return ParameterLayout((base.shape[-1],), ones, splits, partial_gradient=partial)

    def before(self, x: Tensor, groups: Any = None) -> Tensor:
        return x * self.scaling if self.scales_input else x

    def after(self, x: Tensor, out: Tensor, layer: LayoutModule, **options: Any) -> Tensor:
        if self.scales_input:
            return out
        scaling = self.scaling if self.covered is None else torch.where(self.covered, self.scaling, 1.0)
        return out * scaling[: out.shape[-1]]

    def merged(self, weight: Tensor, values: Values) -> Tensor:
        scaling = values["scaling"].float()
        return weight.float() * (
            scaling[..., None, :] if self.scales_input else self.of_covered(scaling, 1.0)[..., None]
        )

    def merged_bias(self, bias: Tensor, values: Values) -> Tensor:
        return bias.float() if self.scales_input else bias.float() * self.of_covered(values["scaling"].float(), 1.0)

    @classmethod
    def peft_keys(cls, all_adapters: Sequence[Any], options: AdapterConfig) -> dict[str, Any]:
        scaled = [part.name for adapter in all_adapters if adapter.scales_input for part in adapter.parts]
        return {"feedforward_modules": sorted({name.rpartition(".")[2] for name in scaled}), "init_ia3_weights": True}

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            vector = values["scaling"]
            yield f"{names[part]}.ia3_l", vector[None] if self.scales_input else vector[part.rows][:, None]

    def imported(self, take: Take, names: Names) -> Iterator[tuple[str, Tensor]]:
        scaling = torch.ones(self.base_layout.shape[-1 if self.scales_input else -2])
        for part in self.parts:
            rows = slice(None) if self.scales_input else part.rows
            put(scaling, rows, take(f"{names[part]}.ia3_l").flatten(), names[part])
        yield "scaling", scaling


# -- VeRA ---------------------------------------------------------------------------------------------------


def projections(key: int, rank: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    """A [rank, inputs] and B [outputs, rank], which all layers share: the numbers that PEFT draws for a key."""
    generator = torch.Generator().manual_seed(key)
    # kaiming_uniform_ with the gain of ReLU: the bound is sqrt(6 / inputs of the matrix).
    a = torch.empty(rank, inputs).uniform_(-math.sqrt(6 / inputs), math.sqrt(6 / inputs), generator=generator)
    return a, torch.empty(outputs, rank).uniform_(-math.sqrt(6 / rank), math.sqrt(6 / rank), generator=generator)


class VectorAdapter(Adapter):
    """VeRA: y = W x + b * B (d * A x), with A and B frozen and random, cut from those of the largest layer.

    inputs, outputs: largest sizes over all adapted layers. The parts of a fused layer have the first rows of B each.
    """

    lambda_b: Tensor
    lambda_d: Tensor
    projection_a: Tensor
    projection_b: Tensor
    peft_type = "VERA"

    def __init__(self, layer: Layer, config: AdapterConfig, ctx: ParallelContext, *, inputs: int, outputs: int) -> None:
        super().__init__(layer, ctx)
        self.rank, self.sizes = config.rank, (config.projection_prng_key, config.rank, inputs, outputs)
        base, initial = self.base_layout, config.d_initial
        self.declare_vectors(lambda x, generator: x.fill_(initial))
        self.dropout = InputDropout(config.dropout, self.input_splits, ctx)
        a, b = projections(*self.sizes)
        columns = ParameterLayout((self.rank, base.shape[-1]), zeros, self._column_splits())
        dtype, device = ctx.params_dtype, ctx.device
        self.register_buffer(
            "projection_a", columns.to_local(a[:, : base.shape[-1]], ctx).to(device, dtype), persistent=False
        )
        self.register_buffer("projection_b", self.to_local_rows(self._wide(b)).to(dtype), persistent=False)

    def declare_vectors(self, init: Init) -> None:
        """lambda_b, which starts at zero, and lambda_d, filled by `init`."""
        base = self.base_layout
        on_sequence = base.partial_gradient or (sequence_axes(self.ctx) if base.splits else ())
        shape = (self.rank * len(self.parts),)
        self.declare("lambda_b", self.output_vector(zeros))
        self.declare("lambda_d", ParameterLayout(shape, init, partial_gradient=on_sequence))

    def _column_splits(self) -> Any:
        return tuple(replace(split, dim=1) for split in self.input_splits)

    def _wide(self, b: Tensor) -> Tensor:
        """[out, parts x rank]: for the rows of a part the first rows of B at its columns, 0 elsewhere"""
        wide = torch.zeros(self.base_layout.shape[-2], len(self.parts) * self.rank)
        for number, part in enumerate(self.parts):
            columns = slice(number * self.rank, (number + 1) * self.rank)
            wide[part.rows, columns] = b[: len(part.rows)]
        return wide

    def after(self, x: Tensor, out: Tensor, layer: LayoutModule, **options: Any) -> Tensor:
        x, a, b = self.dropout(x), self.projection_a, self.projection_b
        reduced = row_parallel_linear(x, a, None, self.ctx) if self.cuts_inputs else linear(x, a, None)
        h = torch.cat([reduced] * len(self.parts), -1) * self.lambda_d
        update = column_parallel_linear(h, b, None, self.ctx) if self.output_splits else linear(h, b, None)
        return out + (update * self.lambda_b)[..., : out.shape[-1]]

    def merged(self, weight: Tensor, values: Values) -> Tensor:
        a, b = projections(*self.sizes)
        wide = self._wide(b) * values["lambda_d"].float()[..., None, :]
        update = wide @ a[:, : self.base_layout.shape[-1]].repeat(len(self.parts), 1)
        return weight.float() + values["lambda_b"].float()[..., None] * update

    @classmethod
    def peft_keys(cls, all_adapters: Sequence[Any], options: AdapterConfig) -> dict[str, Any]:
        return {
            "r": options.rank,
            "projection_prng_key": options.projection_prng_key,
            "save_projection": True,
            "vera_dropout": options.dropout,
            "d_initial": options.d_initial,
            "bias": "none",
            "init_weights": True,
        }

    @classmethod
    def shared_tensors(cls, all_adapters: Sequence[Any]) -> dict[str, Tensor]:
        return dict(zip(("vera_A", "vera_B"), projections(*all_adapters[0].sizes), strict=True)) if all_adapters else {}

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        for number, part in enumerate(self.parts):
            columns = slice(number * self.rank, (number + 1) * self.rank)
            yield f"{names[part]}.vera_lambda_b", values["lambda_b"][part.rows]
            yield f"{names[part]}.vera_lambda_d", values["lambda_d"][columns]

    def imported(self, take: Take, names: Names) -> Iterator[tuple[str, Tensor]]:
        b, d = torch.zeros(self.base_layout.shape[-2]), torch.zeros(self.rank * len(self.parts))
        for number, part in enumerate(self.parts):
            columns = slice(number * self.rank, (number + 1) * self.rank)
            put(b, part.rows, take(f"{names[part]}.vera_lambda_b"), names[part])
            put(d, columns, take(f"{names[part]}.vera_lambda_d"), names[part])
        yield "lambda_b", b
        yield "lambda_d", d
