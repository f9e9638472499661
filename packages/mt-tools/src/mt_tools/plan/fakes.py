"""Replacements for kernels that need a device, for planning: the same shapes, memory, messages and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionCore, AttentionPattern, eager_attention, expand_groups, with_sinks
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.context_parallel.ulysses import ulysses_attention
from mt_core.nn.dropout import DropoutStreams
from mt_core.nn.kernels.choice import AUTO
from mt_core.nn.recompute import recomputed
from mt_core.parallel.context import Axis
from mt_tools.plan.ledger import Ledger

PORTABLE: Mapping[str, Any] = {
    "moe_router_force_load_balancing": False,
    "moe_router_random_seed": None,
}
"""Options of `model.moe` that select kernels, or that a plan sets, and the values that are planned instead."""
EQUIVALENT_SETTINGS = {"flex": "alltoall"}
"""Dispatcher that needs a device -> the one that is planned instead."""


def portable(experts: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    """`model.moe` with portable options in place of kernels that need a device; shapes and memory are the same."""
    options = {key: PORTABLE.get(key, value) for key, value in experts.items()}
    options["moe_permute_fusion"] = on_gpu and options.get("moe_permute_fusion") is not False
    if planned := EQUIVALENT_SETTINGS.get(options.get("moe_token_dispatcher_type", "")):
        options |= {"moe_token_dispatcher_type": planned, "moe_dispatcher_options": {}}
    return options


@dataclass(frozen=True)
class PlannedEnvironment(ModelBuildContext):
    """Gives a model a fake attention, whose cost is counted and which computes nothing."""

    counting: PlannedKernels = field(default_factory=lambda: PlannedKernels(Ledger()))
    capability: tuple[int, int] | None = None
    """Compute capability of the machine's GPUs."""

    def attention(self, backend: str, **request: Any) -> AttentionCore:
        # The eager backend supports every option, so that only the layout is validated here.
        super().attention("eager", **request)
        if self.parallel.cp.size > 1:
            core = self._over_ranks()
        elif backend == "eager" or (backend == AUTO and self._has_no_fused_kernel(**request)):
            core = self._written_out(request.get("logit_softcap"))
        else:
            core = fused_attention(self.counting.ledger, on_gpu=self._on_gpu)
        return recomputed(core) if self.recompute.selects("core_attn") else core

    @property
    def _on_gpu(self) -> bool:
        return self.config.train.device != "cpu"

    def _has_no_fused_kernel(
        self, *, dropout: float = 0.0, logit_softcap: float | None = None, sinks: bool = False, **others: Any
    ) -> bool:
        """Soft caps and sinks are left to flex, without packages that a plan cannot see, and to eager where it does not
        serve."""
        served = self._on_gpu and dropout == 0.0 and not self.config.train.deterministic
        return (logit_softcap is not None or sinks) and not served

    @property
    def planned_capability(self) -> tuple[int, int] | None:
        return self.capability if self._on_gpu else None

    def _written_out(self, logit_softcap: float | None) -> AttentionCore:
        in_fp32 = self.config.precision.attention_softmax_in_fp32
        core = eager_attention(softmax_in_fp32=in_fp32, logit_softcap=logit_softcap)

        def attend(
            q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float, *sinks: Tensor
        ) -> Tensor:
            with self.counting.entered():
                return core(q, k, v, pattern, dropout, *sinks)

        return attend

    def feed_forward(self, name: str, options: object, layer: int) -> nn.Module:
        experts = getattr(options, "moe", None)
        if experts is not None:
            options = options.model_copy(update={"moe": portable(experts, on_gpu=self._on_gpu)})  # type: ignore[attr-defined]
        return super().feed_forward(name, options, layer)

    def _over_ranks(self) -> AttentionCore:
        method, context, ledger = self.config.parallel.cp_comm_type, self.parallel, self.counting.ledger
        inside = fused_attention(ledger, on_gpu=self._on_gpu)
        if method == "a2a":
            return ulysses_attention(context.cp, inside)
        if method == "a2a+p2p":
            outer = context.axis("cp_outer")
            core = communicated_keys("p2p", outer, ledger) if outer.size > 1 else inside
            inner = context.axis("cp_inner")
            return ulysses_attention(inner, core) if inner.size > 1 else core
        if method not in ("p2p", "all_gather"):
            raise ConfigError(
                f"mt plan does not know what parallel.cp_comm_type={method} sends and keeps; it plans p2p, all_gather, "
                "a2a and a2a+p2p"
            )
        return communicated_keys(method, context.cp, ledger)


class _Kept(torch.autograd.Function):
    """Saves what a fused attention saves for its backward pass: its inputs, its output and one number per row."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, mask: Tensor | None, backward: Callable[[], None], value_size: int, *keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q [B, S, N, D], keys: what is saved and has a gradient beside q, such as keys and values -> out
        [B, S, N, value_size], lse [B, N, S]"""
        out = q.new_empty((*q.shape[:-1], value_size))  # [B, S, N, value_size]
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        # What decides the memory: KeptStorages counts these, each storage once.
        ctx.save_for_backward(q, *keys, out, lse, *([] if mask is None else [mask]))
        ctx.shapes, ctx.note_backward = [key.shape for key in keys], backward
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q = ctx.saved_tensors[0]
        ctx.note_backward()
        return torch.empty_like(q), None, None, None, *(q.new_empty(shape) for shape in ctx.shapes)


