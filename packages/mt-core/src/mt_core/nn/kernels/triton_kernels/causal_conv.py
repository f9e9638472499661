# mypy: disable-error-code="no-untyped-def"
"""Short depthwise causal convolution, with SiLU behind it or not: see mt_core.nn.kernels.reference.causal_conv.

A program computes tiles of positions and channels, and reads the positions before them once for each tap, from the
cache. Backward computes the sums before the activation again, for the positions of a tile and the k - 1 behind it, so
that the input alone is kept.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device

POSITIONS, CHANNELS = 16, 128
"""Sizes of a tile: 16 elements for each of 128 threads."""
BACKWARD_POSITIONS = 8
"""Positions of a tile in the backward pass, which holds more of each."""
TILES = 32
"""Tiles of a program in the backward pass, which writes gradients of taps once for all of them."""
STEP_CHANNELS = 256
"""Channels of a program of a decode step."""


@triton.jit
def conv_sums(
    x, weight, bias, documents, begin, place, channel, length, stride,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sums before the activation of positions begin + place [T, C] in fp32. x: address of position `begin` of the row,
    so that offsets fit into 32 bits; documents: address of the row."""
    channels = channel < WIDTH
    total = tl.zeros([place.shape[0], channel.shape[0]], tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=channels, other=0.0).to(tl.float32)[None, :]
    if SEGMENTS:
        document = tl.load(documents + begin + place, mask=begin + place < length, other=0)
    for tap in tl.static_range(TAPS):
        shifted = place - (TAPS - 1 - tap)
        seen = (begin + shifted >= 0) & (begin + shifted < length)
        if SEGMENTS:
            seen = seen & (tl.load(documents + begin + shifted, mask=seen, other=0) == document)
        address = x + (shifted * stride)[:, None] + channel[None, :]
        value = tl.load(address, mask=seen[:, None] & channels[None, :], other=0.0).to(tl.float32)
        factor = tl.load(weight + channel * TAPS + tap, mask=channels, other=0.0).to(tl.float32)
        total += value * factor[None, :]
    return total


