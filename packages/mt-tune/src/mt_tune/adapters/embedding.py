"""Adapters of token embeddings and of the LM head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.embedding import VocabParallelEmbedding
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal, sequence_axes, zeros
from mt_core.nn.linear import leave_tensor_parallel, linear
from mt_core.parallel.context import AxisName, ParallelContext
from mt_tune.adapters.base import NAME, Adapter, Names, Take, Values, put
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.low_rank import LowRankAdapter, ranked
from mt_tune.adapters.targets import Layer


class EmbeddingAdapter(Adapter):
    """LoRA of token embeddings: e = W[id] + s B A[id]; A [vocab, rank] starts at zero, B [hidden, rank] is normal."""

    lora_A: Tensor  # noqa: N815
    lora_B: Tensor  # noqa: N815

    def __init__(self, layer: Layer, config: AdapterConfig, ctx: ParallelContext) -> None:
        super().__init__(layer, ctx)
        (part,) = self.ranks = ranked(layer.parts, config)
        self.rank, self.scale, base = part.rank, part.scale, layer.layout
        self.declare("lora_A", replace(base, shape=(base.shape[0], self.rank), init=zeros, trained=True))
        shape = (base.shape[1], self.rank)
        b = ParameterLayout(shape, normal(1.0), partial_gradient=sequence_axes(ctx), lr_mult=config.lr_ratio)
        self.declare("lora_B", b)

    def after(self, x: Tensor, out: Tensor, layer: LayoutModule, **options: Any) -> Tensor:
        ids = cast(VocabParallelEmbedding, layer).range
        first, last = ids.start, ids.stop
        elsewhere = (x < first) | (x >= last)
        local = F.embedding((x - first).masked_fill(elsewhere, 0), self.lora_A).masked_fill(elsewhere[..., None], 0.0)
        h = local if self.ctx.tp.size == 1 else leave_tensor_parallel(local, self.ctx)
        return out + linear(h * self.scale, self.lora_B, None)

    def merged(self, weight: Tensor, values: Values) -> Tensor:
        return weight.float() + self.scale * values["lora_A"].float() @ values["lora_B"].float().T

    @classmethod
    def peft_keys(cls, all_adapters: Sequence[Any], options: AdapterConfig) -> dict[str, Any]:
        return LowRankAdapter.peft_keys(all_adapters, options)

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        (part,) = self.parts
        yield f"{names[part]}.lora_embedding_A", values["lora_A"].T
        yield f"{names[part]}.lora_embedding_B", values["lora_B"]

    def imported(self, take: Take, names: Names) -> Iterator[tuple[str, Tensor]]:
        (part,) = self.parts
        a, b = (torch.zeros(self.layouts[f"lora_{name}"].shape) for name in "AB")
        put(a, slice(None), take(f"{names[part]}.lora_embedding_A").T, names[part])
        put(b, slice(None), take(f"{names[part]}.lora_embedding_B"), names[part])
        yield "lora_A", a
        yield "lora_B", b


class TokenRowsAdapter(Adapter):
    """Rows of the embedding that are trained in place of the base's: rows [ids, hidden]. A tied head has them too."""

    rows: Tensor
    numbers: Tensor
    peft_type = "TRAINABLE_TOKENS"
    takes_from_base = True
    covers_tied_weight = True

    def __init__(self, layer: Layer, config: AdapterConfig, ctx: ParallelContext) -> None:
        super().__init__(layer, ctx)
        self.ids, self.is_alone = list(config.trainable_token_indices), config.type == "trainable_tokens"
        vocab_size, hidden = layer.layout.shape
        if max(self.ids) >= vocab_size:
            raise ConfigError(
                f"adapter.trainable_token_indices has {max(self.ids)}, and the vocabulary {vocab_size} ids, from 0"
            )
        # Each rank computes with the rows of its ids alone.
        partial_axes: tuple[AxisName, ...] = ("tp",) if ctx.tp.size > 1 else ()
        layout = ParameterLayout((len(self.ids), hidden), zeros, partial_gradient=partial_axes)
        self.declare("rows", layout)
        self.register_buffer("numbers", torch.tensor(self.ids, device=ctx.device), persistent=False)

    def started(self, weight: Tensor) -> Values:
        return {"rows": weight[self.ids]}

    def after(self, x: Tensor, out: Tensor, layer: LayoutModule, **options: Any) -> Tensor:
        matches = x[..., None] == self.numbers  # [B, S, ids]
        is_listed, rows = matches.any(-1), F.embedding(matches.int().argmax(-1), self.rows)
        if self.ctx.tp.size == 1:
            return torch.where(is_listed[..., None], rows, out)
        embedding = cast(VocabParallelEmbedding, layer)
        ids = embedding.range
        is_listed = is_listed & (x >= ids.start) & (x < ids.stop)
        base = F.embedding((x - ids.start).masked_fill(~is_listed, 0), embedding.weight)
        return out + leave_tensor_parallel((rows - base).masked_fill(~is_listed[..., None], 0.0), self.ctx)

    def effective_weight(self, weight: Tensor) -> Tensor:
        """With the rows of this rank's ids."""
        start = self.ctx.tp.rank * len(weight)
        is_local = (self.numbers >= start) & (self.numbers < start + len(weight))
        return weight.index_copy(0, self.numbers[is_local] - start, self.rows[is_local])

    def merged(self, weight: Tensor, values: Values) -> Tensor:
        return weight.float().index_copy(0, torch.tensor(self.ids), values["rows"].float())

    @classmethod
    def peft_keys(cls, all_adapters: Sequence[Any], options: AdapterConfig) -> dict[str, Any]:
        return {"token_indices": options.trainable_token_indices, "init_weights": True}

    def _name(self, names: Names) -> str:
        (part,) = self.parts
        return f"{names[part]}{'' if self.is_alone else '.token_adapter'}.trainable_tokens_delta"

    def exported(self, values: Values, names: Names) -> Iterator[tuple[str, Tensor]]:
        yield self._name(names), values["rows"]

    def imported(self, take: Take, names: Names) -> Iterator[tuple[str, Tensor]]:
        rows = torch.zeros(self.layouts["rows"].shape)
        put(rows, slice(None), take(self._name(names)), self._name(names))
        yield "rows", rows