def fused_attention(ledger: Ledger, *, on_gpu: bool) -> AttentionCore:
    """Flash attention on one rank. Key-value groups are repeated for their query heads where the kernel does not take
    them: with a mask, in fp32, on a CPU (mt_core.nn.attention.serves_groups). With sinks it is flex on a GPU, which
    takes groups in every dtype and builds no mask of the size of the scores."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float, sinks: Tensor | None = None
    ) -> Tensor:
        mask = None
        if sinks is None and not pattern.over(k.shape[1]).is_plain:
            mask = pattern.additive_mask(q.shape[1], k.shape[1], q.dtype, q.device)
        if mask is not None or not on_gpu or (sinks is None and q.dtype == torch.float32):
            # The copies are saved for backward, too.
            k, v = expand_groups(k, q.shape[2]), expand_groups(v, q.shape[2])
        ledger.flops += attention_flops(q, k, v, pattern.causal)
        out, lse = _Kept.apply(q, mask, _nothing, v.shape[-1], k, v)
        return out if sinks is None else with_sinks(out, lse, sinks)

    return attend


def attention_flops(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """FLOPs of the forward pass: Q K^T, and scores times V; a causal mask hides half of the scores."""
    # 2 FLOPs x queries x heads x (D + E) x keys.
    whole = 2.0 * q.shape[:-1].numel() * (q.shape[-1] + v.shape[-1]) * k.shape[1]
    return whole / 2 if causal else whole


def communicated_keys(method: str, axis: Axis, ledger: Ledger) -> AttentionCore:
    """Context parallelism with communicated keys: packed once, kept by their owner, sent in both passes.

    p2p, causal, zig-zag: rank r sends half of its rows to each rank behind it and all to each before it; the gradients
    of received rows are sent back in fp32. all_gather: all rows to all ranks, and one reduce-scatter of gradients.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float, *sinks: Tensor) -> Tensor:
        kv = torch.cat([k.permute(1, 0, 2, 3), v.permute(1, 0, 2, 3)], -1)  # [2c, B, G, D + E]
        size = kv.numel() * kv.element_size()
        # See visible_rows: this rank shows all rows to the `rank` ranks before it and half of them to those behind it,
        # and reads half of the rows of the ranks before it and all of those behind it.
        behind = axis.size - 1 - axis.rank
        shown = size * (axis.rank + behind / 2)
        read = size * (axis.rank / 2 + behind)
        fp32 = 4 / kv.element_size()

        def noted(backward: bool) -> None:
            if method == "all_gather":
                ledger.sent("cp", "all_gather", axis.size * size)
                if backward:
                    ledger.sent("cp", "reduce_scatter", axis.size * size)
                return
            ledger.sent("cp", "send", shown)
            if backward:
                ledger.sent("cp", "send", read * fp32)

        noted(backward=False)
        # A rank's queries see half of the whole sequence on average, wherever its chunks are (zig-zag).
        ledger.flops += attention_flops(q, k, v, pattern.causal) * axis.size
        out, _ = _Kept.apply(q, None, lambda: noted(backward=True), v.shape[-1], kv, *sinks)
        return out

    return attend


def _nothing() -> None: ...


class PlannedKernels(TorchFunctionMode):
    """While active, adds the FLOPs of matrix products to a ledger (2 per multiply-add), and replaces the functions in
    `replaced`.

    Autograd runs the backward pass outside of the mode; recomputation in it has to enter it again (`entered`).
    """

    def __init__(self, ledger: Ledger, replaced: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.ledger, self.replaced = ledger, replaced or {}
        self._is_entered = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within this context, the mode is entered exactly once."""
        if self._is_entered:
            yield
            return
        self._is_entered = True
        try:
            # Entering a TorchFunctionMode twice would count every product twice.
            with self:
                yield
        finally:
            self._is_entered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Modes are not active within their own __torch_function__: the inner functions of a product are not counted
        # again.
        out = self.replaced.get(func, func)(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self.ledger.flops += PRODUCTS[func](args, out)
        return out


def gpu_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Saves a mask of one byte per element, as on GPUs; CPU dropout saves a factor in the input's dtype."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


@dataclass(frozen=True)
class UndrawnStreams(DropoutStreams):
    """Dropout streams without values: ranks that share sequences draw for whole sequences; nothing is seeded."""

    seed: int = 0

    def begin(self, site: str) -> None: ...


ON_GPUS: Mapping[Any, Callable[..., Any]] = {F.dropout: gpu_dropout}
"""Functions that save other tensors on GPUs than on CPUs and the meta device."""


def _linear(args: Any, out: Tensor) -> float:
    # [..., K] x [K, N]: K multiply-adds for each element of the result.
    return 2.0 * out.numel() * args[0].shape[-1]


def _convolution(args: Any, out: Tensor) -> float:
    # The weights of one output channel: input channels of a group x kernel.
    return 2.0 * out.numel() * args[1][0].numel()


def _einsum(args: Any, out: Tensor) -> float:
    """FLOPs of an einsum of two operands: twice the product of the sizes of all letters."""
    lengths: dict[str, int] = {}
    for names, operand in zip(args[0].split("->")[0].split(","), args[1:], strict=True):
        lengths.update(zip(names, operand.shape, strict=True))
    return 2.0 * math.prod(lengths.values())


PRODUCTS: dict[Any, Callable[[Any, Tensor], float]] = {
    F.linear: _linear,
    torch.matmul: _linear,
    torch.bmm: _linear,
    torch.mm: _linear,
    Tensor.matmul: _linear,
    Tensor.__matmul__: _linear,
    torch.einsum: _einsum,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    torch.ops.aten._scaled_grouped_mm_v2: _linear,  # of experts in FP8
}
