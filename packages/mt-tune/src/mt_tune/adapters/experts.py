"""LoRA and DoRA of the matrices of experts. All products are grouped by expert as the layer's own is.

Rows that belong to no expert are undefined, in outputs and in gradients: what multiplies all rows by one matrix leaves
them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.nn.layout import LayoutModule, ParameterLayout, Split, ones, zeros
from mt_core.nn.linear import linear
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.reductions import all_reduce_
from mt_tune.adapters.base import Adapter, Names, Take, Values, put
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.low_rank import LowRankAdapter, RankedPart, fp32_weight
from mt_tune.adapters.targets import FIRST_EXPERT, Layer


class ExpertsAdapter(LowRankAdapter):
    """LoRA of the matrices of E experts [E, out, in]: lora_A [E, R, in], lora_B [E, out, rank].

    R: the sum of the ranks of the matrix's parts (gate and up have a factor A each). rank: the largest of them.
    """

    product: Any
    """A GroupedProduct of mt_moe, which this package does not import."""

    def __init__(self, layer: Layer, config: AdapterConfig, ctx: ParallelContext) -> None:
        super().__init__(layer, config.model_copy(update={"dropout": 0.0}), ctx)
        self.product = layer.module.product  # before FP8 or a quantized one takes its place

    def declare_matrices(self, init: Any) -> None:
        experts, out, inputs = self.base_layout.shape
        columns, rows = splits_of(self.base_layout, 2), splits_of(self.base_layout, 1)
        a = expert_layout(self.base_layout, (experts, self.total, inputs), init, columns)
        b = expert_layout(self.base_layout, (experts, out, self.widest), zeros, rows)
        self.declare("lora_A", a)
        self.declare("lora_B", replace(b, lr_mult=self.lr_ratio))

    def after(self, x: Tensor, out: Tensor, layer: LayoutModule, **options: Any) -> Tensor:
        groups, read, written = options["groups"], options.get("read"), options.get("written")
        product, (a, b) = self.product, self.pairs()
        h = product(x, a, groups) if read is None else product.of_tokens(x, a, groups, read)
        return out + (product(h, b, groups) if written is None else product.to_tokens(h, b, groups, written))

    # -- PEFT: fused parameters, or modules for each expert ---------------------------------------------

    def stacked_pair(self, part: RankedPart, values: Values) -> tuple[Tensor, Tensor]:
        """A [E, rank, in] and B [E, rows of the part, rank] of canonical values."""
        return values["lora_A"][:, part.columns], values["lora_B"][:, part.part.rows, : part.rank]

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        for part in self.ranks:
            a, b = self.stacked_pair(part, values)
            if part.part.parameter is not None:
                # A expert-major, B with the expert fastest.
                yield f"{names[part.part]}.lora_A.weight", a.flatten(0, 1)
                yield f"{names[part.part]}.lora_B.weight", b.permute(1, 2, 0).flatten(1)
                continue
            for expert in range(len(a)):
                name = of_expert(names[part.part], expert)
                yield f"{name}.lora_A.weight", a[expert]
                yield f"{name}.lora_B.weight", b[expert]

    def imported(self, take: Take, names: Names) -> Iterator[tuple[str, Tensor]]:
        experts, out, inputs = self.base_layout.shape
        a, b = torch.zeros(experts, self.total, inputs), torch.zeros(experts, out, self.widest)
        for part in self.ranks:
            name = names[part.part]
            if part.part.parameter is not None:
                stored = take(f"{name}.lora_A.weight"), take(f"{name}.lora_B.weight")
                halves = stored[0].unflatten(0, (experts, -1)), stored[1].unflatten(1, (-1, experts)).permute(2, 0, 1)
                put(a, (slice(None), part.columns), halves[0], name)
                put(b, (slice(None), part.part.rows, slice(part.rank)), halves[1], name)
                continue
            for expert in range(experts):
                single = of_expert(name, expert)
                put(a, (expert, part.columns), take(f"{single}.lora_A.weight"), single)
                put(b, (expert, part.part.rows, slice(part.rank)), take(f"{single}.lora_B.weight"), single)
        yield "lora_A", a
        yield "lora_B", b


class SharedOuterAdapter(ExpertsAdapter):
    """LoRA of experts in which all experts of a layer share the factor on the side of the hidden size (Thinking
    Machines, 2025): A of the first matrix [R, in], and B of the second one [out, rank].

    In files each factor is a stack: of 1 matrix where it is shared, of E (the number of experts) else, as in
    `experts.w1.lora_A.weight` [1, rank, in] and `experts.w1.lora_B.weight` [E, out, rank].
    """

    @property
    def shares_inputs(self) -> bool:
        """Whether A is shared: in the matrix whose outputs expert tensor parallelism divides, the first one."""
        return bool(self.output_splits)

    def declare_matrices(self, init: Any) -> None:
        super().declare_matrices(init)
        name = "lora_A" if self.shares_inputs else "lora_B"
        layout = self.layouts[name]
        # Each rank's rows are of its experts and, with expert tensor parallelism, a part of their features.
        shared = replace(layout, shape=layout.shape[1:], splits=(), partial_gradient=("etp", "ep"))
        self.declare(name, shared)

    def after(self, x: Tensor, out: Tensor, layer: LayoutModule, **options: Any) -> Tensor:
        groups, read, written = options["groups"], options.get("read"), options.get("written")
        product, (a, b) = self.product, self.pairs()
        if self.shares_inputs and read is not None:
            return out + product.of_tokens(linear(x, a, None), b, groups, read)
        if self.shares_inputs:
            return out + product(of_present(linear(x, a, None), groups), b, groups)
        if written is not None:  # the sum of a token's rows, which the shared matrix multiplies once
            return out + linear(product.to_tokens(x, a, groups, written), b, None)
        h = of_present(product(x, a, groups), groups)
        return out + of_present(linear(h, b, None), groups)

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        for part in self.ranks:
            a, b = values["lora_A"][..., part.columns, :], values["lora_B"][..., part.part.rows, : part.rank]
            name = part.part.aliases[-1]
            yield f"{name}.lora_A.weight", a if a.ndim == 3 else a[None]
            yield f"{name}.lora_B.weight", b if b.ndim == 3 else b[None]

    def imported(self, take: Take, names: Names) -> Iterator[tuple[str, Tensor]]:
        a, b = (torch.zeros(self.layouts[f"lora_{name}"].shape) for name in "AB")
        stacks = a if a.ndim == 3 else a[None], b if b.ndim == 3 else b[None]
        for part in self.ranks:
            name = part.part.aliases[-1]
            put(stacks[0], (slice(None), part.columns), take(f"{name}.lora_A.weight"), name)
            put(stacks[1], (slice(None), part.part.rows, slice(part.rank)), take(f"{name}.lora_B.weight"), name)
        yield "lora_A", a
        yield "lora_B", b


class MagnitudeExpertsAdapter(ExpertsAdapter):
    """DoRA of experts: y = m / |W + s B A| (W + s B A) x for each expert; magnitude [E, out]."""

    magnitude: Tensor
    covered: Tensor | None
    takes_from_base = True
    multiplies_rows = True

    def __init__(self, layer: Layer, config: AdapterConfig, ctx: ParallelContext) -> None:
        super().__init__(layer, config, ctx)
        self.declare("magnitude", expert_vector(self.base_layout, 1, ones))
        self.register_buffer("covered", self.local_coverage(), persistent=False)

    @torch.no_grad()
    def factor(self, layer: LayoutModule) -> Tensor:
        """1 / |W + s B A| [experts, rows] of this rank"""
        weight = fp32_weight(layer) + self.wide_b().float() @ self.lora_A.float()
        squares = weight.square().sum(-1)
        if self.cuts_inputs:
            all_reduce_(squares, self.ctx.axis("etp"))
        norms = squares.sqrt()
        return 1.0 / torch.where(norms > 0, norms, 1.0)

    def after(self, x: Tensor, out: Tensor, layer: LayoutModule, **options: Any) -> Tensor:
        changed = super().after(x, out, layer, **options)
        factor = self.magnitude * self.factor(layer).to(self.magnitude.dtype)
        factor = factor if self.covered is None else torch.where(self.covered, factor, 1.0)
        return changed * of_rows(factor, options["groups"], len(changed), 1.0)

    def started(self, weight: Tensor) -> Values:
        return {"magnitude": weight.float().norm(dim=-1)}

    def merged(self, weight: Tensor, values: Values) -> Tensor:
        changed = super().merged(weight, values)
        factor = values["magnitude"].float() / changed.norm(dim=-1)
        return changed * self.of_covered(factor, 1.0)[..., None]

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        refuse_fused(self, "DoRA")
        yield from super().exported(values, names)
        for part in self.parts:
            for expert, vector in enumerate(values["magnitude"]):
                yield f"{of_expert(names[part], expert)}.lora_magnitude_vector", vector[part.rows]

    def imported(self, take: Take, names: Names) -> Iterator[tuple[str, Tensor]]:
        yield from super().imported(take, names)
        magnitude = torch.ones(self.base_layout.shape[:2])
        for part in self.parts:
            for expert in range(len(magnitude)):
                name = of_expert(names[part], expert)
                put(magnitude, (expert, part.rows), take(f"{name}.lora_magnitude_vector"), name)
        yield "magnitude", magnitude


# -- layouts of what experts have ----------------------------------------------------------------------------


def splits_of(base: ParameterLayout, dim: int) -> tuple[Split, ...]:
    return tuple(split for split in base.splits if split.dim == dim)


def expert_layout(
    base: ParameterLayout, shape: tuple[int, ...], init: Any, features: tuple[Split, ...]
) -> ParameterLayout:
    """Layout of a parameter [E, ...] beside a matrix [E, out, in]. features: splits of its other dimensions.

    Outputs of the second matrix, and gradients of inputs of the first, are partial sums over etp, which the dispatcher
    adds; so are the gradients of what each of these ranks has whole.
    """
    partial: Any = () if features else ("etp",)
    by_expert = splits_of(base, 0)
    return ParameterLayout(shape, init, (*by_expert, *features), partial_gradient=partial, replicas=base.replicas)


def expert_vector(base: ParameterLayout, dim: int, init: Any) -> ParameterLayout:
    """Layout of a number for each expert and each output (dim 1) or input (dim 2) feature, [E, features]."""
    features = tuple(replace(split, dim=1) for split in splits_of(base, dim))
    return expert_layout(base, (base.shape[0], base.shape[dim]), init, features)


# -- rows of experts -------------------------------------------------------------------------------------------


def of_rows(table: Tensor, groups: Any, rows: int, other: float) -> Tensor:
    """table [experts, n] -> [rows, n], that of each row's expert, and `other` for rows of none."""
    return torch.where(groups.present(rows)[:, None], table[groups.numbers(rows)], other)


def of_present(x: Tensor, groups: Any) -> Tensor:
    """x [rows, n] with zeros in rows of no expert, forward and backward."""
    return torch.where(groups.present(len(x))[:, None], x, 0.0)


def of_expert(name: str, expert: int) -> str:
    """The name of an expert's module from that of the first."""
    head, _, tail = name.rpartition(FIRST_EXPERT)
    return f"{head}.experts.{expert}.{tail}"


def refuse_fused(adapter: Adapter, kind: str) -> None:
    """Raise ConfigError for experts whose adapter PEFT would have to hold on a parameter of all of them."""
    fused = next((part for part in adapter.parts if part.parameter is not None), None)
    if fused is not None:
        raise ConfigError(
            f"--saver peft: {adapter.layer_path} has {kind}, and PEFT's target_parameters, by which it adapts "
            f"{fused.name}.{fused.parameter}, hold plain LoRA alone. Merge it (mt ckpt merge-adapter), or train with "
            "adapter.experts=per_expert, whose folders PEFT loads where each expert is a module of its own"
        )
