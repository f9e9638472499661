"""Log-probabilities of tokens by a policy and the entropy of its distributions, from logits or from hidden states at
the positions that count alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.nn.loss import Loss, Unprojected, counted_rows, seen_labels
from mt_core.parallel.context import Axis
from mt_core.parallel.reductions import all_reduce_
from mt_core.train.auto_choices import needs_logits
from mt_tune.rl.samples import SAMPLED


@torch.no_grad()
def entropy(logits: Tensor, tp: Axis) -> Tensor:
    """[B, S, ids of this rank] in fp32 -> [B, S] in nats."""
    largest = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], float("-inf"))
    if tp.size > 1:
        all_reduce_(largest, tp, "max")
    shifted = logits - largest[..., None]
    exponentials = shifted.exp()
    # log Z - sum(p z); masked ids have -inf and probability 0.
    products = torch.where(exponentials > 0, shifted, 0.0) * exponentials
    sums = torch.stack((exponentials.sum(-1), products.sum(-1)))
    if tp.size > 1:
        all_reduce_(sums, tp)
    return sums[0].log() - sums[1] / sums[0]


ROWS_OF_ENTROPY = 128
"""Rows of logits at a time, so that what is computed of them takes little memory."""


@dataclass(frozen=True)
class FoundLogps:
    """values: [B, S] fp32 log-probabilities of labels, 0 at positions without logits. logits [N, ids of this rank],
    divided by the temperature. places [N]: their positions in B x S; None: all, in order."""

    values: Tensor
    logits: Tensor
    places: Tensor | None

    @torch.no_grad()
    def entropies(self, tp: Axis) -> Tensor:
        """[B, S] in nats, 0 at positions without logits."""
        parts = [entropy(part.float(), tp) for part in self.logits.detach().split(ROWS_OF_ENTROPY)]
        return _placed(torch.cat(parts), self.places, self.values.shape)


class TokenLogps:
    """(output, batch) -> log-probabilities of the labels [B, S] in fp32, of logits divided by the temperature.

    A model that gives hidden states in place of logits (see `project_drawn_alone`) is projected at drawn tokens alone.
    """

    def __init__(self, token_loss: Loss, temperature: float) -> None:
        self.token_loss, self.temperature = token_loss, temperature
        self.model_options: dict[str, Any] = {}
        """Arguments of the model's forward; the loss takes both kinds of output."""

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return self.found(output, batch).values

    def found(self, output: Any, batch: Mapping[str, Tensor]) -> FoundLogps:
        labels = seen_labels(batch)
        if not isinstance(output, Unprojected):
            logits = self._scaled(output)
            return FoundLogps(-self.token_loss(logits, batch), logits.flatten(0, -2), None)
        places = counted_rows(batch[SAMPLED].flatten())
        rows, of_rows = output.rows(), labels.flatten()
        if places is not None:
            rows, of_rows = rows.index_select(0, places), of_rows[places]
        logits = self._scaled((rows @ output.matrix().t())[:, : len(output.own)])
        logps = -self.token_loss(logits[None], {"labels": of_rows[None]})[0]
        return FoundLogps(_placed(logps, places, labels.shape), logits, places)

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits if self.temperature == 1.0 else logits.float() / self.temperature


def _placed(values: Tensor, places: Tensor | None, shape: torch.Size) -> Tensor:
    """[N] -> `shape`, 0 elsewhere"""
    if places is not None:
        values = values.new_zeros(shape.numel()).index_copy(0, places, values)
    return values.view(shape)


def project_drawn_alone(logps: TokenLogps, model: nn.Module, config: Config) -> None:
    """Lets the model hand over hidden states, where its logits are a plain product of them.

    FSDP2 has the LM head for the model's forward pass alone, and FP8 computes the product of all positions.
    """
    is_plain = needs_logits(model, ("project",)) is None
    if is_plain and not config.parallel.use_torch_fsdp2 and not config.precision.fp8_output_proj:
        logps.model_options["project"] = False
