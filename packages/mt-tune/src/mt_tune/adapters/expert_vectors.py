"""IA3 and VeRA of the matrices of experts: vectors for each expert. Biases of experts are not scaled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, ones, zeros
from mt_tune.adapters.base import Names, Take, Values, put
from mt_tune.adapters.experts import expert_layout, expert_vector, of_expert, of_present, of_rows, refuse_fused
from mt_tune.adapters.vectors import ScalingAdapter, VectorAdapter


class ScalingExpertsAdapter(ScalingAdapter):
    """IA3 of experts: scaling [E, out], or [E, in] where inputs are scaled."""

    multiplies_rows = True

    def scaling_layout(self) -> ParameterLayout:
        return expert_vector(self.base_layout, 2 if self.scales_input else 1, ones)

    def before(self, x: Tensor, groups: Any = None) -> Tensor:
        return x * of_rows(self.scaling, groups, len(x), 1.0) if self.scales_input else x

    def after(self, x: Tensor, out: Tensor, layer: LayoutModule, **options: Any) -> Tensor:
        if self.scales_input:
            return out
        scaling = self.scaling if self.covered is None else torch.where(self.covered, self.scaling, 1.0)
        return out * of_rows(scaling, options["groups"], len(out), 1.0)

    def merged_bias(self, bias: Tensor, values: Values) -> Tensor:
        return bias.float()

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        refuse_fused(self, "IA3")
        for part in self.parts:
            for expert, vector in enumerate(values["scaling"]):
                stored = vector[None] if self.scales_input else vector[part.rows][:, None]
                yield f"{of_expert(names[part], expert)}.ia3_l", stored

    def imported(self, take: Take, names: Names) -> Iterator[tuple[str, Tensor]]:
        scaling = torch.ones(self.layouts["scaling"].shape)
        for part in self.parts:
            for expert in range(len(scaling)):
                rows = slice(None) if self.scales_input else part.rows
                name = of_expert(names[part], expert)
                put(scaling, (expert, rows), take(f"{name}.ia3_l").flatten(), name)
        yield "scaling", scaling


class VectorExpertsAdapter(VectorAdapter):
    """VeRA of experts: lambda_b [E, out] and lambda_d [E, parts x rank]; A and B are those of all layers."""

    multiplies_rows = True

    def declare_vectors(self, init: Init) -> None:
        self.declare("lambda_b", expert_vector(self.base_layout, 1, zeros))
        shape = (self.base_layout.shape[0], self.rank * len(self.parts))
        self.declare("lambda_d", expert_layout(self.base_layout, shape, init, ()))

    def after(self, x: Tensor, out: Tensor, layer: LayoutModule, **options: Any) -> Tensor:
        groups = options["groups"]
        reduced = of_present(F.linear(x, self.projection_a), groups)
        h = torch.cat([reduced] * len(self.parts), -1) * of_rows(self.lambda_d, groups, len(x), 0.0)
        update = F.linear(h, self.projection_b)
        return out + update * of_rows(self.lambda_b, groups, len(out), 0.0)

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        refuse_fused(self, "VeRA")
        for number, part in enumerate(self.parts):
            columns = slice(number * self.rank, (number + 1) * self.rank)
            for expert in range(self.base_layout.shape[0]):
                name = of_expert(names[part], expert)
                yield f"{name}.vera_lambda_b", values["lambda_b"][expert, part.rows]
                yield f"{name}.vera_lambda_d", values["lambda_d"][expert, columns]

    def imported(self, take: Take, names: Names) -> Iterator[tuple[str, Tensor]]:
        b, d = (torch.zeros(self.layouts[f"lambda_{name}"].shape) for name in "bd")
        for number, part in enumerate(self.parts):
            columns = slice(number * self.rank, (number + 1) * self.rank)
            for expert in range(len(b)):
                name = of_expert(names[part], expert)
                put(b, (expert, part.rows), take(f"{name}.vera_lambda_b"), name)
                put(d, (expert, columns), take(f"{name}.vera_lambda_d"), name)
        yield "lambda_b", b
        yield "lambda_d", d
