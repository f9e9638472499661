"""x W^T in FP8 for linear layers, tensor-parallel or not: one autograd function for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_core._torch_compat import ScalingRecipe, gradients_wanted, scaled_mm, scaled_mm_in_tiles
from mt_core.nn.dropout import SAMPLE
from mt_core.nn.fp8.scaling import Operand, Scaling
from mt_core.nn.kernels.reference.fp8_casts import Activated, Along, Granularity, Map, Matrix, Role, Scaled, computed
from mt_core.nn.linear import SEQUENCE_DIM, Cut, leave_tensor_parallel, start_sum, weight_gradient
from mt_core.nn.main_grad import MainGrad, main_gradient_of
from mt_core.parallel.collectives import all_gather
from mt_core.parallel.context import SINGLE, Axis, ParallelContext

# -- products of scaled matrices: a [M, K] times b [N, K] transposed -> [M, N] in a wider format ----------

SCALES_PER_WORD = 4
"""cuBLAS reads so many scales at once: of 128 x 128 blocks along K, of 1 x 128 blocks along the rows."""
MICROSCALED = (Granularity.MX_BLOCK, Granularity.E2M1_BLOCK)

RECIPES: Mapping[Granularity, ScalingRecipe] = {
    Granularity.TENSOR: ScalingRecipe.TENSOR,
    Granularity.ROW: ScalingRecipe.ROW,
    Granularity.ROW_BLOCK: ScalingRecipe.BLOCK_1X128,
    Granularity.SQUARE_BLOCK: ScalingRecipe.BLOCK_128X128,
    Granularity.MX_BLOCK: ScalingRecipe.BLOCK_1X32,
    Granularity.E2M1_BLOCK: ScalingRecipe.BLOCK_1X16,
}


class Product(Protocol):
    """fast: sums may keep fewer bits than fp32 on the way (Hopper's fast accumulation), as forward passes allow."""

    def __call__(self, a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor: ...


def emulated_product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """What the numbers stand for, multiplied and summed in fp32. Runs anywhere; the reference."""
    if a.whole is None or b.whole is None:
        return (a.decode() @ b.decode().t()).to(dtype)  # [M, K] x [K, N]
    # Numbers with the scales of their blocks are exact in fp32; the factors of the matrices follow, as on a GPU.
    return (a.decode_blocks() @ b.decode_blocks().t() * (a.whole * b.whole)).to(dtype)


def torch_product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """torch's scaled_mm: cuBLAS or CUTLASS on a GPU of compute capability 8.9 and up; blocks of 128 on Hopper alone,
    those of 32 and 16 on 10.0 and up."""
    if a.granularity in MICROSCALED:
        return _microscaled_product(a, b, dtype)
    blocks = Granularity.ROW_BLOCK in (a.granularity, b.granularity)
    rows, columns = len(a.data), len(b.data)
    if blocks:
        a, b = _with_whole_words(a), _with_whole_words(b)
    product = scaled_mm(
        a.data.contiguous(),
        # scaled_mm takes b column by column: K next to one another for both operands.
        b.data.contiguous().t(),
        (_left_scale(a), _right_scale(b)),
        (RECIPES[a.granularity], RECIPES[b.granularity]),
        dtype,
        fast=fast and not blocks,
    )
    return product[:rows, :columns]


def _with_whole_words(x: Scaled) -> Scaled:
    """Zeros behind the last row, where the scales of 1 x 128 blocks would end within a word."""
    missing = -len(x.data) % SCALES_PER_WORD
    if x.granularity is not Granularity.ROW_BLOCK or missing == 0:
        return x
    data = F.pad(x.data.view(torch.uint8), (0, 0, 0, missing)).view(x.data.dtype)  # torch does not pad FP8
    return Scaled(data, F.pad(x.scale, (0, 0, 0, missing), value=1.0), x.granularity)


def _microscaled_product(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """[M, K] x [K, N] of MXFP8 or NVFP4."""
    recipe, is_e2m1 = RECIPES[a.granularity], a.granularity is Granularity.E2M1_BLOCK
    left, right = (x.data.contiguous() for x in (a, b))
    if is_e2m1:
        left, right = (data.view(torch.float4_e2m1fn_x2) for data in (left, right))
    return scaled_mm_in_tiles(left, right.t(), (_tiled_scales(a), _tiled_scales(b)), recipe, dtype)


def _tiled_scales(x: Scaled) -> list[Tensor]:
    """The scales of blocks in the order that the tensor cores read, and where there is one the matrix's."""
    return [in_scale_tiles(x.scale)] if x.whole is None else [in_scale_tiles(x.scale), x.whole]


def in_scale_tiles(scale: Tensor) -> Tensor:
    """[rows, n] -> flat: tiles of 128 x 4 with zeros at the ends, each as 32 x 16 bytes: row r of a tile is at
    [r % 32, 4 * (r // 32):] (cuBLAS, layout of 1D block scaling factors)."""
    rows, columns = scale.shape
    data = F.pad(scale.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = data.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))  # [row tiles, 4, 32, column tiles, 4]
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scale.dtype)


def _left_scale(a: Scaled) -> Tensor:
    """[] | [M, 1] | [M, K / 128] with rows next to one another in memory"""
    # cuBLAS reads the scales of 1 x 128 blocks with M next to one another; the shape stays [M, K / 128].
    return a.scale.t().contiguous().t() if a.granularity is Granularity.ROW_BLOCK else a.scale


def _right_scale(b: Scaled) -> Tensor:
    """[] | [1, N] | as the left one | [K / 128 rounded up to 4, N / 128] with rows next to one another in memory"""
    if b.granularity is Granularity.ROW:
        return b.scale.t().contiguous()
    if b.granularity is Granularity.ROW_BLOCK:
        return _left_scale(b)
    if b.granularity is Granularity.SQUARE_BLOCK:
        return F.pad(b.scale, (0, -b.scale.shape[1] % SCALES_PER_WORD)).t()  # [N / 128, K / 128]
    return b.scale


@dataclass(frozen=True)
class Fp8Multiply:
    """A `Multiply` in FP8. cut: what of the layer's matrix tensor-parallel ranks have shards of.

    Forward y = x W^T; backward dx = dy W and dW = dy^T x. The products take their operands in FP8 and give the format
    of x and of W. wgrad_in_fp8=False computes dW from 16 bits, for which x is kept in them, and may add it to a main
    gradient.
    """

    scaling: Scaling
    product: Product
    cut: Cut
    wgrad_in_fp8: bool = True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, ctx: ParallelContext) -> Tensor:
        """x [..., in] -> [..., out], sharded as the layer says."""
        return self.leave(_Fp8Linear.apply(x, weight, self.call(weight, ctx)), bias, ctx)

    def call(self, weight: Tensor, ctx: ParallelContext) -> LayerCall:
        # The sample of the forward pass: schedules run backward passes of other micro-batches between.
        sample = 0 if torch.compiler.is_compiling() else SAMPLE.get()
        return LayerCall(self, ctx.tp, ctx.sequence_parallel, torch.is_grad_enabled(), main_gradient_of(weight), sample)

    def leave(self, out: Tensor, bias: Tensor | None, ctx: ParallelContext) -> Tensor:
        """The layer's result from the product of this rank's shards."""
        if self.cut == "input" and ctx.tp.size > 1:
            out = leave_tensor_parallel(out, ctx)
        return out if bias is None else out + bias


