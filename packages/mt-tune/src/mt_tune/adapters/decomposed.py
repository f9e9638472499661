"""LoRA that starts from a decomposition of the weight: PiSSA (Meng et al., 2024) and OLoRA (Büyükakyüz, 2024).

Both reduce the base by the initial update. Here the base stays as it is and the layer subtracts the initial update:
y = W x + s (B A - B0 A0) x is the same function with the same gradients. So the base may be shared and is never rounded
again, and what is exported is a plain LoRA of twice the rank on the original base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mt_core.nn.linear import column_parallel_linear, linear, row_parallel_linear
from mt_core.parallel.context import ParallelContext
from mt_tune.adapters.base import Names, Take, Values
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.experts import ExpertsAdapter
from mt_tune.adapters.low_rank import LowRankAdapter, RankedPart
from mt_tune.adapters.targets import Layer


class DecomposedAdapter(LowRankAdapter):
    """initial_A and initial_B: the values that lora_A and lora_B started from, which are not trained."""

    initial_A: Tensor  # noqa: N815
    initial_B: Tensor  # noqa: N815
    takes_from_base = True

    def __init__(self, layer: Layer, config: AdapterConfig, ctx: ParallelContext) -> None:
        super().__init__(layer, config, ctx)
        self.method = config.init
        for name in ("A", "B"):
            self.declare(f"initial_{name}", replace(self.layouts[f"lora_{name}"], trained=False))

    def started(self, weight: Tensor) -> Values:
        a, b = torch.zeros(self.total, weight.shape[1]), torch.zeros(len(weight), self.widest)
        for part in self.ranks:
            left, right = decomposed(weight[part.part.rows].float(), part.rank, part.scale, self.method)
            a[part.columns], b[part.part.rows, : part.rank] = right, left
        return {"lora_A": a, "lora_B": b, "initial_A": a, "initial_B": b}

    def pairs(self) -> tuple[Tensor, Tensor]:
        """A [..., 2 R, in] and B [..., rows of this rank, 2 R] of both updates, the initial one with a minus."""
        return torch.cat((self.lora_A, self.initial_A), -2), torch.cat((self.wide_b(), -self.wide(self.initial_B)), -1)

    def update(self, x: Tensor) -> Tensor:
        x, (a, b) = self.dropout(x), self.pairs()
        h = row_parallel_linear(x, a, None, self.ctx) if self.cuts_inputs else linear(x, a, None)
        return column_parallel_linear(h, b, None, self.ctx) if self.output_splits else linear(h, b, None)

    def effective_weight(self, weight: Tensor) -> Tensor:
        a, b = self.pairs()
        return weight + (b @ a).to(weight.dtype)

    def canonical_update(self, values: Values) -> Tensor:
        initial = {"lora_A": values["initial_A"], "lora_B": values["initial_B"]}
        return super().canonical_update(values) - super().canonical_update(initial)

    # -- PEFT: a LoRA of twice the rank ------------------------------------------------------------------

    @classmethod
    def peft_keys(cls, all_adapters: Sequence[Any], options: AdapterConfig) -> dict[str, Any]:
        keys = super().peft_keys(all_adapters, options)
        # alpha / rank stays: of rsLoRA alpha / sqrt(2 rank), so that alpha grows by sqrt(2).
        factor = 2**0.5 if options.rslora else 2
        return {
            **keys,
            "r": 2 * keys["r"],
            "lora_alpha": factor * keys["lora_alpha"],
            "rank_pattern": {name: 2 * rank for name, rank in keys["rank_pattern"].items()},
            "alpha_pattern": {name: factor * alpha for name, alpha in keys["alpha_pattern"].items()},
        }

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        initial = {"lora_A": values["initial_A"], "lora_B": -values["initial_B"]}
        both = zip(super().exported(values, names), super().exported(initial, names), strict=True)
        for (name, trained), (_, first) in both:
            yield name, torch.cat((trained, first), 0 if ".lora_A." in name else 1)

    def imported(self, take: Take, names: Names) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError  # a folder holds a plain LoRA


class DecomposedExpertsAdapter(DecomposedAdapter, ExpertsAdapter):
    """PiSSA and OLoRA of the matrix of each expert, or with adapter.experts=fused of its parts as one matrix."""

    def started(self, weight: Tensor) -> Values:
        a, b = (torch.zeros(self.layouts[f"lora_{name}"].shape) for name in "AB")
        for expert, part in product(range(len(weight)), self.ranks):
            matrix = weight[expert, part.part.rows].float()
            left, right = decomposed(matrix, part.rank, part.scale, self.method)
            a[expert, part.columns], b[expert, part.part.rows, : part.rank] = right, left
        return {"lora_A": a, "lora_B": b, "initial_A": a, "initial_B": b}

    def stacked_pair(self, part: RankedPart, values: Values) -> tuple[Tensor, Tensor]:
        initial = {"lora_A": values["initial_A"], "lora_B": -values["initial_B"]}
        pairs = ExpertsAdapter.stacked_pair(self, part, values), ExpertsAdapter.stacked_pair(self, part, initial)
        (a, b), (first_a, first_b) = pairs
        return torch.cat((a, first_a), 1), torch.cat((b, first_b), 2)

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        return ExpertsAdapter.exported(self, values, names)


def decomposed(weight: Tensor, rank: int, scale: float, method: str) -> tuple[Tensor, Tensor]:
    """B [out, rank] and A [rank, in] of the initial update of a weight [out, in] in fp32."""
    if method == "olora":
        q, r = torch.linalg.qr(weight)
        return q[:, :rank], r[:rank]
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    roots = (values[:rank] / scale).sqrt()
    return left[:, :rank] * roots, roots[:, None] * right[:rank]
