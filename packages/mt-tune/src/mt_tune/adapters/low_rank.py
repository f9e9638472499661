"""LoRA and DoRA: y = W x + s B A x (Hu et al., 2021; Liu et al., 2024), of the parts of a fused layer each by itself.

A fused layer (queries, keys and values) has one A with the rows of all parts under each other, so that its input is
read once, and one B in the order of the layer's rows, which is divided over ranks as they are:

    h = A x                    [R], R the sum of the parts' ranks
    y = W x + (C * B[:, c]) h  C [out, R]: the scale of a row's part at the columns of the part, 0 elsewhere

A column-parallel layer has A whole on each rank and its rows of B; a row-parallel one its columns of A and B whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from mt_core.nn.layout import LayoutModule, ParameterLayout, ones, sequence_axes, zeros
from mt_core.nn.linear import LinearModule, column_parallel_linear, linear, row_parallel_linear
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.reductions import all_reduce_
from mt_tune.adapters.base import Adapter, Names, Take, Values, put
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.dropout import InputDropout
from mt_tune.adapters.targets import Layer, Part, by_pattern
from mt_tune.quantized_weights.weight import QuantizedWeight


@dataclass(frozen=True, eq=False)
class RankedPart:
    """A part with the size and the scale of its update, and its first row of A."""

    part: Part
    rank: int
    scale: float
    start: int

    @property
    def columns(self) -> slice:
        """Its rows of A."""
        return slice(self.start, self.start + self.rank)


def ranked(parts: Sequence[Part], config: AdapterConfig) -> tuple[RankedPart, ...]:
    ranked_parts: list[RankedPart] = []
    for part in parts:
        # PEFT matches the names of modules, and of parameters those of their modules.
        names = part.names if part.name is None else (part.name, *part.names)
        rank = by_pattern(config.rank_pattern, names, config.rank)
        alpha = by_pattern(config.alpha_pattern, names, config.alpha)
        scale = alpha / math.sqrt(rank) if config.rslora else alpha / rank
        ranked_parts.append(RankedPart(part, rank, scale, sum(other.rank for other in ranked_parts)))
    return tuple(ranked_parts)


class LowRankAdapter(Adapter):
    """LoRA of a layer [out, in]: lora_A [R, in], lora_B [out, largest rank]."""

    lora_A: Tensor  # noqa: N815
    lora_B: Tensor  # noqa: N815
    coefficients: Tensor | None
    columns: Tensor | None

    def __init__(self, layer: Layer, config: AdapterConfig, ctx: ParallelContext) -> None:
        super().__init__(layer, ctx)
        self.ranks = ranked(layer.parts, config)
        self.lr_ratio = config.lr_ratio
        self.total = sum(part.rank for part in self.ranks)
        self.widest = max(part.rank for part in self.ranks)
        self.dropout = InputDropout(config.dropout, self.input_splits, ctx)
        self.declare_matrices(self._init_of_a(config.init))
        whole = len(self.ranks) == 1 and len(self.ranks[0].part.rows) == self.base_layout.shape[-2]
        self.scale = self.ranks[0].scale
        self.register_buffer(
            "coefficients", None if whole else self.to_local_rows(self._coefficients()), persistent=False
        )
        columns = torch.cat([torch.arange(part.rank) for part in self.ranks])
        self.register_buffer("columns", None if whole else columns.to(ctx.device), persistent=False)

    def declare_matrices(self, init: Callable[[Tensor, torch.Generator], None]) -> None:
        base = self.base_layout
        out, inputs = base.shape
        splits = tuple(split for split in base.splits if split.dim == 1)
        # A whole matrix on ranks with different positions has a partial gradient; so has A of a column-parallel layer
        # and B of a row-parallel one under sequence parallelism.
        on_sequence = base.partial_gradient or (sequence_axes(self.ctx) if base.splits else ())
        self.declare(
            "lora_A",
            ParameterLayout((self.total, inputs), init, splits, partial_gradient=() if splits else on_sequence),
        )
        rows = self.output_splits
        self.declare(
            "lora_B",
            ParameterLayout(
                (out, self.widest),
                zeros,
                rows,
                padded=self.output_padding,
                partial_gradient=() if rows else on_sequence,
                lr_mult=self.lr_ratio,
            ),
        )

    def _init_of_a(self, name: str) -> Callable[[Tensor, torch.Generator], None]:
        parts = self.ranks

        def fill(tensor: Tensor, generator: torch.Generator) -> None:
            # kaiming_uniform_ with a = sqrt(5), as of nn.Linear; pissa and olora replace the values.
            bound = 1.0 / math.sqrt(tensor.shape[-1])
            if name != "gaussian":
                tensor.uniform_(-bound, bound, generator=generator)
                return
            for part in parts:
                tensor[..., part.columns, :].normal_(0.0, 1.0 / part.rank, generator=generator)

        return fill

    def _coefficients(self) -> Tensor:
        """C of all rows, [out, R]"""
        table = torch.zeros(self.base_layout.shape[-2], self.total)
        for part in self.ranks:
            table[part.part.rows, part.columns] = part.scale
        return table

    def wide_b(self) -> Tensor:
        """[..., rows of this rank, R], the scale included"""
        return self.wide(self.lora_B)

    def wide(self, b: Tensor) -> Tensor:
        if self.coefficients is None or self.columns is None:
            return b * self.scale
        return b.index_select(-1, self.columns) * self.coefficients.to(b.dtype)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """A [..., R, in] and B [..., rows of this rank, R], the scale included."""
        return self.lora_A, self.wide_b()

    def update(self, x: Tensor) -> Tensor:
        """s B A x as the layer's output is divided."""
        x, plain = self.dropout(x), self.coefficients is None
        # One part: the scale is applied to R numbers, and products add to the main gradient of B itself.
        b = self.lora_B if plain else self.wide_b()
        if self.output_splits:
            h = linear(x, self.lora_A, None)
            return column_parallel_linear(h * self.scale if plain else h, b, None, self.ctx)
        h = row_parallel_linear(x, self.lora_A, None, self.ctx) if self.cuts_inputs else linear(x, self.lora_A, None)
        return linear(h * self.scale if plain else h, b, None)

    def after(self, x: Tensor, out: Tensor, layer: LayoutModule, **options: Any) -> Tensor:
        # [..., : n]: an output layer leaves out the columns of padding.
        return out + self.update(x)[..., : out.shape[-1]]

    def effective_weight(self, weight: Tensor) -> Tensor:
        return weight + (self.wide_b() @ self.lora_A).to(weight.dtype)

    def merged(self, weight: Tensor, values: Values) -> Tensor:
        return weight.float() + self.canonical_update(values)

    def canonical_update(self, values: Values) -> Tensor:
        """s B A [..., out, in] in fp32"""
        a, b = values["lora_A"].float(), values["lora_B"].float()
        columns = torch.cat([torch.arange(part.rank) for part in self.ranks])
        return (b.index_select(-1, columns) * self._coefficients()) @ a

    # -- PEFT ------------------------------------------------------------------------------------------

    @classmethod
    def peft_keys(cls, all_adapters: Sequence[Any], options: AdapterConfig) -> dict[str, Any]:
        ranks: dict[str, int] = {}
        alphas: dict[str, float] = {}
        for adapter in all_adapters:
            for part in adapter.ranks:
                name = str(part.part.names[0])
                alpha = part.scale * (math.sqrt(part.rank) if options.rslora else part.rank)
                ranks |= {name: part.rank} if part.rank != options.rank else {}
                alphas |= {name: alpha} if not math.isclose(alpha, options.alpha) else {}
        return {
            "r": options.rank,
            "lora_alpha": options.alpha,
            "lora_dropout": options.dropout,
            "use_rslora": options.rslora,
            "use_dora": options.type == "dora",
            "bias": "none",
            "init_lora_weights": True,
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
        }

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        for part in self.ranks:
            name = names[part.part]
            yield f"{name}.lora_A.weight", values["lora_A"][part.columns]
            yield f"{name}.lora_B.weight", values["lora_B"][part.part.rows, : part.rank]

    def imported(self, take: Take, names: Names) -> Iterator[tuple[str, Tensor]]:
        out, inputs = self.base_layout.shape
        a, b = torch.zeros(self.total, inputs), torch.zeros(out, self.widest)
        for part in self.ranks:
            name = names[part.part]
            put(a, part.columns, take(f"{name}.lora_A.weight"), name)
            put(b, (part.part.rows, slice(part.rank)), take(f"{name}.lora_B.weight"), name)
        yield "lora_A", a
        yield "lora_B", b


