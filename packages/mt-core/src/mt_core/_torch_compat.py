"""The only place that touches names torch keeps private, so that a new torch is checked here first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def scale_all_(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply each tensor in place, in as few kernels as the device allows. factor: a number, or [] on the device."""
    torch._foreach_mul_(tensors, factor)


NORM_BLOCK = 16384
"""Elements of a norm on a CPU. There torch adds all squares up in fp32 one after another: the norm of 10 M elements is
off by 4e-4 of itself, that of a block by 2e-7."""


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """2-norms, whose norm is that of all elements, in as few kernels as the device allows: of each tensor, on a CPU of
    each block of one. In fp32 for tensors of 16 bits."""
    dtype = torch.float32 if any(tensor.dtype.itemsize < 4 for tensor in tensors) else None
    return list(torch._foreach_norm([block for tensor in tensors for block in _norm_blocks(tensor)], dtype=dtype))


def _norm_blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    is_small = tensor.device.type != "cpu" or tensor.numel() <= NORM_BLOCK
    return (tensor,) if is_small else tensor.reshape(-1).split(NORM_BLOCK)


def zero_all_(tensors: list[Tensor]) -> None:
    """Zero each tensor in place, in as few kernels as the device allows."""
    torch._foreach_zero_(tensors)


def free_cuda_bytes(device: torch.device) -> int:
    """Memory of a GPU for new tensors: what is free, and what torch holds without using it."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def spin_cuda(cycles: int) -> None:
    """Launch a kernel that keeps the current CUDA stream busy for this many clock cycles."""
    torch.cuda._sleep(cycles)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What communicates tensors of this device in a group: ProcessGroupNCCL or ProcessGroupGloo."""
    return group._get_backend(device)


def time_limit_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long an operation of a group may take; None for backends without a limit."""
    limits = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    return max((options._timeout for options in limits if options is not None), default=None)


def default_store() -> dist.Store:
    """The store through which the ranks of the world met, for the main thread: a call that waits blocks others on this
    connection. Of its keys the process groups and the monitors have theirs; prefix your own."""
    # No clone: each is another connection to the server, whose accepting may take seconds when many come and go.
    return dist.distributed_c10d._get_default_store()


# -- products overlapped with collectives ------------------------------------------------------------
#
# In parts, while those of other ranks are copied over NVLink: ranks of the group have access to each other's memory.


def gather_matmul(x: Tensor, matrix: Tensor, dim: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """x of this rank, matrix [in, out] -> the x of all ranks along `dim`, and its product with the matrix"""
    whole, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [matrix], dim, group.group_name)
    return whole, out.contiguous()  # it is, with one sample; else the dimension `dim` comes first in memory


def matmul_reduce_scatter(x: Tensor, matrix: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """x [..., in], matrix [in, out] -> this rank's part, along `dim`, of the sum of products over ranks"""
    out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", dim, group.group_name)
    return out


def symmetric_memory_objection() -> str | None:
    """Why there are no such products with this torch; None if there are."""
    try:
        import torch.distributed._symmetric_memory  # noqa: F401
    except ImportError as missing:
        return str(missing)
    return None


# -- scaled products ---------------------------------------------------------------------------------
#
# The operators below torch.nn.functional's scaled_mm and scaled_grouped_mm: those functions handle enumerations in a
# way that torch.compile of torch 2.11 cannot trace.


class ScalingRecipe(IntEnum):
    """What shares a scale of an FP8 operand. The numbers are those of torch.nn.functional.ScalingType."""

    TENSOR = 0
    ROW = 1
    BLOCK_1X16 = 2
    BLOCK_1X32 = 3
    BLOCK_1X128 = 4
    BLOCK_128X128 = 5