class OutputAdapter(LowRankAdapter):
    """LoRA of the LM head, by its whole effective weight: losses that make no logits take it as they take the base's.

    A has a part of its gradient on each tensor-parallel rank, that of the rank's rows.
    """

    def __init__(self, layer: Layer, config: AdapterConfig, ctx: ParallelContext) -> None:
        super().__init__(layer, config.model_copy(update={"dropout": 0.0}), ctx)

    def declare_matrices(self, init: Any) -> None:
        super().declare_matrices(init)
        partial_axes: tuple[AxisName, ...] = ("tp",) if self.ctx.tp.size > 1 else ()
        self.layouts["lora_A"] = replace(self.layouts["lora_A"], partial_gradient=partial_axes)


# -- the LM head, whose weight the model multiplies by itself -------------------------------------------------


def adapt_output(model: nn.Module, adapter: Adapter, layer: LayoutModule, *, is_tied: bool) -> None:
    """Have the model compute logits with the effective weight. Raises ConfigError for one that has no LM head."""
    if not hasattr(model, "unprojected"):
        raise ConfigError(f"{type(model).__name__} has no LM head that adapters serve; add it to adapter.excluded")
    if layer._modules.get(NAME) is not adapter:
        layer.add_module("output_adapter" if is_tied else NAME, adapter)
    model.unprojected = partial(_with_effective_weight, adapter, model.unprojected)  # type: ignore[assignment, arg-type]


def _with_effective_weight(adapter: Adapter, unprojected: Callable[[Tensor], Any], x: Tensor) -> Any:
    output = unprojected(x)
    return replace(output, weight=adapter.effective_weight(output.weight)) if adapter.is_on else output
