"""Fake GPU kernels for planning: they compute nothing, and save for backward the same tensors as the real kernels.

| kernel | saved besides the parameters |
| --- | --- |
| rms_norm, layer_norm | the input; one or two statistics per row |
| rotary | the cosines and sines, which all layers share; q, k and v are copied out of qkv |
| rotary with norms of heads | the same, and qkv |
| activation | the input; with a weight of each row, the weights |
| bias_dropout_add | a seed |
| cross_entropy | the logits; one number per position |
| linear_cross_entropy | hidden states; one number per position. A chunk of logits at a time |
| linear_cross_entropy_sum | the gradients of hidden states and of the weight. A chunk of logits at a time |

In plain torch the same operations save fp32 copies, masks, and intermediate results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.nn.activations import is_gated
from mt_core.nn.feed_forward import DenseFeedForward
from mt_core.nn.fp8.feed_forward import Fp8FeedForward
from mt_core.nn.fp8.multiply import Fp8Multiply
from mt_core.nn.kernels.choice import AUTO, Kernels, configured_kernels
from mt_core.nn.kernels.chunked_loss import chunked_losses, chunked_weighted_sum
from mt_core.nn.kernels.reference.fp8_casts import BLOCK, Activated, Along, Granularity, Matrix, Scaled, WholeCast
from mt_core.nn.kernels.reference.layers import HeadNorms
from mt_core.nn.kernels.request import WIDEST_ROW, Feature, KernelName
from mt_core.nn.kernels.vocab_parallel import RowKernels, cross_entropy_by
from mt_core.nn.linear import LinearModule
from mt_core.parallel.context import Axis, ParallelContext

# -- FP8 casts and products, with the memory of the real kernels -------------------------------------


class PlannedCasts:
    """Stands for mt_core.nn.kernels.triton_kernels.fp8_activations.TritonActivationCasts: without temporaries."""

    def amaxes(self, x: Matrix) -> Tensor:
        return _tensor_of(x).new_empty((), dtype=torch.float32)

    def by_amaxes(self, x: Matrix, amaxes: Tensor, dtype: torch.dtype, margin: int, along: Along) -> WholeCast:
        return self.by_scale(x, amaxes, dtype, along)

    def by_scale(self, x: Matrix, scale: Tensor, dtype: torch.dtype, along: Along) -> WholeCast:
        rows, columns = x.shape
        transposed = None if along == "columns" else _empty(x, columns, rows, Granularity.TENSOR, dtype).t()
        data = _empty(x, rows, columns, None, dtype) if along != "rows" else transposed
        assert data is not None
        return WholeCast(Scaled(data, scale, Granularity.TENSOR), transposed)

    def by_past(
        self, x: Matrix, past: Tensor, noted: Tensor | None, dtype: torch.dtype, margin: int, along: Along
    ) -> WholeCast:
        return self.by_scale(x, past, dtype, along)

    def rows(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        return _by_lines(x, dtype, Granularity.ROW, (x.shape[0], 1))

    def row_blocks(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        return _by_lines(x, dtype, Granularity.ROW_BLOCK, (x.shape[0], -(-x.shape[1] // BLOCK)))

    def square_blocks(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        return _by_lines(x, dtype, Granularity.SQUARE_BLOCK, (x.shape[0] // BLOCK, x.shape[1] // BLOCK))


def _by_lines(x: Matrix, dtype: torch.dtype, granularity: Granularity, scales: tuple[int, int]) -> Scaled:
    lines, length = x.shape
    data = _empty(x, lines, length, granularity, dtype)
    return Scaled(data, data.new_empty(scales, dtype=torch.float32), granularity)


def _empty(x: Matrix, lines: int, length: int, granularity: Granularity | None, dtype: torch.dtype) -> Tensor:
    """[lines, length], the length padded as products with the granularity take it."""
    multiple = 1 if granularity is None else granularity.multiple
    return _tensor_of(x).new_empty(lines, -(-length // multiple) * multiple, dtype=dtype)


def _tensor_of(x: Matrix) -> Tensor:
    return x.x if isinstance(x, Activated) else x


def planned_product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """A product of fake tensors without memory, so that its FLOPs are counted."""
    left, right = (operand.scale.new_empty((), dtype=dtype).expand(operand.data.shape) for operand in (a, b))
    return left @ right.t()


def use_planned_products(model: nn.Module) -> None:
    """In place of products that decode their operands."""
    for module in model.modules():
        if isinstance(module, LinearModule) and isinstance(module.multiply, Fp8Multiply):
            module.multiply = replace(module.multiply, product=planned_product)
        if isinstance(module, DenseFeedForward) and isinstance(module.joined, Fp8FeedForward):
            first, second = (
                replace(each, product=planned_product) for each in (module.joined.first, module.joined.second)
            )
            module.joined = replace(module.joined, first=first, second=second)


TORCH = "torch"


class ConfiguredKernels(Kernels):
    """Kernels that the configuration selects for the planned device, regardless of this machine's."""

    def __init__(self, config: Config, ctx: ParallelContext) -> None:
        asked = configured_kernels(config, ctx)
        super().__init__(asked.wanted, asked.device_type, asked.dtype)
        self.on_gpu = config.train.device != "cpu"

    def pick(
        self, kernel: KernelName, *features: Feature, width: int = 0, plain: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        # By what the planned device would take, not by what is installed here.
        if kernel in FAKES and self.is_fused(kernel, width):
            return FAKES[kernel]
        in_torch = Kernels({kernel: TORCH}, self.device_type, self.dtype)  # plain torch, which saves more
        return in_torch.pick(kernel, *features, width=width, plain=plain)

    def pick_fused(
        self, kernel: KernelName, *features: Feature, width: int = 0, joined: KernelName | None = None
    ) -> Callable[..., Any] | None:
        """Planned forms of rotary, which frees its input unless it normalizes heads, of weighted activations, and of
        FP8 casts that compute an activation. The sum of a norm is planned apart: the same tensors are saved."""
        function = FUSED.get(kernel)
        if (kernel, joined) == ("fp8_cast", "activation"):
            function = self.pick(kernel)
        kernels = (kernel,) if joined is None else (kernel, joined)
        return function if all(self.is_fused(each, width) for each in kernels) else None

    def is_fused(self, kernel: KernelName, width: int = 0) -> bool:
        """Whether the planned device runs it as one kernel."""
        wanted = self.wanted.get(kernel, AUTO)
        # As `auto` chooses: Triton on a GPU, but for rows that are too wide.
        return wanted != TORCH if wanted != AUTO else self.on_gpu and width <= WIDEST_ROW


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[:-1].numel()
        # rstd, and the mean where there is a bias
        statistics = torch.empty(rows * (1 if bias is None else 2), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, bias, statistics)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight, bias, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None if bias is None else torch.empty_like(bias)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return q.new_empty(q.shape), k.new_empty(k.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return grads[0].new_empty(grads[0].shape), grads[1].new_empty(grads[1].shape), None, None


class _RotaryOfQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin, q_weight, k_weight, None if q_weight is None else qkv)
        ctx.shape = qkv.shape
        *positions, groups, rows, width = qkv.shape
        q = qkv.new_empty((*positions, groups * (rows - 2), width))
        # New tensors: qkv can be freed, unless norms keep it.
        return q, qkv.new_empty((*positions, groups, width)), qkv.new_empty((*positions, groups, width))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, _, *weights, _ = ctx.saved_tensors
        dweights = [None if weight is None else torch.empty_like(weight) for weight in weights]
        return grads[0].new_empty(ctx.shape), *dweights, None, None


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, name: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        return x.new_empty((*x.shape[:-1], x.shape[-1] // (2 if is_gated(name) else 1)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, bias = ctx.saved_tensors
        return x.new_empty(x.shape), None if bias is None else torch.empty_like(bias), None


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x, weights)
        return x.new_empty((len(x), x.shape[1] // (2 if is_gated(name) else 1)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights = ctx.saved_tensors
        return x.new_empty(x.shape), torch.empty_like(weights), None


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, probability: float) -> Tensor:
        seed = torch.empty(1, dtype=torch.int64, device=x.device) if probability > 0 else None
        ctx.save_for_backward(seed)
        ctx.forms = x.dtype, None if bias is None else (bias.shape, bias.dtype)
        return residual.new_empty(residual.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:
        dtype, bias = ctx.forms
        dbias = None if bias is None else grads[0].new_empty(bias[0], dtype=bias[1])
        return torch.empty_like(grads[0], dtype=dtype), dbias, grads[0], None


def statistics(logits: Tensor, columns: Tensor, ids: int) -> Tensor:
    return torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)


def subtract_target_(logits: Tensor, columns: Tensor, lse: Tensor, factor: Tensor, ids: int) -> None: ...


ROWS = RowKernels(statistics, subtract_target_)


def cross_entropy(logits: Tensor, columns: Tensor, axis: Axis, overwrite: bool = False) -> Tensor:
    return cross_entropy_by(ROWS, logits, columns, axis, overwrite)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, columns: Tensor, axis: Axis, ids: int | None = None) -> Tensor:
    return chunked_losses(hidden, weight, columns, axis, ROWS, ids=ids)


def linear_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, columns: Tensor, loss_weights: Tensor, axis: Axis, ids: int | None = None
) -> tuple[Tensor, Tensor]:
    return chunked_weighted_sum(hidden, weight, columns, loss_weights, axis, ROWS, ids=ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    return _Norm.apply(x, weight, None)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    return _Norm.apply(x, weight, bias)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    turned: tuple[Tensor, Tensor] = _Rotary.apply(q, k, cos, sin)
    return turned


def rotary_of_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (None, None) if norms is None else (norms.q_weight, norms.k_weight)
    parts: tuple[Tensor, Tensor, Tensor] = _RotaryOfQKV.apply(qkv, *weights, cos, sin)
    return parts


def activation(x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    return _Activation.apply(x, bias, name)


def weighted_activation(x: Tensor, weights: Tensor, name: str) -> Tensor:
    return _WeightedActivation.apply(x, weights, name)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, probability: float) -> Tensor:
    return _BiasDropoutAdd.apply(x, bias, residual, probability)


FAKES: Mapping[KernelName, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "rotary": rotary,
    "activation": activation,
    "bias_dropout_add": bias_dropout_add,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_cross_entropy_sum": linear_cross_entropy_sum,
    "fp8_cast": PlannedCasts,
}
"""With the same signature as the real kernel."""

FUSED: Mapping[KernelName, Callable[..., Any]] = {"rotary": rotary_of_qkv, "activation": weighted_activation}
"""Kernel -> its planned form `fused`."""
