# mypy: disable-error-code="no-untyped-def"
"""AdamW over lists of tensors in two launches, and a third for tensors that 16-byte accesses do not fit.

An update reads and writes each weight, moment and remainder once and reads each gradient once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.nn.kernels.reference.adamw import NAN_HIGH, AdamWOptions, AdamWTensors
from mt_core.nn.kernels.triton_kernels.launch import on_device

# -- lists of tensors: one launch whatever their number, by tables on the device ---------------------
#
# How the tensors are cut into blocks depends on their sizes and is computed once. Addresses change where autograd
# allocates the gradients anew in each step; then a few kilobytes are copied to the device, and the host does not wait.

BLOCK = 2048
"""Elements of a program."""


@dataclass(frozen=True)
class Blocks:
    """owner, first: [programs], the tensor that a program works on (int32) and its first element (int64)."""

    owner: Tensor
    first: Tensor

    @property
    def programs(self) -> int:
        return len(self.owner)


@dataclass(frozen=True)
class TensorTable:
    """addresses: [lists, tensors] int64. sizes: [tensors] int64.

    wide: blocks of the tensors whose addresses are all multiples of 16 bytes and whose size is one of 8, so that
    accesses may be 16 bytes wide. narrow: blocks of the other tensors.
    """

    addresses: Tensor
    sizes: Tensor
    wide: Blocks
    narrow: Blocks

    @property
    def tensors(self) -> int:
        return len(self.sizes)


class TableCache:
    """The tables of the lists that a program works on, by their addresses and sizes; the oldest go first."""

    def __init__(self, capacity: int = 16) -> None:
        self._capacity = capacity
        self._blocks: dict[tuple[tuple[int, ...], tuple[bool, ...]], tuple[Tensor, Blocks, Blocks]] = {}
        self._tables: dict[tuple[tuple[int, ...], ...], TensorTable] = {}

    def __call__(self, lists: Sequence[Sequence[Tensor]]) -> TensorTable:
        """lists: of tensors of equal length; the first decides sizes. All contiguous, on one device."""
        # Addresses and sizes are all that a table holds, so a tensor that takes over freed memory of one size is served
        # by the same table.
        sizes = tuple(tensor.numel() for tensor in lists[0])
        key = (*(tuple(t.data_ptr() for t in tensors) for tensors in lists), sizes)
        if key not in self._tables:
            if len(self._tables) == self._capacity:
                # Insertion order: the oldest table.
                del self._tables[next(iter(self._tables))]
            self._tables[key] = TensorTable(
                _addresses(lists), *self._blocks_of(sizes, _aligned(lists), lists[0][0].device)
            )
        return self._tables[key]

    def _blocks_of(
        self, sizes: tuple[int, ...], aligned: tuple[bool, ...], device: torch.device
    ) -> tuple[Tensor, Blocks, Blocks]:
        """The sizes on the device, and the blocks of aligned tensors and of the others."""
        key = sizes, aligned
        if key not in self._blocks:
            on_host, chosen = torch.tensor(sizes), torch.tensor(aligned)
            wide, narrow = (_cut(on_host * mask, device) for mask in (chosen, ~chosen))
            self._blocks[key] = on_host.to(device), wide, narrow
        return self._blocks[key]


def _cut(sizes: Tensor, device: torch.device) -> Blocks:
    """See Blocks. sizes: on the host; 0 for a tensor that is left out."""
    counts = (sizes + BLOCK - 1) // BLOCK
    # sizes 5000, 100 and blocks of 2048: owner = 0 0 0 1, first = 0 2048 4096 0. A tensor without elements gets no
    # program.
    owner = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    before = torch.repeat_interleave(counts.cumsum(0) - counts, counts)  # [programs], blocks of the tensors before
    first = (torch.arange(len(owner)) - before) * BLOCK
    return Blocks(owner.to(torch.int32).to(device), first.to(device))


def _addresses(lists: Sequence[Sequence[Tensor]]) -> Tensor:
    """[lists, tensors] on the device. Raises ValueError for a tensor that is not contiguous."""
    for tensors in lists:
        if any(not tensor.is_contiguous() for tensor in tensors):
            raise ValueError("kernels over lists of tensors need contiguous ones")
    device = lists[0][0].device
    # Pinned: a copy from other memory would make the host wait for the device.
    addresses = torch.tensor(
        [[tensor.data_ptr() for tensor in tensors] for tensors in lists], pin_memory=device.type == "cuda"
    )
    return addresses.to(device, non_blocking=True)


def _aligned(lists: Sequence[Sequence[Tensor]]) -> tuple[bool, ...]:
    """Whether 16-byte accesses fit a tensor in all lists, for each tensor."""
    # Lists of single numbers, such as step counts, are not read by the block.
    sizes = [tensor.numel() for tensor in lists[0]]
    by_block = [tensors for tensors in lists if [t.numel() for t in tensors] == sizes]
    # 8 elements of 2 bytes are one access of 16 bytes; of 4 bytes they are two.
    return tuple(
        size % 8 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        for size, *tensors in zip(sizes, *by_block, strict=True)
    )


_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_WARPS = 8
_NAN_HIGH = tl.constexpr(NAN_HIGH)
# Rows of TensorTable.addresses.
_WEIGHTS, _GRADIENTS, _MOMENTS1, _MOMENTS2, _STEPS, _REMAINDERS, _COPIES = (tl.constexpr(i) for i in range(7))


@triton.jit
def _adamw_advance(
    addresses, tensors, scale, corrections, BETA1: tl.constexpr, BETA2: tl.constexpr, BLOCK: tl.constexpr
):
    """Steps go up by one unless the scale is not finite; corrections [2, tensors]: 1 - beta1^t, sqrt(1 - beta2^t)."""
    # A launch of its own before the update: every program of a tensor reads its step, and none may change it meanwhile.
    # BETA1, BETA2: natural logarithms; constexpr, as Triton passes a float argument in fp32.
    which = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = which < tensors
    # 0 for lanes behind the last tensor, whose accesses are masked too.
    address = tl.load(addresses + tensors * _STEPS + which, mask=inside, other=0)
    steps = address.to(tl.pointer_type(tl.float32))
    factor = tl.load(scale)
    # NaN compares false. Decided on the device: the host does not wait to learn whether the step counts.
    finite = tl.abs(factor) < float("inf")
    step = tl.load(steps, mask=inside, other=1.0) + tl.where(finite, 1.0, 0.0)
    tl.store(steps, step, mask=inside)
    # In fp64: 1 - 0.999^1 in fp32 is wrong in the fifth digit.
    exponent = step.to(tl.float64)
    first = 1.0 - tl.exp(exponent * BETA1)
    second = tl.sqrt(1.0 - tl.exp(exponent * BETA2))
    tl.store(corrections + which, first.to(tl.float32), mask=inside)
    tl.store(corrections + tensors + which, second.to(tl.float32), mask=inside)


@triton.jit
def _hash32(index, step):
    """Same as the reference's hash32, in uint32."""
    # uint32 arithmetic wraps, which is the reference's & 0xFFFFFFFF.
    h = index.to(tl.uint32) ^ (step.to(tl.uint32) * 0x9E3779B1)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _round_moment(x, noise):
    """fp32 -> bf16, up with the probability that the cut-off bits say; noise in [0, 65536)."""
    # Adding up to 0xFFFF carries into bit 16 with the probability (low bits) / 65536. Sign and magnitude: negative
    # numbers move away from 0 in the same way.
    bits = x.to(tl.uint32, bitcast=True) + noise
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _high_half(w):
    """The bits of w, fp32, rounded to bf16 with ties away from zero, as int32; as the reference's split_halves."""
    return tl.where(w == w, (w.to(tl.int32, bitcast=True) + 0x8000) >> 16, _NAN_HIGH)


