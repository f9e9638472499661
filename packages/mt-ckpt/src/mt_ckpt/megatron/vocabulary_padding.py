"""Padding rows of vocabulary tables: no token has their ids, but Megatron's softmax includes them.

Rows that Megatron trained are kept beside the canonical tensors, under their names behind `padding.`, with the
optimizer's state. Where there are none they are made. Their logits go into the reader's loss:
loss = log(sum of exp over ids and padding) - logit of the label, so that the best rows are those whose logits are low
for every hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mt_ckpt.megatron.names import EMBEDDING, OUTPUT
from mt_ckpt.megatron.optimizer import MAIN
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader, VocabPadding
from mt_core.errors import ConfigError

PADDING = "padding."
"""Beginning of the name of rows beyond the vocabulary; the name of their tensor follows."""
OUTPUT_BIAS = "output_layer.bias"
FINAL_NORM = "decoder.final_layernorm."
LOW_BIAS = -1e4
"""The value with which Megatron masks attention; every dtype of weights holds it."""
MARGIN = 50.0
"""Natural logarithms by which a logit of padding is below the sum of the others."""
BLOCK_ROWS = 1 << 14


class Rows(Protocol):
    """Makes `count` rows below a table [vocab, ...]."""

    def __call__(self, name: str, table: Tensor, count: int) -> Tensor: ...


@dataclass(frozen=True)
class Padding:
    """policy: what `rows` makes. keep: whether rows that the source has come first."""

    policy: VocabPadding
    rows: Rows
    keep: bool

    def pad(self, source: CheckpointReader, stored_name: str, name: str, state: str | None, num_rows: int) -> Tensor:
        """A table, its bias or a state of their shape with `num_rows` rows.

        stored_name: of the tensor in the source; name: of the parameter. Moments of rows that are made are zero.
        """
        shapes, beside = source.shapes(), PADDING + stored_name
        names = [stored_name, beside] if self.keep and beside in shapes else [stored_name]
        missing = num_rows - sum(shapes[part][0] for part in names)
        new_rows = (
            [self._made(source, stored_name, name, state, missing)] if missing > 0 else []
        )  # before a table is held
        # [:num_rows]: rows that the source has beyond the target's padding are dropped.
        return torch.cat([*(source.read(part) for part in names), *new_rows])[:num_rows]

    def _made(self, source: CheckpointReader, stored_name: str, name: str, state: str | None, count: int) -> Tensor:
        """Weights; for a copy of weights of 16 bits these very numbers; for moments zeros."""
        dtype, (_, *below) = source.dtypes()[stored_name], source.shapes()[stored_name]
        if state not in (None, MAIN):
            return torch.zeros(count, *below, dtype=dtype)
        return self.rows(name, source.read(MODEL + name), count).to(dtype)


def choose_padding(source: CheckpointReader, parameters: Mapping[str, object], asked: VocabPadding | None) -> Padding:
    """parameters: canonical names of the model's. asked: None keeps rows that the source has, and makes others so that
    the loss is the model's.

    Raises ConfigError for minus-inf-like rows of a model that cannot have them.
    """
    low = _low_rows(source, parameters)
    if asked == "minus-inf-like" and low is None:
        raise ConfigError(
            "--vocab-padding minus-inf-like: no row of this model has a low logit for every hidden state, since it has "
            "neither an output bias nor a final LayerNorm with a bias; use mean, whose rows add at most "
            "log(padded / vocabulary) to the loss"
        )
    policy = asked or ("mean" if low is None else "minus-inf-like")
    simple: dict[VocabPadding, Rows] = {"repeat-last": _repeat_last, "mean": _mean, "zero": _zero}
    return Padding(policy, low if policy == "minus-inf-like" else simple[policy], keep=asked is None)  # type: ignore[arg-type]


def _repeat_last(name: str, table: Tensor, count: int) -> Tensor:
    return table[-1:].expand(count, *table.shape[1:])


def _zero(name: str, table: Tensor, count: int) -> Tensor:
    return table.new_zeros(count, *table.shape[1:])


def _mean(name: str, table: Tensor, count: int) -> Tensor:
    """A logit that is the mean of the others: exp of it is at most their mean, by Jensen's inequality."""
    # fp64 in blocks: the sum of 100,000 bf16 rows in fp32 would lose digits, and one fp64 copy of the table is four
    # times its size.
    total = torch.stack([rows.sum(0, dtype=torch.float64) for rows in table.split(BLOCK_ROWS)]).sum(0)
    return (total / len(table)).to(table.dtype).expand(count, *table.shape[1:])


# -- low logits ----------------------------------------------------------------------------------------


def _low_rows(source: CheckpointReader, parameters: Mapping[str, object]) -> Rows | None:
    """Rows whose logits are low whatever the hidden state is; None for a model that cannot have them."""
    # A bias alone makes the logit low; the rows are zeros.
    if OUTPUT_BIAS in parameters:
        return _low_bias
    head = OUTPUT if OUTPUT in parameters else EMBEDDING
    if FINAL_NORM + "bias" not in parameters:
        return None
    # h = weight * n + bias, n = (x - mean) / std: n sums to 0, so that sum(h / weight) = sum(bias / weight) for every
    # x. That constant is what a row in this direction multiplies.
    weight, bias = (source.read(MODEL + FINAL_NORM + kind).double() for kind in ("weight", "bias"))
    direction = _constant_direction(weight, bias, source.dtypes()[MODEL + head])
    return None if direction is None else _LowTable(head, weight, bias, direction)


def _low_bias(name: str, table: Tensor, count: int) -> Tensor:
    return torch.full_like(_zero(name, table, count), LOW_BIAS) if name == OUTPUT_BIAS else _zero(name, table, count)


def _constant_direction(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor | None:
    """v with v . h = 1 for every output h = weight * n + bias of a LayerNorm: 1 / weight, scaled, since n has mean 0.

    None where rounding to `dtype`, of v or of h, could hide it.
    """
    if not weight.abs().min() > 0:
        return None
    inverse = 1 / weight
    constant = inverse @ bias
    # Errors of the products in `dtype`: about eps for each of the len(weight) terms, and for those of the bias.
    doubtful = torch.finfo(dtype).eps * (len(weight) + (bias * inverse).abs().sum())
    return inverse / constant if constant.abs() > 2 * doubtful else None


@dataclass(frozen=True)
class _LowTable:
    """Rows of the table that logits are made of, behind a final LayerNorm."""

    head: str
    weight: Tensor
    bias: Tensor
    direction: Tensor

    def __call__(self, name: str, table: Tensor, count: int) -> Tensor:
        mean = _mean(name, table, 1)
        if name != self.head:
            return mean.expand(count, -1)
        # row . h = logit * (direction . h) = logit, for every h.
        row = self._logit(mean[0].double()) * self.direction
        return row.to(table.dtype).expand(count, -1)

    def _logit(self, mean: Tensor) -> float:
        """Below the mean of the logits of every hidden state, twice as far as it must be, for rounding.

        n of a LayerNorm is at most as long as the square root of its width.
        """
        # mean . h = mean . bias + (mean * weight) . n >= mean . bias - |mean * weight| sqrt(width), by Cauchy-Schwarz.
        lowest = mean @ self.bias - len(mean) ** 0.5 * (mean * self.weight).norm()
        return 2 * min(float(lowest), 0.0) - 2 * MARGIN
