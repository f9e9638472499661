"""What computes a recurrence with a matrix as state: torch, the kernels of flash-linear-attention (fla), or for single
positions a Triton kernel of mt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_models.blocks.chunked_delta_rule import chunked_delta_rule
from mt_models.blocks.fla_delta_rule import can_run_fla, fla_delta_rule, fla_delta_step, fla_kimi_rule, fla_kimi_step
from mt_models.blocks.fla_rwkv7_rule import fla_rwkv7_rule, fla_rwkv7_step
from mt_models.blocks.gated_delta_rule import DeltaInputs, recurrent_delta_rule
from mt_models.blocks.has_triton import has_triton
from mt_models.blocks.kimi_delta_rule import chunked_kimi_rule, recurrent_kimi_rule
from mt_models.blocks.rwkv7_rule import chunked_rwkv7_rule, recurrent_rwkv7_rule

Rule = Callable[..., tuple[Tensor, Tensor]]
"""(inputs, *, state, segment_ids) -> outputs and the state: see `recurrent_delta_rule`."""


class Recurrence(NamedTuple):
    """The implementations of one recurrence."""

    chunked: Rule
    recurrent: Rule
    module: str
    """Name of the module of fla."""
    fla: Rule
    fla_step: Rule
    has_kernel: bool
    """Whether mt has a kernel of single positions."""


GATED = Recurrence(
    chunked_delta_rule, recurrent_delta_rule, "fla.ops.gated_delta_rule", fla_delta_rule, fla_delta_step, True
)
KIMI = Recurrence(chunked_kimi_rule, recurrent_kimi_rule, "fla.ops.kda", fla_kimi_rule, fla_kimi_step, True)
RWKV7 = Recurrence(chunked_rwkv7_rule, recurrent_rwkv7_rule, "fla.ops.rwkv7", fla_rwkv7_rule, fla_rwkv7_step, False)


class Rules(NamedTuple):
    whole: Rule
    """Whole sequences, with gradients."""
    step: Rule
    """Single positions from a state, as decoding takes them."""


def build_rules(recurrence: Recurrence, backend: str, chunk_size: int) -> Rules:
    """backend: "torch", "fla", or "auto", which takes fla on a GPU where it is installed, and else for the steps of
    decoding mt's kernel.

    Raises ConfigError for "fla" where it is not installed.
    """
    plain = Rules(partial(recurrence.chunked, chunk_size=chunk_size), recurrence.recurrent)
    if backend == "torch":
        return plain
    if can_run_fla(recurrence.module):
        return Rules(_on_gpu(recurrence.fla, plain.whole), _without_gradients(recurrence.fla_step, plain.step))
    if backend == "fla":
        raise ConfigError(
            'model.linear_attention_backend="fla" needs the package flash-linear-attention and a GPU; use "torch" or '
            '"auto"'
        )
    if recurrence.has_kernel and has_triton():
        return plain._replace(step=_without_gradients(_triton_step, plain.step))
    return plain


def _triton_step(
    inputs: DeltaInputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    from mt_models.blocks.triton_kernels.delta_step import triton_delta_step

    return triton_delta_step(inputs, state=state, segment_ids=segment_ids)


def _on_gpu(kernel: Rule, plain: Rule) -> Rule:
    """A layer that is on a GPU takes the kernel."""

    def rule(inputs: Any, *, state: Tensor | None = None, segment_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        chosen = kernel if inputs.v.is_cuda else plain
        return chosen(inputs, state=state, segment_ids=segment_ids)

    return rule


def _without_gradients(kernel: Rule, plain: Rule) -> Rule:
    """The same, where no gradient is asked for."""
    on_gpu = _on_gpu(kernel, plain)

    def rule(inputs: Any, *, state: Tensor | None = None, segment_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        return (plain if wanted else on_gpu)(inputs, state=state, segment_ids=segment_ids)

    return rule