@triton.jit
def _pointer(addresses, row, tensors, which, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The tensor `which` of a row of the table, as a pointer."""
    # An address that comes from memory has no known alignment, and without one the compiler emits accesses of one
    # element.
    pointer = tl.load(addresses + tensors * row + which).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _adamw_update(
    addresses, sizes, owner, first, tensors, scale, corrections,
    lr, one_minus_beta1, beta2, one_minus_beta2, eps, decay,
    GRADIENT: tl.constexpr, MOMENT: tl.constexpr, COPY: tl.constexpr, HALVES: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """ALIGNED: of TensorTable.wide; without it every access is of a single element."""
    which = tl.load(owner + tl.program_id(0))
    # The first element of a program is a multiple of BLOCK, so that index, too, is known to be aligned.
    index = tl.multiple_of(tl.load(first + tl.program_id(0)), BLOCK) + tl.arange(0, BLOCK)
    factor = tl.load(scale)
    # Nothing is inside when the scale is not finite.
    size = tl.where(tl.abs(factor) < float("inf"), tl.load(sizes + which), 0)
    if ALIGNED:
        # The mask is then the same for every 8 neighbours, so that masked accesses stay 16 bytes wide.
        size = tl.multiple_of(size, 8)
    inside = index < size
    g = tl.load(_pointer(addresses, _GRADIENTS, tensors, which, GRADIENT, ALIGNED) + index, mask=inside, other=0.0)
    g = g.to(tl.float32) * factor  # [BLOCK]; factor: loss scale and clipping

    moments1 = _pointer(addresses, _MOMENTS1, tensors, which, MOMENT, ALIGNED) + index
    moments2 = _pointer(addresses, _MOMENTS2, tensors, which, MOMENT, ALIGNED) + index
    m = tl.load(moments1, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(moments2, mask=inside, other=0.0).to(tl.float32)
    m += one_minus_beta1 * (g - m)
    v = beta2 * v + one_minus_beta2 * g * g
    if tl.bfloat16 == MOMENT:
        # Already counted by _adamw_advance: the t of this update, as in the reference.
        step = tl.load(_pointer(addresses, _STEPS, tensors, which, tl.float32, False))
        noise = _hash32(index, step)
        # One hash of 32 bits serves both moments, 16 bits each.
        tl.store(moments1, _round_moment(m, noise & 0xFFFF), mask=inside)
        tl.store(moments2, _round_moment(v, noise >> 16), mask=inside)
    else:
        tl.store(moments1, m, mask=inside)
        tl.store(moments2, v, mask=inside)

    # The update takes m and v before they are rounded for storage.
    correction1 = tl.load(corrections + which)
    correction2 = tl.load(corrections + tensors + which)
    # eps is added outside of the root, as in torch.optim.AdamW.
    change = lr / correction1 * m / (tl.sqrt(v) / correction2 + eps)
    if HALVES:
        high = _pointer(addresses, _WEIGHTS, tensors, which, tl.int16, ALIGNED) + index
        low = _pointer(addresses, _REMAINDERS, tensors, which, tl.int16, ALIGNED) + index
        # bits(w) = (bits(bf16) << 16) + remainder; `low` is signed and is extended to 32 bits.
        bits = (tl.load(high, mask=inside, other=0).to(tl.int32) << 16) + tl.load(low, mask=inside, other=0)
        w = bits.to(tl.float32, bitcast=True) * decay - change
        # The remainder bits - (rounded << 16) is in [-32768, 32767], so int16 holds it.
        rounded = _high_half(w)
        tl.store(high, rounded.to(tl.int16), mask=inside)
        tl.store(low, (w.to(tl.int32, bitcast=True) - (rounded << 16)).to(tl.int16), mask=inside)
    else:
        weights = _pointer(addresses, _WEIGHTS, tensors, which, tl.float32, ALIGNED) + index
        # Decoupled decay: decay = 1 - lr * weight_decay, independent of the gradient.
        w = tl.load(weights, mask=inside, other=0.0) * decay - change
        tl.store(weights, w, mask=inside)
        if COPY is not None:
            copies = _pointer(addresses, _COPIES, tensors, which, COPY, ALIGNED) + index
            if tl.bfloat16 == COPY:
                tl.store(copies, _high_half(w).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
            else:
                tl.store(copies, w.to(COPY), mask=inside)


class TritonAdamW:
    """Same as mt_core.nn.kernels.reference.adamw.TorchAdamW. Holds the tables of the lists it was given."""

    def __init__(self) -> None:
        self._table = TableCache()

    @torch.no_grad()
    def step(self, tensors: AdamWTensors, options: AdamWOptions, scale: Tensor) -> None:
        """Raises ConfigError for fp16 weights."""
        weight, gradient, moment = (x[0].dtype for x in (tensors.weights, tensors.gradients, tensors.moments1))
        if weight == torch.float16:
            raise ConfigError("kernels.adamw=triton keeps 32-bit weights in bf16 and a remainder; fp16 has other bits")
        copy = _TRITON_TYPES[tensors.copies[0].dtype] if tensors.copies else None
        # Lists that are absent are never read; the weights' addresses stand in for theirs.
        lists = [tensors.weights, tensors.gradients, tensors.moments1, tensors.moments2, tensors.steps]
        # The number of rows is fixed, so that the row numbers above are.
        table = self._table([*lists, tensors.remainders or tensors.weights, tensors.copies or tensors.weights])
        with on_device(tensors.weights[0]):
            corrections = _advance_steps(table, options, scale)
            for blocks, aligned in ((table.wide, True), (table.narrow, False)):
                if not blocks.programs:
                    continue
                _adamw_update[(blocks.programs,)](
                    table.addresses, table.sizes, blocks.owner, blocks.first, table.tensors, scale, corrections,
                    options.lr, 1 - options.beta1, options.beta2, 1 - options.beta2, options.eps,
                    1 - options.lr * options.weight_decay,
                    _TRITON_TYPES[gradient], _TRITON_TYPES[moment], copy, bool(tensors.remainders), aligned,
                    BLOCK, num_warps=_WARPS,
                )  # fmt: skip


def _advance_steps(table: TensorTable, options: AdamWOptions, scale: Tensor) -> Tensor:
    corrections = torch.empty(2, table.tensors, dtype=torch.float32, device=scale.device)
    _adamw_advance[(triton.cdiv(table.tensors, 128),)](
        table.addresses, table.tensors, scale, corrections, _log(options.beta1), _log(options.beta2), 128
    )
    return corrections


def _log(beta: float) -> float:
    """exp(t log 0) is 0: with beta 0 the moment is the gradient."""
    # math.log(0) raises.
    return math.log(beta) if beta > 0 else -math.inf
