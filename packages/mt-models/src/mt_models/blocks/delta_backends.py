"""What computes a recurrence with a matrix as state: torch, the kernels of flash-linear-attention (fla), or mt's Triton
kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.nn.kernels.choice import Kernels
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.chunked_delta_rule import chunked_delta_rule
from mt_models.blocks.fla_delta_rule import can_run_fla, fla_delta_rule, fla_delta_step, fla_kimi_rule, fla_kimi_step
from mt_models.blocks.fla_rwkv7_rule import fla_rwkv7_rule, fla_rwkv7_step
from mt_models.blocks.gated_delta_rule import DeltaInputs, recurrent_delta_rule
from mt_models.blocks.has_triton import has_triton
from mt_models.blocks.kimi_delta_rule import chunked_kimi_rule, recurrent_kimi_rule
from mt_models.blocks.rwkv7_rule import Rwkv7Inputs, chunked_rwkv7_rule, recurrent_rwkv7_rule
from mt_models.blocks.triton_training import training_kernels_lack

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
    triton: Rule
    """mt's kernels of whole sequences, with chunk_size too."""
    triton_step: Rule
    """mt's kernel of single positions."""
    has_tried_step: bool
    """Whether that has run on a GPU, so that auto takes it."""
    triton_lacks: Callable[[RuleSizes, int], str | None]
    """What its kernels need and what to change, for sizes and a chunk size."""


def _triton_gated_rule(inputs: DeltaInputs, **options: Any) -> tuple[Tensor, Tensor]:
    # Imported here: Triton need not be installed.
    from mt_models.blocks.triton_kernels.gated_delta_rule import triton_gated_delta_rule

    return triton_gated_delta_rule(inputs, **options)


def _triton_kimi_rule(inputs: DeltaInputs, **options: Any) -> tuple[Tensor, Tensor]:
    from mt_models.blocks.triton_kernels.kimi_delta_rule import triton_kimi_rule

    return triton_kimi_rule(inputs, **options)


def _triton_rwkv7_rule(inputs: Rwkv7Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    from mt_models.blocks.triton_kernels.rwkv7_rule import triton_rwkv7_rule

    return triton_rwkv7_rule(inputs, **options)


def _triton_step(
    inputs: DeltaInputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    from mt_models.blocks.triton_kernels.delta_step import triton_delta_step

    return triton_delta_step(inputs, state=state, segment_ids=segment_ids)


class RuleSizes(NamedTuple):
    """What a rule is used for."""

    device: str
    dtype: torch.dtype
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, ctx: ParallelContext, key_dim: int, value_dim: int) -> RuleSizes:
        return cls(ctx.device.type, ctx.params_dtype, key_dim, value_dim)


def _chunks_lack(sizes: RuleSizes, chunk_size: int) -> str | None:
    from mt_models.blocks.triton_kernels.chunk_launches import CHUNK_SIZES, WIDEST_KEY

    if sizes.key_dim > WIDEST_KEY:
        return f"a key has at most {WIDEST_KEY} channels; change model.linear_key_head_dim"
    if chunk_size not in CHUNK_SIZES:
        return f"a chunk has {' or '.join(map(str, CHUNK_SIZES))} positions; change model.linear_chunk_size"
    return None


def _positions_lack(sizes: RuleSizes, chunk_size: int) -> str | None:
    """The kernels of single positions have no chunks."""
    from mt_models.blocks.triton_kernels.rwkv7_rule import WIDEST_HEAD

    if sizes.key_dim > WIDEST_HEAD:
        return f"a head has at most {WIDEST_HEAD} channels; change model.head_size"
    return None


GATED = Recurrence(
    chunked_delta_rule,
    recurrent_delta_rule,
    "fla.ops.gated_delta_rule",
    fla_delta_rule,
    fla_delta_step,
    triton=_triton_gated_rule,
    triton_step=_triton_step,
    has_tried_step=True,
    triton_lacks=_chunks_lack,
)
KIMI = Recurrence(
    chunked_kimi_rule,
    recurrent_kimi_rule,
    "fla.ops.kda",
    fla_kimi_rule,
    fla_kimi_step,
    triton=_triton_kimi_rule,
    triton_step=_triton_step,
    has_tried_step=True,
    triton_lacks=_chunks_lack,
)
RWKV7 = Recurrence(
    chunked_rwkv7_rule,
    recurrent_rwkv7_rule,
    "fla.ops.rwkv7",
    fla_rwkv7_rule,
    fla_rwkv7_step,
    triton=_triton_rwkv7_rule,
    triton_step=_triton_rwkv7_rule,
    has_tried_step=False,
    triton_lacks=_positions_lack,
)


class Rules(NamedTuple):
    whole: Rule
    """Whole sequences, with gradients."""
    step: Rule
    """Single positions from a state, as decoding takes them."""
    whole_by: str = "torch"
    step_by: str = "torch"

    def note(self, name: str, kernels: Kernels) -> None:
        """Add a line to what a run on a GPU prints."""
        kernels.note(f"{name}: sequences by {self.whole_by}, steps of decoding by {self.step_by}")


def build_rules(recurrence: Recurrence, backend: str, chunk_size: int, sizes: RuleSizes) -> Rules:
    """backend: "torch", "fla", "triton", or "auto", which takes fla on a GPU where it is installed, and else torch with
    mt's kernel for the steps of decoding where that has run on a GPU.

    Raises ConfigError for "fla" where it is not installed, and for "triton" where mt's kernels do not serve.
    """
    plain = Rules(partial(recurrence.chunked, chunk_size=chunk_size), recurrence.recurrent)
    if backend == "torch":
        return plain
    if backend == "triton":
        _require_triton(recurrence, sizes, chunk_size)
        step = _without_gradients(recurrence.triton_step, plain.step)
        whole = partial(recurrence.triton, chunk_size=chunk_size)
        # A plan has the model on the meta device, where it counts what torch computes.
        return Rules(plain.whole if sizes.device == "meta" else whole, step, "triton", "triton")
    if can_run_fla(recurrence.module):
        step = _without_gradients(recurrence.fla_step, plain.step)
        return Rules(_on_gpu(recurrence.fla, plain.whole), step, "fla", "fla")
    if backend == "fla":
        raise ConfigError(
            'model.linear_attention_backend="fla" needs the package flash-linear-attention and a GPU; use "torch" or '
            '"auto"'
        )
    if recurrence.has_tried_step and has_triton():
        return plain._replace(step=_without_gradients(recurrence.triton_step, plain.step), step_by="triton")
    return plain


def _require_triton(recurrence: Recurrence, sizes: RuleSizes, chunk_size: int) -> None:
    """Raise ConfigError where mt's kernels of whole sequences do not serve."""
    if reason := training_kernels_lack(sizes.device, sizes.dtype) or recurrence.triton_lacks(sizes, chunk_size):
        dtype = str(sizes.dtype).removeprefix("torch.")
        use = f"{sizes.device}, {dtype}, keys of {sizes.key_dim} channels, chunks of {chunk_size} positions"
        raise ConfigError(
            f'model.linear_attention_backend="triton" cannot serve ({use}): {reason}, or use "auto" or "torch"'
        )


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
