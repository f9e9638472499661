"""The recipes mxfp8 and nvfp4: which operand of which product is cast how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mt_core.nn.dropout import SampleNoise
from mt_core.nn.fp8.history import largest_over
from mt_core.nn.fp8.scaling import CastByDirection, Operand
from mt_core.nn.kernels.reference.fp8_casts import Along, Map, Matrix, Role, Scaled, amax_of, computed
from mt_core.nn.kernels.reference.microscaling import cast_mx, cast_nvfp4, noise_at, transformed
from mt_core.nn.layout import ParameterLayout, stream_seed
from mt_core.nn.linear import LinearModule
from mt_core.parallel.context import SINGLE, Axis, ParallelContext


@dataclass(frozen=True)
class MxScaling:
    """mxfp8: 32 numbers along the dimension of a product share a power of two, of inputs, weights and gradients."""

    dtypes: Mapping[Role, torch.dtype]
    margin: int = 0

    def operand(
        self,
        x: Matrix,
        role: Role,
        *,
        along: Along = "columns",
        cut_over: Axis = SINGLE,
        note: bool = False,
        scale: Tensor | None = None,
        sample: int = 0,
    ) -> Operand:
        return CastByDirection(x, lambda *how: cast_mx(computed(how[0]), *how[1:]), self.dtypes[role], self.margin)

    def restored(self, kept: Matrix, scale: Tensor | None, role: Role, cut_over: Axis = SINGLE) -> Operand:
        return self.operand(kept, role)


class GradientRounding(SampleNoise):
    """Random numbers for the stochastic rounding of a layer's output gradient: by the run's seed, the layer's name, the
    first sample of the micro-batch and the place in the whole matrix, so that no layout changes them.

    places: [features] int64, the numbers that the layer's output features on this rank have in the whole layer.
    """

    places: Tensor

    def __init__(self, module: LinearModule) -> None:
        super().__init__(module.ctx)
        places = output_places(module.layouts["weight"], module.ctx).to(module.weight.device)
        self.register_buffer("places", places, persistent=False)
        # Ranks that have other positions of a sequence draw numbers of their own for them.
        self.share = module.ctx.tp.rank if module.cut == "none" and module.ctx.sequence_parallel else 0

    def noise(self, tokens: int, direction: Literal["columns", "rows"], sample: int) -> Tensor:
        """Uniform in [0, 1): [tokens, features], or for a product along the rows [features, tokens]."""
        run = self.streams.seed if self.streams is not None else 0
        seed = stream_seed(run, f"rounding along {direction} of {self.site} {self.share} at sample {sample}")
        rows = torch.arange(tokens, device=self.places.device)
        if direction == "columns":
            return noise_at(seed, rows, self.places)
        return noise_at(seed, self.places, rows)


def output_places(layout: ParameterLayout, ctx: ParallelContext) -> Tensor:
    """[out features of this rank] int64: their numbers in the whole matrix [out, in]."""
    places = torch.arange(layout.padded.get(0, layout.shape[0]))
    for split in layout.splits:
        if split.dim == 0:
            axis = ctx.axis(split.axis)
            places = split.cut(places, axis.size)[axis.rank]
    return places


@dataclass(frozen=True)
class Nvfp4Scaling:
    """nvfp4: E2M1 with scales of 1 x 16 numbers along the dimension of a product, and of 16 x 16 of a weight, which has
    the same numbers in both of its products.

    rounding: gradients are rounded stochastically; None: to nearest. hadamard: both operands of the weight's gradient
    are transformed along the tokens. square_weights: else weights have scales of 1 x 16, others in each product.
    """

    rounding: GradientRounding | None
    hadamard: bool = True
    square_weights: bool = True

    def operand(
        self,
        x: Matrix,
        role: Role,
        *,
        along: Along = "columns",
        cut_over: Axis = SINGLE,
        note: bool = False,
        scale: Tensor | None = None,
        sample: int = 0,
    ) -> Operand:
        return Nvfp4Operand(x, role, self, cut_over, sample)

    def restored(self, kept: Matrix, scale: Tensor | None, role: Role, cut_over: Axis = SINGLE) -> Operand:
        return self.operand(kept, role, cut_over=cut_over)


@dataclass(frozen=True)
class Nvfp4Operand:
    """A matrix that is cast for each product. cut_over: ranks with its other shards, for its largest magnitude."""

    x: Matrix
    role: Role
    scaling: Nvfp4Scaling
    cut_over: Axis
    sample: int

    scale = None

    def kept(self) -> Matrix:
        return self.x

    def along_columns(self, map_rows: Map | None = None) -> Scaled:
        x = computed(self.x)
        scaled = self._cast(x, self._noise(len(x), "columns"))
        return scaled if map_rows is None else scaled.map_rows(map_rows)

    def along_rows(self) -> Scaled:
        x = computed(self.x)
        # The weight's own product along rows is that for the input's gradient, where nothing is transformed.
        turned = x.t() if self.role == "weight" or not self.scaling.hadamard else transformed(x.t())
        return self._cast(turned, self._noise(turned.shape[1], "rows"))

    def _cast(self, x: Tensor, noise: Tensor | None) -> Scaled:
        amax = largest_over(amax_of(x), self.cut_over)
        return cast_nvfp4(x, amax, noise, square=self.role == "weight" and self.scaling.square_weights)

    def _noise(self, tokens: int, direction: Literal["columns", "rows"]) -> Tensor | None:
        rounding = self.scaling.rounding if self.role == "gradient" else None
        return None if rounding is None else rounding.noise(tokens, direction, self.sample)