@dataclass(frozen=True)
class LayerCall:
    """One use of a layer on one rank."""

    layer: Fp8Multiply
    axis: Axis
    sequence_parallel: bool
    notes: bool
    """Whether its magnitudes count for later scales: in training passes."""
    main: MainGrad | None
    """The weight's main gradient."""
    sample: int = 0
    """First one of the micro-batch."""

    @property
    def communicates(self) -> bool:
        """Whether x is what all ranks multiply, and its gradient the sum of theirs."""
        return self.layer.cut == "output" and self.axis.size > 1

    @property
    def gathers(self) -> bool:
        return self.communicates and self.sequence_parallel

    def operand(self, matrix: Matrix, role: Role, along: Along = "columns", scale: Tensor | None = None) -> Operand:
        return self.layer.scaling.operand(
            matrix, role, along=along, cut_over=self._cut_over(role), note=self.notes, scale=scale, sample=self.sample
        )

    def restored(self, kept: Matrix, scale: Tensor | None) -> Operand:
        """The input, of all tokens."""
        # What was gathered is whole on every rank.
        return self.layer.scaling.restored(kept, scale, "input", SINGLE if self.gathers else self._cut_over("input"))

    def _cut_over(self, role: Role) -> Axis:
        """The ranks that have the other shards of a matrix."""
        cut = self.layer.cut
        if role == "weight":
            is_sharded = cut != "none"
        elif role == "input":
            # With sequence parallelism the scale is that of all tokens, as they are gathered in FP8; a row-parallel
            # layer's input is sharded over features.
            is_sharded = self.sequence_parallel or cut == "input"
        else:
            # A row-parallel layer's gradient is whole on every rank: it has passed the gather that is the backward of
            # leave_tensor_parallel.
            is_sharded = cut == "output" or (self.sequence_parallel and cut == "none")
        return self.axis if is_sharded else SINGLE

    def multiply(self, a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        return self.layer.product(a, b, dtype, fast=fast)  # [M, N]

    def map_rows(self, shape: torch.Size) -> Map | None:
        """Rows of this rank's shard of a sequence -> those of all. shape: of the shard, [B, S / tp, ...]."""
        return (lambda rows: gather_rows(rows, shape, self.axis)) if self.gathers else None


class _Fp8Linear(torch.autograd.Function):
    """With sequence parallelism x is all-gathered in FP8, and only this rank's shard is saved for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: LayerCall) -> Tensor:
        out, saved = forward_product(x.flatten(0, -2), x.shape, weight, call, ctx.needs_input_grad[1])
        ctx.save_for_backward(*saved)
        ctx.call, ctx.shape = call, x.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        saved, grad = SavedProduct(*ctx.saved_tensors), grads[0].flatten(0, -2)
        return *backward_products(grad, ctx.shape, saved, ctx.call, gradients_wanted(ctx, 2)), None


class SavedProduct(NamedTuple):
    """What the backward pass of a product needs. kept: its input, cast or not; weight: [out, in]. The scales belong to
    whole matrices; None where the casts of the backward pass compute their own."""

    kept: Matrix
    scale: Tensor | None
    weight: Tensor
    weight_scale: Tensor | None


def forward_product(
    x: Matrix, shape: torch.Size, weight: Tensor, call: LayerCall, wants_dweight: bool
) -> tuple[Tensor, SavedProduct]:
    """x [rows, in], of a tensor of `shape` -> x W^T [..., out], and what its backward pass needs: tensors alone. Of an
    Activated that is not cast for both products at once its own input is kept."""
    # Column-parallel with sequence parallelism: x [B, S / tp, in] -> cast -> bytes of all ranks -> y [B, S, out / tp].
    # Row-parallel: x [B, S, in / tp] -> cast -> y [B, S, out], which `leave` sums over ranks.

    # What is gathered again for the weight's gradient has to be kept by rows.
    # A transpose that is needed later costs less to write with the cast than to make from its bytes.
    is_both = call.layer.wgrad_in_fp8 and wants_dweight and not call.gathers
    inputs, weights = call.operand(x, "input", "both" if is_both else "columns"), call.operand(weight, "weight")
    a = inputs.along_columns(call.map_rows(shape))  # [all rows, in]
    out = call.multiply(a, weights.along_columns(), weight.dtype if isinstance(x, Activated) else x.dtype, fast=True)
    # The 16-bit input is what a weight gradient in 16 bits multiplies.
    kept = inputs.kept() if call.layer.wgrad_in_fp8 else x
    saved = SavedProduct(kept.x if isinstance(kept, Activated) else kept, inputs.scale, weight, weights.scale)
    return out.view(*_gathered_shape(shape, call), len(weight)), saved


def backward_products(
    grad: Matrix, shape: torch.Size, saved: SavedProduct, call: LayerCall, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """grad [rows, out] -> the gradients of x and of the weight. saved: as forward_product gave it."""
    # cast dy -> dx = dy W, whose reduction starts -> gather the kept bytes of x -> dW = dy^T x -> wait for dx.
    kept, scale, weight, weight_scale = saved
    wants_dx, wants_dweight = wanted
    along_rows: Along = "both" if wants_dx else "rows"
    is_in_fp8 = wants_dweight and call.layer.wgrad_in_fp8
    gradients = call.operand(grad, "gradient", along_rows if is_in_fp8 else "columns")
    dx = dweight = reducing = None
    if wants_dx:
        # Cast again by the forward pass's scale: no FP8 copy of the weight is held between the passes.
        weights = call.operand(weight, "weight", "rows", weight_scale)
        rows = call.multiply(gradients.along_columns(), weights.along_rows(), weight.dtype)
        # Started first, so that the collective runs beside the product for the weight's gradient.
        dx, reducing = _leave(rows.view(*_gathered_shape(shape, call), weight.shape[1]), call)
    if wants_dweight:
        gather = call.map_rows(shape)
        # [all rows, in]: sequence parallelism keeps a shard of x and gathers its bytes again (Megatron does so, too).
        whole = gather(kept) if gather is not None and isinstance(kept, Tensor) else kept
        dweight = _weight_gradient(call, grad, gradients, whole, scale, weight.dtype)
    # The stream waits, not the host, where the backend is NCCL.
    if reducing is not None:
        reducing.wait()
    return dx, dweight


def _weight_gradient(
    call: LayerCall, grad: Matrix, gradients: Operand, kept: Matrix, scale: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """dy^T x: [out, in], or None after it was added to the main gradient. No product of FP8 adds to what is there."""
    if not call.layer.wgrad_in_fp8:
        return weight_gradient(computed(grad), computed(kept), call.main)
    inputs = call.restored(kept, scale)
    return call.multiply(gradients.along_rows(), inputs.along_rows(), dtype)


def _leave(dx: Tensor, call: LayerCall) -> tuple[Tensor, dist.Work | None]:
    """Start the all-reduce of x's gradient, or with sequence parallelism the reduce-scatter."""
    if not call.communicates:
        return dx, None
    return start_sum(dx, call.axis, call.gathers)


def _gathered_shape(shape: torch.Size, call: LayerCall) -> list[int]:
    """[B, S / tp, in] -> [B, S]"""
    sizes = list(shape[:-1])
    if call.gathers:
        sizes[SEQUENCE_DIM] *= call.axis.size
    return sizes


def gather_rows(rows: Tensor, shape: torch.Size, axis: Axis) -> Tensor:
    """[B * S / tp, n] of each rank -> [B * S, n], any format. shape: [B, S / tp, ...]. Collective."""
    # Communication backends have no FP8 dtypes: send the bytes as uint8.
    sent = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    return all_gather(sent.unflatten(0, shape[:-1]), SEQUENCE_DIM, axis).flatten(0, 1).view(rows.dtype)
