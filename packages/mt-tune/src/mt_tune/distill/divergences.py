"""Divergences of two distributions over the vocabulary, whose logits tensor-parallel ranks share.

A rank has columns of the logits, [..., ids of this rank]. Sums over the vocabulary are all-reduced one number a
position at a time; logits are never gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mt_core.parallel.collectives import all_gather, copy_to, reduce_from
from mt_core.parallel.context import Axis
from mt_core.parallel.reductions import all_reduce_

Kind = Literal["forward_kl", "reverse_kl", "jsd"]
Tail = Literal["bin", "renormalize", "drop"]
LEAST = 1e-12
"""Smallest probability of the tokens outside of the top k, below which rounding leaves nothing of 1 - sum."""


@dataclass(frozen=True)
class Divergence:
    """Divergence between a teacher's distribution and a student's, softmax(logits / temperature) each. beta: of jsd."""

    kind: Kind = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0

    def of_logits(self, student: Tensor, teacher: Tensor, axis: Axis) -> Tensor:
        """[..., ids of this rank] both -> [...] in fp32, the same on all ranks of the axis. The teacher has no
        gradient."""
        student, teacher = student.float() / self.temperature, teacher.detach().float() / self.temperature
        log_teacher = teacher - log_normalizer(teacher, axis)[..., None]
        # Each rank uses the normalizer for columns of its own, so that its gradient is the sum over ranks.
        log_student = student - copy_to(log_normalizer(student, axis), axis)[..., None]
        return reduce_from(self.terms(log_student, log_teacher).sum(-1), axis)

    def terms(self, log_student: Tensor, log_teacher: Tensor) -> Tensor:
        """The terms of the sum over tokens, from log-probabilities of one shape."""
        if self.kind == "forward_kl":
            return log_teacher.exp() * (log_teacher - log_student)
        if self.kind == "reverse_kl":
            return log_student.exp() * (log_student - log_teacher)
        mixture = torch.logaddexp(log_teacher + math.log(self.beta), log_student + math.log1p(-self.beta))
        of_teacher = log_teacher.exp() * (log_teacher - mixture)
        of_student = log_student.exp() * (log_student - mixture)
        return self.beta * of_teacher + (1 - self.beta) * of_student

    def of_top_k(self, student: Tensor, top: TopK, tail: Tail, first_id: int, axis: Axis) -> Tensor:
        """student: logits [..., ids of this rank], the first of which is `first_id` -> [...] in fp32."""
        student = student.float() / self.temperature
        chosen = reduce_from(logits_at(student, top.ids - first_id), axis)
        log_student = chosen - log_normalizer(student, axis)[..., None]  # [..., k]
        log_teacher = top.log_probs.float()
        if tail == "renormalize":
            log_student = log_student - log_student.logsumexp(-1, keepdim=True)
            log_teacher = log_teacher - log_teacher.logsumexp(-1, keepdim=True)
        elif tail == "bin":
            log_student, log_teacher = _with_tail(log_student), _with_tail(log_teacher)
        return self.terms(log_student, log_teacher).sum(-1)


@dataclass(frozen=True)
class TopK:
    """ids int64 and log_probs [..., k]: the most probable tokens and their log-probabilities over the whole
    vocabulary, at the temperature of the divergence."""

    ids: Tensor
    log_probs: Tensor


def log_normalizer(logits: Tensor, axis: Axis) -> Tensor:
    """[..., ids of this rank] -> log of the sum of exponentials over all ranks, [...]. The backward pass takes the
    gradient of a number that all ranks use alike."""
    with torch.no_grad():
        largest = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], float("-inf"))
        all_reduce_(largest, axis, "max")
    return reduce_from((logits - largest[..., None]).exp().sum(-1), axis).log() + largest


def logits_at(logits: Tensor, columns: Tensor) -> Tensor:
    """logits [..., C] at columns [..., k], and 0 for columns of other ranks."""
    width = logits.shape[-1]
    if width == 0:
        return logits.new_zeros(columns.shape)
    here = (columns >= 0) & (columns < width)
    return logits.gather(-1, columns.clamp(0, width - 1)).masked_fill(~here, 0.0)


@torch.no_grad()
def top_k_of(logits: Tensor, k: int, temperature: float, first_id: int, axis: Axis) -> TopK:
    """The k most probable tokens of logits [..., ids of this rank], on all ranks of the axis. Collective."""
    scaled = logits.float() / temperature
    values, ids = scaled.topk(min(k, scaled.shape[-1]), -1)
    ids = ids + first_id
    if axis.size > 1:
        # Every rank gathers as many candidates; those that it has not are never chosen.
        values, ids = _padded(values, k, float("-inf")), _padded(ids, k, 0)
        last = values.ndim - 1
        values, ids = all_gather(values, last, axis), all_gather(ids, last, axis)
        values, places = values.topk(k, -1)
        ids = ids.gather(-1, places)
    return TopK(ids, values - log_normalizer(scaled, axis)[..., None])


def _padded(x: Tensor, width: int, value: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]), value=value)


def _with_tail(log_probs: Tensor) -> Tensor:
    """[..., k] -> [..., k + 1]: the log-probability of all other tokens last."""
    rest = (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=LEAST)
    return torch.cat([log_probs, rest.log()], -1)


@torch.no_grad()
def most_probable(logits: Tensor, first_id: int, axis: Axis) -> Tensor:
    """[..., ids of this rank] -> the id with the largest logit over all ranks, [...] int64; of equals the smallest."""
    if logits.shape[-1]:
        largest, column = logits.float().max(-1)
    else:
        largest = logits.new_full(logits.shape[:-1], float("-inf"), dtype=torch.float32)
        column = torch.zeros_like(largest, dtype=torch.long)
    of_all = largest.clone()
    all_reduce_(of_all, axis, "max")
    ids = torch.where(largest == of_all, column + first_id, torch.iinfo(torch.long).max)
    all_reduce_(ids, axis, "min")
    return ids