def fp32_weight(layer: LayoutModule) -> Tensor:
    """This rank's part of the weight, dequantized where the base is quantized."""
    held: Any = layer.get_submodule("weight") if "weight" in layer._modules else cast(LinearModule, layer).weight
    return held.dense(torch.float32) if isinstance(held, QuantizedWeight) else cast(Tensor, held).float()


class MagnitudeAdapter(LowRankAdapter):
    """DoRA: y = m / |W + s B A| (W + s B A) x, |.| the norm of each row, which has no gradient; magnitude [out]."""

    magnitude: Tensor
    covered: Tensor | None
    takes_from_base = True

    def __init__(self, layer: Layer, config: AdapterConfig, ctx: ParallelContext) -> None:
        super().__init__(layer, config, ctx)
        self.declare("magnitude", self.output_vector(ones))
        self.register_buffer("covered", self.local_coverage(), persistent=False)

    @torch.no_grad()
    def norms(self, layer: LayoutModule) -> Tensor:
        """[rows of this rank] of the whole rows."""
        weight = fp32_weight(layer) + self.wide_b().float() @ self.lora_A.float()
        squares = weight.square().sum(-1)
        if self.cuts_inputs and self.ctx.tp.size > 1:
            all_reduce_(squares, self.ctx.tp)
        return squares.sqrt()

    def factor(self, layer: LayoutModule) -> Tensor:
        """m / |W + s B A|, 1 for rows without an adapter and for padding."""
        norms = self.norms(layer)
        factor = self.magnitude / torch.where(norms > 0, norms, 1.0).to(self.magnitude.dtype)
        return factor if self.covered is None else torch.where(self.covered, factor, 1.0)

    def after(self, x: Tensor, out: Tensor, layer: LayoutModule, **options: Any) -> Tensor:
        factor = self.factor(layer)[: out.shape[-1]]
        changed = out + self.update(x)[..., : out.shape[-1]]
        bias = getattr(layer, "bias", None)
        # The bias is not scaled.
        return changed * factor if bias is None else (changed - bias) * factor + bias

    def started(self, weight: Tensor) -> Values:
        return {"magnitude": weight.float().norm(dim=-1)}

    def effective_weight(self, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def merged(self, weight: Tensor, values: Values) -> Tensor:
        changed = super().merged(weight, values)
        factor = values["magnitude"].float() / changed.norm(dim=-1)
        return changed * self.of_covered(factor, 1.0)[:, None]

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        yield from super().exported(values, names)
        for part in self.parts:
            yield f"{names[part]}.lora_magnitude_vector", values["magnitude"][part.rows]

    def imported(self, take: Take, names: Names) -> Iterator[tuple[str, Tensor]]:
        yield from super().imported(take, names)
        magnitude = torch.ones(self.base_layout.shape[-2])
        for part in self.parts:
            put(magnitude, part.rows, take(f"{names[part]}.lora_magnitude_vector"), names[part])
        yield "magnitude", magnitude


class RouterAdapter(LowRankAdapter):
    """LoRA of a router, whose logits it adds to."""

    def __init__(self, layer: Layer, config: AdapterConfig, ctx: ParallelContext) -> None:
        super().__init__(layer, config.model_copy(update={"dropout": 0.0}), ctx)

    def update(self, x: Tensor) -> Tensor:
        # In the dtype of the logits, never below fp32.
        return torch.nn.functional.linear(
            torch.nn.functional.linear(x, self.lora_A.to(x.dtype)), self.wide_b().to(x.dtype)
        )


def with_parts(layer: Layer, parts: Sequence[Part]) -> Layer:
    return replace(layer, parts=tuple(parts))