@triton.jit
def _causal_conv_forward(
    x, weight, bias, documents, y, length, blocks, x_row, x_position,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SEGMENTS: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y [B, S, C], contiguous. blocks: tiles of a row."""
    # int64: activations of many tokens have more than 2^31 elements.
    program = tl.program_id(0).to(tl.int64)
    row, begin = program // blocks, (program % blocks) * POSITIONS
    place = tl.arange(0, POSITIONS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    first = x + row * x_row + begin * x_position
    total = conv_sums(
        first, weight, bias, documents + row * length, begin, place, channel, length, x_position,
        TAPS, BIAS, SEGMENTS, WIDTH,
    )  # fmt: skip
    if SILU:
        total = total * tl.sigmoid(total)
    out = y + (row * length + begin) * WIDTH + (place * WIDTH)[:, None] + channel[None, :]
    tl.store(out, total, mask=(begin + place < length)[:, None] & (channel < WIDTH)[None, :])


@triton.jit
def _causal_conv_backward(
    x, weight, bias, documents, dy, dx, parts, length, blocks, x_row, x_position,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SEGMENTS: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dy and dx [B, S, C], contiguous; parts [programs, TAPS + 1, C] in fp32: gradients of each tap and of the bias
    through the positions of a program. ROWS: a power of two, TAPS + 1 at least."""
    program = tl.program_id(0).to(tl.int64)
    row, start = program // blocks, (program % blocks) * POSITIONS * TILES
    place, number = tl.arange(0, POSITIONS), tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    channels = channel < WIDTH
    numbers = documents + row * length
    sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    for tile in range(tl.minimum(TILES, tl.cdiv(length - start, POSITIONS))):
        begin = start + tile * POSITIONS
        first = x + row * x_row + begin * x_position
        grads = dy + (row * length + begin) * WIDTH
        if SEGMENTS:
            document = tl.load(numbers + begin + place, mask=begin + place < length, other=0)
        total = tl.zeros([POSITIONS, CHANNELS], tl.float32)
        for ahead in tl.static_range(TAPS):
            later = place + ahead
            seen = begin + later < length
            if SEGMENTS:
                seen = seen & (tl.load(numbers + begin + later, mask=seen, other=0) == document)
            inside = seen[:, None] & channels[None, :]
            address = grads + (later * WIDTH)[:, None] + channel[None, :]
            grad = tl.load(address, mask=inside, other=0.0).to(tl.float32)
            if SILU:
                before = conv_sums(
                    first, weight, bias, numbers, begin, later, channel, length, x_position,
                    TAPS, BIAS, SEGMENTS, WIDTH,
                )  # fmt: skip
                gate = tl.sigmoid(before)
                grad *= gate * (1.0 + before * (1.0 - gate))
            factor = tl.load(weight + channel * TAPS + (TAPS - 1 - ahead), mask=channels, other=0.0)
            total += grad * factor.to(tl.float32)[None, :]
            # The tap that is `ahead` before the last one multiplies the positions of the tile for those ahead of them.
            value = tl.load(
                first + (place * x_position)[:, None] + channel[None, :], mask=inside, other=0.0
            ).to(tl.float32)  # fmt: skip
            sums += tl.where((number == TAPS - 1 - ahead)[:, None], tl.sum(grad * value, 0)[None, :], 0.0)
            if ahead == 0:
                sums += tl.where((number == TAPS)[:, None], tl.sum(grad, 0)[None, :], 0.0)
        out = dx + (row * length + begin) * WIDTH + (place * WIDTH)[:, None] + channel[None, :]
        tl.store(out, total, mask=(begin + place < length)[:, None] & channels[None, :])
    out = parts + program * (TAPS + 1) * WIDTH + (number * WIDTH)[:, None] + channel[None, :]
    tl.store(out, sums, mask=(number <= TAPS)[:, None] & channels[None, :])


@triton.jit
def _causal_conv_step(
    x, weight, bias, past, y, after, length, x_row, x_position, p_row, p_position,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """past and after [B, TAPS - 1, C], y and after contiguous: the positions before and the last ones of both."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    channels = channel < WIDTH
    old, new = past + row * p_row + channel, x + row * x_row + channel
    for t in range(length):
        total = tl.zeros([CHANNELS], tl.float32)
        if BIAS:
            total += tl.load(bias + channel, mask=channels, other=0.0).to(tl.float32)
        for tap in tl.static_range(TAPS):
            at = t + tap - (TAPS - 1) + tl.zeros_like(channel)
            value = tl.load(new + at * x_position, mask=channels & (at >= 0), other=0.0).to(tl.float32)
            value += tl.load(old + (at + TAPS - 1) * p_position, mask=channels & (at < 0), other=0.0).to(tl.float32)
            factor = tl.load(weight + channel * TAPS + tap, mask=channels, other=0.0).to(tl.float32)
            total += value * factor
        if SILU:
            total = total * tl.sigmoid(total)
        tl.store(y + (row * length + t) * WIDTH + channel, total, mask=channels)
    for kept in tl.static_range(TAPS - 1):
        at = length + kept - (TAPS - 1) + tl.zeros_like(channel)
        value = tl.load(new + at * x_position, mask=channels & (at >= 0), other=0.0).to(tl.float32)
        value += tl.load(old + (at + TAPS - 1) * p_position, mask=channels & (at < 0), other=0.0).to(tl.float32)
        tl.store(after + (row * (TAPS - 1) + kept) * WIDTH + channel, value, mask=channels)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None = None, silu: bool = False
) -> Tensor:
    """Same as mt_core.nn.kernels.reference.causal_conv.causal_conv."""
    y: Tensor = _CausalConv.apply(x, weight, bias, segment_ids, silu)
    return y


def causal_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """Same as mt_core.nn.kernels.reference.causal_conv.causal_conv_step, without gradients."""
    rows, length, width = x.shape
    x, past, weight = _with_dense_rows(x), _with_dense_rows(past), weight.contiguous()
    y = x.new_empty(rows, length, width)
    after = past.new_empty(past.shape)
    with on_device(x):
        _causal_conv_step[(rows, triton.cdiv(width, STEP_CHANNELS))](
            x, weight, x if bias is None else bias, past, y, after, length, *x.stride()[:2], *past.stride()[:2],
            weight.shape[1], bias is not None, silu, width, STEP_CHANNELS, num_warps=4,
        )  # fmt: skip
    return y, after


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None, silu: bool
    ) -> Tensor:
        rows, length, width = x.shape
        x, taps = _with_dense_rows(x), weight.contiguous()
        documents = None if segment_ids is None else segment_ids.contiguous()
        y = x.new_empty(rows, length, width)
        blocks = triton.cdiv(length, POSITIONS)
        with on_device(x):
            _causal_conv_forward[(rows * blocks, triton.cdiv(width, CHANNELS))](
                x, taps, x if bias is None else bias, x if documents is None else documents, y, length, blocks,
                *x.stride()[:2], weight.shape[1], bias is not None, documents is not None, silu, width,
                POSITIONS, CHANNELS, num_warps=4,
            )  # fmt: skip
        ctx.save_for_backward(x, taps, bias, documents)
        ctx.silu = silu
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, documents = ctx.saved_tensors
        dy, (rows, length, width), taps = grads[0].contiguous(), x.shape, weight.shape[1]
        blocks = triton.cdiv(length, BACKWARD_POSITIONS * TILES)
        dx = x.new_empty(rows, length, width)
        parts = x.new_empty(rows * blocks, taps + 1, width, dtype=torch.float32)
        with on_device(x):
            _causal_conv_backward[(rows * blocks, triton.cdiv(width, CHANNELS))](
                x, weight, x if bias is None else bias, x if documents is None else documents, dy, dx, parts, length,
                blocks, *x.stride()[:2], taps, bias is not None, documents is not None, ctx.silu, width,
                BACKWARD_POSITIONS, CHANNELS, TILES, int(triton.next_power_of_2(taps + 1)), num_warps=4,
            )  # fmt: skip
        sums = parts.sum(0)
        dbias = None if bias is None else sums[taps].to(bias.dtype)
        return dx, sums[:taps].t().to(weight.dtype), dbias, None, None


def _with_dense_rows(x: Tensor) -> Tensor:
    """x [B, S, C] with channels side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
