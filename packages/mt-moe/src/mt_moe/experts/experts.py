"""The experts of this rank: fc2(activation(fc1(x)) * weight) for rows in the order of experts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mt_core.config.schema import Activation
from mt_core.errors import ConfigError
from mt_core.nn.activations import is_gated
from mt_core.nn.auxiliary import RunsUncompiled
from mt_core.nn.fp8.options import Fp8Options
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, Split, normal, zeros
from mt_core.parallel.context import AxisName, ParallelContext
from mt_moe.config import MoeConfig
from mt_moe.experts.activation import pick_activation, plain_activation
from mt_moe.experts.fp8 import Fp8GroupedProduct, fp8_grouped_product
from mt_moe.experts.grouped import grouped_mm_objection, grouped_product, is_one_kernel
from mt_moe.experts.loop import GroupedProduct, Groups, PermutingLoop, PermutingProduct, loop_product
from mt_moe.kernels.availability import triton_objection
from mt_moe.permutation import RowOrder

# -- `moe_grouped_gemm`: choice of the grouped GEMM by device, dtype and sizes -----------------------

KEY = "model.moe.moe_grouped_gemm"
Name = Literal["loop", "grouped", "triton"]


def resolve_product(
    asked: Literal["auto"] | Name,
    ctx: ParallelContext,
    sizes: tuple[int, ...],
    planned_capability: tuple[int, int] | None = None,
) -> Name:
    """sizes: rows and columns of an expert's matrices on this rank. planned_capability: of the GPU that the meta device
    represents. Raises ConfigError if the choice cannot run."""
    if asked == "auto":
        return _automatic(ctx, sizes, planned_capability)
    objection = None
    if asked == "grouped":
        objection = grouped_mm_objection(ctx.params_dtype, sizes)
    elif asked == "triton":
        objection = triton_objection(ctx.device.type)
    if objection is not None:
        raise ConfigError(f"{KEY}={asked} cannot serve: {objection}; use auto or loop")
    return asked


def _automatic(ctx: ParallelContext, sizes: tuple[int, ...], planned: tuple[int, int] | None) -> Name:
    capability = torch.cuda.get_device_capability(ctx.device) if ctx.device.type == "cuda" else planned
    if capability is None:
        return "loop"
    # Ampere and later, which have bf16 products.
    if capability >= (8, 0) and triton_objection(ctx.device.type) is None:
        return "triton"
    takes_sizes = grouped_mm_objection(ctx.params_dtype, sizes) is None
    return "grouped" if takes_sizes and is_one_kernel(capability, ctx.params_dtype) else "loop"


def load_product(name: Name, device_type: str = "cuda") -> GroupedProduct:
    """The implementation; on the meta device the one that is planned in its place."""
    if device_type == "meta":
        return PermutingLoop() if name == "triton" else loop_product
    if name == "triton":
        from mt_moe.experts.triton import TritonProduct

        return TritonProduct()
    return {"loop": loop_product, "grouped": grouped_product}[name]


# -- what operations save for their backward passes --------------------------------------------------


def recompute_saved(x: Tensor, compute: Callable[[], Tensor]) -> saved_tensors_hooks:
    """A context in which operations do not save x: their backward passes call `compute` for it, which has to return
    a bitwise equal tensor."""
    # What autograd hands to pack may be another tensor object with the same memory, so identity would not find it.
    memory, shape = x.data_ptr(), x.shape

    def pack(kept: Tensor) -> Tensor | None:
        return None if kept.data_ptr() == memory and kept.shape == shape else kept

    @torch.no_grad()
    def unpack(kept: Tensor | None) -> Tensor:
        return compute() if kept is None else kept

    return saved_tensors_hooks(pack, unpack)


class ExpertLinear(LayoutModule):
    """A matrix for each expert: weight [E, out, in], sharded over ep by expert and over etp along `split`.

    Its gradients are all-reduced over edp only: the dispatcher has sent all rows of an expert to its ranks.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        ctx: ParallelContext,
        product: GroupedProduct,
        *,
        split: Split,
        bias: bool,
        init: Init,
    ) -> None:
        super().__init__(ctx)
        self.product = product
        # replicas="edp": the ranks with the same experts, over which data parallelism reduces.
        by_expert = Split(dim=0, axis="ep")
        shards_outputs = split.dim == 1
        self.declare(
            "weight",
            ParameterLayout((experts, out_features, in_features), init, (by_expert, split), replicas="edp"),
        )
        # Outputs that are partial sums over etp get their bias from one etp rank only.
        self.adds_bias = shards_outputs or ctx.axis("etp").rank == 0
        partial: tuple[AxisName, ...] = () if shards_outputs else ("etp",)
        splits = (by_expert, split) if shards_outputs else (by_expert,)
        layout = ParameterLayout((experts, out_features), zeros, splits, partial_gradient=partial, replicas="edp")
        self.declare("bias", layout if bias else None)

    def forward(
        self, x: Tensor, groups: Groups, read: RowOrder | None = None, written: RowOrder | None = None
    ) -> Tensor:
        """[R, in] -> [R, out], without the bias. The product permutes rows itself in the given order: read, x is of
        tokens [n, in]; or written, the result is of tokens [n, out], for each the sum of its rows."""
        if read is None and written is None:
            return self.product(x, self.weight, groups)
        assert isinstance(self.product, PermutingProduct)
        if read is not None:
            assert written is None
            return self.product.of_tokens(x, self.weight, groups, read)
        assert written is not None
        return self.product.to_tokens(x, self.weight, groups, written)

    def use_fp8(self, options: Fp8Options) -> str | None:
        """See mt_core.nn.fp8.use.UsesFp8."""
        product = fp8_grouped_product(options, self.weight)
        if isinstance(product, str):
            return product
        self.product = product
        return None

    def host_wait(self) -> str | None:
        """What in the product in use makes the host wait; None if nothing does."""
        if self.product is loop_product:
            return "model.moe.moe_grouped_gemm=loop reads the number of rows of each expert; use grouped or triton"
        weight = self.weight
        one_kernel = weight.is_cuda and is_one_kernel(torch.cuda.get_device_capability(weight.device), weight.dtype)
        if self.product is grouped_product and weight.is_cuda and not one_kernel:
            return "model.moe.moe_grouped_gemm=grouped reads the number of rows of each expert on this GPU; use triton"
        return self.product.host_wait() if isinstance(self.product, Fp8GroupedProduct) else None

    def bias_rows(self, groups: Groups, rows: int) -> Tensor:
        """[R, out], the bias of each row's expert; zeros for rows of none, and on ranks that do not add it."""
        assert self.bias is not None
        biases = self.bias[groups.numbers(rows)] * float(self.adds_bias)
        return torch.where(groups.present(rows)[:, None], biases, 0)  # the gradients of rows of none are undefined