def has_scaled_mm_on_cpu() -> bool:
    """torch 2.11 has the operator on GPUs alone."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"))


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    recipes: tuple[ScalingRecipe, ScalingRecipe],
    dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    """a [M, K] and b [K, N] in FP8, with their scales and what shares one -> [M, N] in dtype.

    fast: accumulate in fewer bits than fp32 (Hopper)."""
    left, right = (int(recipe) for recipe in recipes)
    out: Tensor = torch.ops.aten._scaled_mm_v2(
        a, b, [scales[0]], [left], [], [scales[1]], [right], [], None, dtype, [], fast
    )
    return out


_TILES_32_4_4 = 1
"""torch.nn.functional.SwizzleType.SWIZZLE_32_4_4: the order of scales in which tensor cores read them."""


def scaled_mm_in_tiles(
    a: Tensor, b: Tensor, scales: tuple[list[Tensor], list[Tensor]], recipe: ScalingRecipe, dtype: torch.dtype
) -> Tensor:
    """a [M, K] and b [K, N] with scales of blocks of 1 x 16 or 1 x 32 in tiles, and perhaps one of each matrix ->
    [M, N] in dtype."""
    recipes = [int(recipe), int(ScalingRecipe.TENSOR)][: len(scales[0])]
    order = [_TILES_32_4_4, 0][: len(scales[0])]
    out: Tensor = torch.ops.aten._scaled_mm_v2(
        a, b, scales[0], recipes, order, scales[1], recipes, order, None, dtype, [], False
    )
    return out


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], ends: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """Products of groups of rows with a scale for each row of both operands; a, b and ends as in
    torch.nn.functional.grouped_mm."""
    by_row = [int(ScalingRecipe.ROW)]
    out: Tensor = torch.ops.aten._scaled_grouped_mm_v2(
        a, b, [scales[0]], by_row, [], [scales[1]], by_row, [], ends, None, dtype, [], fast
    )
    return out


# -- attention that also returns the log-sum-exp of its scores, and its backward --------------------
#
# Shapes: q [B, N, S, D], k and v [B, G, T, D] with G dividing N, out [B, N, S, D], lse [B, N, S] in fp32 (fp64 for
# fp64), scores scaled by 1 / sqrt(D). Only the last dimension has to be contiguous. The backward takes the out and
# lse of the whole softmax, of which (k, v) may be a part: it returns that part's share of the gradients.

_CUDA_HEAD_DIM_MULTIPLE = 8
_CUDA_HEAD_DIM_MAX = 256


def flash_cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """bias [B or 1, N or 1, S, T] in q's dtype or fp32. A row that sees no key gets out 0 and lse 0, not -inf."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, causal, attn_mask=bias)
    return out, lse


def flash_cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of q, k, v"""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = op(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias)
    return dq, dk, dv


def flash_cuda_serves(q: Tensor) -> bool:
    """Whether torch's flash kernel for CUDA takes this dtype and head size on this device."""
    head_dim = q.shape[-1]
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and head_dim % _CUDA_HEAD_DIM_MULTIPLE == 0
        and head_dim <= _CUDA_HEAD_DIM_MAX
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and torch.backends.cuda.is_flash_attention_available()
    )


def flash_cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """-> out, lse"""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def flash_cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of q, k, v. The state of the random numbers is not read, there being no dropout."""
    random_state = torch.empty(0, dtype=torch.uint64, device=q.device)
    lengths = (None, None, q.shape[2], k.shape[2])  # cumulative lengths: only for ragged batches
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    dq, dk, dv = op(grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, random_state, random_state)
    return dq, dk, dv


_CUDNN_HEAD_DIM_MAX = 128


def cudnn_serves(q: Tensor) -> bool:
    """Whether cuDNN's attention takes this dtype and head size on this device, and is the fastest there (Hopper and
    later). Its backward adds in no fixed order."""
    head_dim = q.shape[-1]
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and head_dim % _CUDA_HEAD_DIM_MULTIPLE == 0
        and head_dim <= _CUDNN_HEAD_DIM_MAX
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
        and torch.backends.cudnn.is_available()
        and torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
    )


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """-> out, lse"""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.squeeze(-1)


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of q, k, v. The state of the random numbers is not read, there being no dropout."""
    random_state = torch.empty((), dtype=torch.int64, device=q.device)
    lengths = (None, None, q.shape[2], k.shape[2])
    statistics = lse.contiguous().unsqueeze(-1)
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    dq, dk, dv = op(grad, q, k, v, out, statistics, random_state, random_state, None, *lengths, 0.0, causal)
    return dq, dk, dv


def packed_attention() -> Callable[..., tuple[Tensor, Tensor]]:
    """attend(q, k, v, starts, longest, window) -> (out, lse): differentiable attention within documents.

    q [T, N, D], k and v [T, G, D], starts [documents + 1] int32, longest: a bound of their lengths, window: keys before
    and after, -1 for all. out [T, N, D], lse [N, T]. Torch 2.15 requires fewer key-value heads to be declared; 2.11
    passes them to the same kernel.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    declared = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def attend(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = declared if k.shape[1] < q.shape[1] else {}
        aux = AuxRequest(lse=True)
        out, lse = varlen_attn(q, k, v, starts, starts, longest, longest, return_aux=aux, window_size=window, **options)
        return out, lse

    return attend


# -- orders of pipeline schedules --------------------------------------------------------------------


def torch_pipeline_order(
    class_name: str, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> list[list[tuple[str, int, int]]]:
    """The computation of a multi-stage schedule of torch.distributed.pipelining, without its runtime.

    For each rank its actions (F, B, I or W; stage; micro-batch). An action that overlaps two is given as both, in turn.
    Imports torch.distributed.pipelining, which takes seconds.
    """
    from torch.distributed.pipelining import schedules

    class OrderOnly(getattr(schedules, class_name)):  # type: ignore[misc]
        def _prepare_schedule_with_comms(self, actions: object, format: str = "compute_only") -> None:
            """Communication, and checks that take long with many ranks, are left out."""

    # All that an order depends on of stages.
    stages = [
        SimpleNamespace(
            num_stages=num_ranks * stages_per_rank, group_size=num_ranks, group_rank=0, submod=torch.nn.Identity()
        )
        for _ in range(stages_per_rank)
    ]
    order = OrderOnly(stages, num_micro_batches).pipeline_order
    return [
        [
            (part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in order[rank]
            if action is not None
            for part in action.sub_actions or (action,)
        ]
        for rank in range(num_ranks)
    ]


# -- which gradients a backward pass computes ----------------------------------------------------


def gradients_wanted(ctx: Any, count: int) -> tuple[bool, ...]:
    """In the backward of an autograd function: whether each of its first `count` inputs gets a gradient in this pass.

    `ctx.needs_input_grad` is decided in the forward pass. A pass for some inputs alone, as one half of a split
    backward pass is, computes fewer.
    """
    known = ctx.needs_input_grad[:count]
    if torch.compiler.is_compiling():
        return tuple(known)
    edges = ctx.next_functions[:count]
    return tuple(
        needed and node is not None and _will_run(node) for needed, (node, _) in zip(known, edges, strict=True)
    )


def _will_run(node: Any) -> bool:
    """Whether the backward pass at hand goes through a node of the graph."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as refused:
        # torch says this, and nothing else, of a leaf whose gradient torch.autograd.grad computes.
        if "running autograd.grad()" not in str(refused):
            raise
        return True


class UncompiledDispatchMode(TorchDispatchMode):
    """A mode that is never inside compiled code. Torch would import its compiler, for seconds, to make sure of it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


NOT_COMPILED = "__dynamo_disable"
"""Attribute of a function in which torch keeps what it calls in its place, so that it is never compiled."""


@contextmanager
def uncompiled_references() -> Iterator[None]:
    """Within this context the references in Python by which torch computes shapes on the meta device are called as they
    are. Each of them otherwise imports the compiler, for seconds, on its first call. Nothing may be compiled within.
    One thread at a time."""
    called = [reference for reference in _references() if not hasattr(reference, NOT_COMPILED)]
    for reference in called:
        setattr(reference, NOT_COMPILED, reference)
    try:
        yield
    finally:
        for reference in called:
            reference.__dict__.pop(NOT_COMPILED, None)


@cache
def _references() -> frozenset[FunctionType]:
    """The references of all operations, and what their decorators call."""
    from torch._decomp import global_decomposition_table

    references: set[FunctionType] = set()
    for table in global_decomposition_table.values():
        for reference in table.values():
            called: object = reference
            while isinstance(called, FunctionType):
                references.add(called)
                called = _decorated(called)
    return frozenset(references)


def _decorated(function: FunctionType) -> object:
    """What a decorator of torch calls in a function that it returns; None for other functions."""
    variables = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return variables["fn"].cell_contents if "fn" in variables else None


# -- tensors that stand for others -------------------------------------------------------------------


def tensor_without_memory(
    cls: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An instance of a subclass of Tensor that implements `__torch_dispatch__`; operations on it are the subclass's."""
    tensor: Tensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
    return tensor


def call_without_overrides(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """func, past the `__torch_function__` of subclasses."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def pack_linear_weight(weight: Tensor, rows: int) -> Tensor | None:
    """[N, K] in oneDNN's own order, for products with about so many rows on a CPU; None where torch lacks oneDNN."""
    if not torch.backends.mkldnn.is_available() or weight.dtype != torch.float32:
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """[M, K] times what pack_linear_weight returned -> [M, N]"""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def pack_int8_weight(weight: Tensor) -> Tensor | None:
    """int8 [N, K] in oneDNN's own order, for products on a CPU with AMX; None elsewhere: without AMX oneDNN has no
    kernel for signed inputs and such weights, and its reference takes several hundred times as long as `int8_product`.
    """
    if weight.device.type != "cpu" or not hasattr(torch.ops.onednn, "qlinear_prepack"):
        return None
    if not torch.cpu._is_amx_tile_supported():
        return None
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
    return packed


def packed_int8_linear(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """int8 [M, K] times what pack_int8_weight returned, times scale [N] -> fp32 [M, N]. zero: zeros [N], int32"""
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [None], ""
    )
    return product


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """int8 [M, K] and int8 [N, K] -> int32 [M, N], exactly."""
    rows, columns = x.shape[0], len(weight)
    if x.device.type == "cuda":
        # cuBLAS takes more than 16 rows, and multiples of 8 of the other sizes.
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % 8, 0, max(17 - rows, 0)))
        weight = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 8, 0, -columns % 8))
    product: Tensor = torch._int_mm(x, weight.t())
    return product[:rows, :columns]