class WeighsOutputs(Protocol):
    """Applies the weights [R] to the experts' outputs [R, H], where something is computed before."""

    def __call__(self, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor: ...


class Experts(RunsUncompiled, nn.Module):
    """[R, H] -> [R, H], a partial sum if etp shards the matrices.

    permute_fusion: products that can do it permute rows themselves.
    The weight of a row is applied between the two matrices: its gradient then needs no saved output. With
    moe_apply_probs_on_input it multiplies the row.
    """

    def __init__(
        self,
        config: MoeConfig,
        hidden_size: int,
        ffn_size: int,
        activation: Activation,
        ctx: ParallelContext,
        *,
        bias: bool,
        init_std: float,
        output_init_std: float,
        permute_fusion: bool = False,
        recompute_activation: bool = False,
        planned_capability: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.weighs_inputs = config.moe_apply_probs_on_input
        # Rows have their weights before the first product, which therefore cannot read tokens.
        self.permute_fusion = permute_fusion and not self.weighs_inputs
        self.activation, self.device_type = activation, ctx.device.type
        self.activate = plain_activation(activation, self.device_type)
        self.recompute_activation = recompute_activation
        blocks = 2 if is_gated(activation) else 1
        local_ffn = ffn_size // ctx.axis("etp").size
        # Sizes of a rank: alignment rules of the kernels apply to what it multiplies.
        sizes = (hidden_size, local_ffn, blocks * local_ffn)
        self.product = resolve_product(config.moe_grouped_gemm, ctx, sizes, planned_capability)
        product = load_product(self.product, self.device_type)
        self.linear_fc1 = ExpertLinear(
            config.num_experts,
            hidden_size,
            blocks * ffn_size,
            ctx,
            product,
            split=Split(dim=1, axis="etp", sections=blocks),
            bias=bias,
            init=normal(init_std),
        )
        self.linear_fc2 = ExpertLinear(
            config.num_experts,
            ffn_size,
            hidden_size,
            ctx,
            product,
            split=Split(dim=2, axis="etp"),
            bias=bias,
            init=normal(output_init_std),
        )

    def use_kernels(self, kernels: Kernels) -> None:
        """See mt_core.nn.kernels.choice.UsesKernels."""
        self.activate = pick_activation(self.activation, self.device_type, kernels)

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        counts: Tensor,
        order: RowOrder | None = None,
        weigh: WeighsOutputs | None = None,
    ) -> Tensor:
        """x [R, H] -> the same; with an order tokens [n, H] -> the same. weights [R], counts [experts of this rank].

        weigh: applies the weights to the rows of the second product, in place of the first product's.
        """
        groups = Groups(counts)
        if weigh is not None:
            rows = x if order is None else order.permute(x)
            weighed = weigh(self._compute(rows, torch.ones_like(weights), groups, None), weights, groups)
            return weighed if order is None else order.unpermute(weighed)
        if order is None or self._products_permute:
            return self._compute(x, weights, groups, order)
        return order.unpermute(self._compute(order.permute(x), weights, groups, None))

    @property
    def _products_permute(self) -> bool:
        return self.permute_fusion and all(
            isinstance(linear.product, PermutingProduct) for linear in (self.linear_fc1, self.linear_fc2)
        )

    def _compute(self, x: Tensor, weights: Tensor, groups: Groups, order: RowOrder | None) -> Tensor:
        if self.weighs_inputs:
            x, weights = x * weights[:, None].to(x.dtype), torch.ones_like(weights)
        has_bias, rows = self.linear_fc1.bias is not None, len(weights)
        # [R, F], for gated activations [R, 2F]
        inner = self.linear_fc1(x, groups, read=order)
        if has_bias:
            inner = inner + self.linear_fc1.bias_rows(groups, rows)
        out = self._activated_product(inner, weights, groups, order)
        if has_bias:
            # The weight of a row applies to fc2(...) + bias; the product has it already through its input, the bias
            # gets it here.
            bias = (self.linear_fc2.bias_rows(groups, rows) * weights[:, None]).to(out.dtype)
            out = out + (bias if order is None else order.unpermute(bias))
        return out

    def _activated_product(self, inner: Tensor, weights: Tensor, groups: Groups, order: RowOrder | None) -> Tensor:
        """fc2(activation(inner) * weights). With recomputation, nothing of the activation is saved, nor its output."""
        if not (self.recompute_activation and self.training):
            return self.linear_fc2(self.activate(inner, weights), groups, written=order)
        # Two steps: checkpoint saves nothing inside of the activation, and recompute_saved nothing of its output, which
        # fc2 would save as its input.
        activated = checkpoint(self.activate, inner, weights, use_reentrant=False)
        # Detached: the recomputation in fc2's backward pass needs values and no graph.
        with recompute_saved(activated, partial(self.activate, inner.detach(), weights.detach())):
            return self.linear_fc2(activated, groups, written=order)

    def offload_parts(self, names: Collection[str], offload: Callable[..., Any]) -> Collection[str]:
        """See mt_core.nn.offload.OffloadsParts. An activation that is recomputed waits with its output."""
        if "expert_fc1" in names:
            fc1 = self.linear_fc1
            fc1.forward = offload(fc1.forward, fc1.parameters)  # type: ignore[method-assign]
        if "moe_act" in names and self.recompute_activation:
            self.recompute_activation = False
            product = offload(self._activated_product, self.linear_fc2.parameters)
            self._activated_product = product  # type: ignore[method-assign]
        elif "moe_act" in names:
            self.activate = offload(self.activate)
        return {"expert_fc1", "moe_act"}

    def host_wait(self) -> str | None:
        """See mt_core.nn.auxiliary.SynchronizesHost."""
        return self.linear_fc1.host_wait() or self.linear_fc2.host_wait()

    def extra_repr(self) -> str:
        return f"product={self.product}"
