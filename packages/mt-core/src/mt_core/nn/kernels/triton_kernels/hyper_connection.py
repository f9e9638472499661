# mypy: disable-error-code="no-untyped-def"
"""Hyper-connections behind the product of streams and weight: see mt_core.nn.kernels.reference.hyper_connection.

Reading takes one launch: a program has the streams of some tokens, of which it computes the norm, the weights, the
iterations of Sinkhorn on matrices in registers, and the block's input. Kept for the backward pass are the inputs, C,
the norm, and what each iteration divided by, from which the iterations are gone back: a step x / d has the result y,
and its input is y d. Writing is one launch, and two in the backward pass.

Coefficients are fp32 in the sums of streams, where the reference rounds those of writing to the dtype of the streams.

Shapes: T tokens, N streams of H channels, M = (2 + N) N.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.reference.hyper_connection import Connection
from mt_core.nn.kernels.triton_kernels.launch import on_device

TOKENS, CHANNELS = 8, 128
"""Sizes of a tile"""
PRODUCTS = 4096
"""Products of channels that a program sums at a time, over all pairs of streams."""


@triton.jit
def weight_of(products, bias, scale, token, mask, norm, number, part, M: tl.constexpr):
    """z of output `number` of the tokens, before the sigmoid."""
    product = tl.load(products + token * M + number, mask=mask, other=0.0)
    shift = tl.load(bias + number).to(tl.float32)
    return product * norm * tl.load(scale + part).to(tl.float32) + shift


@triton.jit
def matrix_logits(products, bias, scale, token, mask, norm, N: tl.constexpr):
    """z of the mixing matrices, [T, N, N]."""
    cell = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    product = tl.load(
        products + (token * (2 + N) * N)[:, None, None] + 2 * N + cell[None, :, :], mask=mask[:, None, None], other=0.0
    )
    shift = tl.load(bias + 2 * N + cell).to(tl.float32)
    return product * norm[:, None, None] * tl.load(scale + 2).to(tl.float32) + shift[None, :, :]


@triton.jit
def softmax_of_rows(z):
    """[T, N, N] over the last dimension"""
    exponentials = tl.exp(z - tl.max(z, 2)[:, :, None])
    return exponentials / tl.sum(exponentials, 2)[:, :, None]


@triton.jit
def _read_forward(
    x, products, bias, scale, y, post, mixing, norms, divisors, tokens, epsilon, floor,
    N: tl.constexpr, HIDDEN: tl.constexpr, ITERATIONS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """x [T, N H], products [T, M] in fp32; y [T, H], post [T, N], mixing [T, N, N], norms [T],
    divisors [T, 2 ITERATIONS - 1, N], all contiguous"""
    # int64: streams of many tokens have more than 2^31 elements.
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask, channel, stream = token < tokens, tl.arange(0, CHANNELS), tl.arange(0, N)
    squares = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for first in range(0, N * HIDDEN, CHANNELS):
        place = first + channel
        inside = mask[:, None] & (place < N * HIDDEN)[None, :]
        value = tl.load(x + (token * N * HIDDEN)[:, None] + place[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += value * value
    norm = 1.0 / tl.sqrt(tl.sum(squares, 1) / (N * HIDDEN) + epsilon)
    tl.store(norms + token, norm, mask=mask)

    matrix = softmax_of_rows(matrix_logits(products, bias, scale, token, mask, norm, N)) + floor
    out = divisors + (token * (2 * ITERATIONS - 1) * N)[:, None] + stream[None, :]
    divisor = tl.sum(matrix, 1) + floor
    tl.store(out, divisor, mask=mask[:, None])
    matrix = matrix / divisor[:, None, :]
    for step in range(1, ITERATIONS):
        divisor = tl.sum(matrix, 2) + floor
        tl.store(out + (2 * step - 1) * N, divisor, mask=mask[:, None])
        matrix = matrix / divisor[:, :, None]
        divisor = tl.sum(matrix, 1) + floor
        tl.store(out + 2 * step * N, divisor, mask=mask[:, None])
        matrix = matrix / divisor[:, None, :]
    cell = stream[:, None] * N + stream[None, :]
    tl.store(mixing + (token * N * N)[:, None, None] + cell[None, :, :], matrix, mask=mask[:, None, None])

    for number in tl.static_range(N):
        z = weight_of(products, bias, scale, token, mask, norm, N + number, 1, (2 + N) * N)
        tl.store(post + token * N + number, 2.0 * tl.sigmoid(z), mask=mask)
    for first in range(0, HIDDEN, CHANNELS):
        place = first + channel
        inside = mask[:, None] & (place < HIDDEN)[None, :]
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for number in tl.static_range(N):
            pre = tl.sigmoid(weight_of(products, bias, scale, token, mask, norm, number, 0, (2 + N) * N)) + floor
            address = x + ((token * N + number) * HIDDEN)[:, None] + place[None, :]
            total += pre[:, None] * tl.load(address, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + (token * HIDDEN)[:, None] + place[None, :], total, mask=inside)


@triton.jit
def _read_backward(
    x, products, bias, scale, mixing, norms, divisors, dy, dpost, dmixing, dx, dz, tokens, floor,
    N: tl.constexpr, HIDDEN: tl.constexpr, ITERATIONS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx [T, N H]: without what comes through the products; dz [T, M] in fp32: of the scaled and shifted products"""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask, channel, stream = token < tokens, tl.arange(0, CHANNELS), tl.arange(0, N)
    norm = tl.load(norms + token, mask=mask, other=0.0)
    grads = dz + token * (2 + N) * N
    # of_norm: sum of the gradient of each product, divided by rms, times the product.
    of_norm = tl.zeros([TOKENS], tl.float32)
    factor = tl.load(scale).to(tl.float32)
    for number in tl.static_range(N):
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for first in range(0, HIDDEN, CHANNELS):
            place = first + channel
            inside = mask[:, None] & (place < HIDDEN)[None, :]
            address = x + ((token * N + number) * HIDDEN)[:, None] + place[None, :]
            value = tl.load(address, mask=inside, other=0.0).to(tl.float32)
            grad = tl.load(dy + (token * HIDDEN)[:, None] + place[None, :], mask=inside, other=0.0).to(tl.float32)
            total += value * grad
        gate = tl.sigmoid(weight_of(products, bias, scale, token, mask, norm, number, 0, (2 + N) * N))
        of_z = tl.sum(total, 1) * gate * (1.0 - gate)
        tl.store(grads + number, of_z, mask=mask)
        of_norm += of_z * factor * tl.load(products + token * (2 + N) * N + number, mask=mask, other=0.0)
    factor = tl.load(scale + 1).to(tl.float32)
    for number in tl.static_range(N):
        gate = tl.sigmoid(weight_of(products, bias, scale, token, mask, norm, N + number, 1, (2 + N) * N))
        of_z = 2.0 * tl.load(dpost + token * N + number, mask=mask, other=0.0) * gate * (1.0 - gate)
        tl.store(grads + N + number, of_z, mask=mask)
        of_norm += of_z * factor * tl.load(products + token * (2 + N) * N + N + number, mask=mask, other=0.0)

    cell = stream[:, None] * N + stream[None, :]
    of_matrix = (token * N * N)[:, None, None] + cell[None, :, :]
    matrix = tl.load(mixing + of_matrix, mask=mask[:, None, None], other=0.0)
    grad = tl.load(dmixing + of_matrix, mask=mask[:, None, None], other=0.0)
    steps = divisors + (token * (2 * ITERATIONS - 1) * N)[:, None] + stream[None, :]
    for back in range(ITERATIONS - 1):
        step = 2 * (ITERATIONS - 1 - back)
        divisor = tl.load(steps + step * N, mask=mask[:, None], other=1.0)[:, None, :]
        grad = (grad - tl.sum(grad * matrix, 1)[:, None, :]) / divisor
        matrix *= divisor
        divisor = tl.load(steps + (step - 1) * N, mask=mask[:, None], other=1.0)[:, :, None]
        grad = (grad - tl.sum(grad * matrix, 2)[:, :, None]) / divisor
        matrix *= divisor
    divisor = tl.load(steps, mask=mask[:, None], other=1.0)[:, None, :]
    grad = (grad - tl.sum(grad * matrix, 1)[:, None, :]) / divisor
    shares = softmax_of_rows(matrix_logits(products, bias, scale, token, mask, norm, N))
    of_logits = shares * (grad - tl.sum(grad * shares, 2)[:, :, None])
    tl.store(grads[:, None, None] + 2 * N + cell[None, :, :], of_logits, mask=mask[:, None, None])
    product = tl.load(
        products + (token * (2 + N) * N)[:, None, None] + 2 * N + cell[None, :, :], mask=mask[:, None, None], other=0.0
    )
    of_norm += tl.sum(tl.sum(of_logits * product, 2), 1) * tl.load(scale + 2).to(tl.float32)

    # norm = (mean of squares + epsilon)^(-1/2)
    through_norm = -of_norm * norm * norm * norm / (N * HIDDEN)
    for first in range(0, HIDDEN, CHANNELS):
        place = first + channel
        inside = mask[:, None] & (place < HIDDEN)[None, :]
        of_input = tl.load(dy + (token * HIDDEN)[:, None] + place[None, :], mask=inside, other=0.0).to(tl.float32)
        for number in tl.static_range(N):
            pre = tl.sigmoid(weight_of(products, bias, scale, token, mask, norm, number, 0, (2 + N) * N)) + floor
            address = ((token * N + number) * HIDDEN)[:, None] + place[None, :]
            value = tl.load(x + address, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + address, pre[:, None] * of_input + through_norm[:, None] * value, mask=inside)


@triton.jit
def _write_forward(
    output, post, mixing, x, y, tokens,
    N: tl.constexpr, HIDDEN: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """output [T, H], post [T, N], mixing [T, N, N], x and y [T, N H], contiguous"""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = token < tokens
    inside = mask[:, None] & (channel < HIDDEN)[None, :]
    added = tl.load(output + (token * HIDDEN)[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    for target in tl.static_range(N):
        total = tl.load(post + token * N + target, mask=mask, other=0.0)[:, None] * added
        for source in tl.static_range(N):
            share = tl.load(mixing + (token * N + source) * N + target, mask=mask, other=0.0)
            address = x + ((token * N + source) * HIDDEN)[:, None] + channel[None, :]
            total += share[:, None] * tl.load(address, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + ((token * N + target) * HIDDEN)[:, None] + channel[None, :], total, mask=inside)


@triton.jit
def _write_backward(
    dy, post, mixing, doutput, dx, tokens,
    N: tl.constexpr, HIDDEN: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Gradients of the block's output and of streams from dy [T, N H]."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = token < tokens
    inside = mask[:, None] & (channel < HIDDEN)[None, :]
    of_output = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for target in tl.static_range(N):
        address = dy + ((token * N + target) * HIDDEN)[:, None] + channel[None, :]
        factor = tl.load(post + token * N + target, mask=mask, other=0.0)
        of_output += factor[:, None] * tl.load(address, mask=inside, other=0.0).to(tl.float32)
    tl.store(doutput + (token * HIDDEN)[:, None] + channel[None, :], of_output, mask=inside)
    for source in tl.static_range(N):
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for target in tl.static_range(N):
            share = tl.load(mixing + (token * N + source) * N + target, mask=mask, other=0.0)
            address = dy + ((token * N + target) * HIDDEN)[:, None] + channel[None, :]
            total += share[:, None] * tl.load(address, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + ((token * N + source) * HIDDEN)[:, None] + channel[None, :], total, mask=inside)


@triton.jit
def _write_sums(dy, output, x, dpost, dmixing, N: tl.constexpr, HIDDEN: tl.constexpr, CHANNELS: tl.constexpr):
    """dpost [T, N], dmixing [T, N, N] in fp32: sums over the channels of a token, one for each program."""
    token = tl.program_id(0).to(tl.int64)
    stream, channel = tl.arange(0, N), tl.arange(0, CHANNELS)
    of_post = tl.zeros([N, CHANNELS], tl.float32)
    # source, target, channel. Each stream is read once for each other one, from the cache, in the layout of the sum.
    of_mixing = tl.zeros([N, N, CHANNELS], tl.float32)
    streams = token * N * HIDDEN + stream * HIDDEN
    for first in range(0, HIDDEN, CHANNELS):
        place = first + channel
        inside = place < HIDDEN
        grad = tl.load(dy + streams[:, None] + place[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        added = tl.load(output + token * HIDDEN + place, mask=inside, other=0.0).to(tl.float32)
        of_post += grad * added[None, :]
        every = inside[None, None, :] & (stream >= 0)[:, None, None] & (stream >= 0)[None, :, None]
        source = x + streams[:, None, None] + 0 * stream[None, :, None] + place[None, None, :]
        target = dy + streams[None, :, None] + 0 * stream[:, None, None] + place[None, None, :]
        value = tl.load(source, mask=every, other=0.0).to(tl.float32)
        of_mixing += value * tl.load(target, mask=every, other=0.0).to(tl.float32)
    tl.store(dpost + token * N + stream, tl.sum(of_post, 1))
    tl.store(dmixing + token * N * N + stream[:, None] * N + stream[None, :], tl.sum(of_mixing, 2))


def read_streams(
    streams: Tensor, products: Tensor, bias: Tensor, scale: Tensor, connection: Connection
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as mt_core.nn.kernels.reference.hyper_connection.read_streams; n is 2, 4 or 8."""
    block_input, post, mixing = _Read.apply(streams, products, bias, scale, connection)
    return block_input, post, mixing


def mixed_streams(block_output: Tensor, post: Tensor, mixing: Tensor, streams: Tensor) -> Tensor:
    """Same as mt_core.nn.kernels.reference.hyper_connection.mixed_streams; n is 2, 4 or 8."""
    mixed: Tensor = _Write.apply(block_output.to(streams.dtype), post, mixing, streams)
    return mixed


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, products: Tensor, bias: Tensor, scale: Tensor, connection: Connection
    ) -> tuple[Tensor, ...]:
        streams, products = streams.contiguous(), products.contiguous()
        n, shape = int(products.shape[-1] ** 0.5), streams.shape[:-1]
        hidden, tokens, steps = streams.shape[-1] // n, shape.numel(), 2 * connection.iterations - 1
        block_input = streams.new_empty(*shape, hidden)
        post, mixing = products.new_empty(*shape, n), products.new_empty(*shape, n, n)
        norms, divisors = products.new_empty(tokens), products.new_empty(tokens, steps, n)
        if tokens:
            with on_device(streams):
                _read_forward[(triton.cdiv(tokens, TOKENS),)](
                    streams, products, bias, scale, block_input, post, mixing, norms, divisors, tokens,
                    connection.epsilon, connection.floor, n, hidden, connection.iterations, TOKENS, CHANNELS,
                    num_warps=4,
                )  # fmt: skip
        ctx.save_for_backward(streams, products, bias, scale, mixing, norms, divisors)
        assert not connection.added_to_root
        ctx.connection = connection
        return block_input, post, mixing

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        streams, products, bias, scale, mixing, norms, divisors = ctx.saved_tensors
        dy, dpost, dmixing = (grad.contiguous() for grad in grads)
        n, tokens = mixing.shape[-1], norms.shape[0]
        dx, dz = torch.empty_like(streams), torch.empty_like(products)
        if tokens:
            with on_device(streams):
                _read_backward[(triton.cdiv(tokens, TOKENS),)](
                    streams, products, bias, scale, mixing, norms, divisors, dy, dpost, dmixing, dx, dz, tokens,
                    ctx.connection.floor, n, streams.shape[-1] // n, ctx.connection.iterations, TOKENS, CHANNELS,
                    num_warps=4,
                )  # fmt: skip
        sizes, flat = (n, n, n * n), dz.flatten(0, -2)
        by_norm = flat * norms[:, None]
        of_scale = (by_norm * products.flatten(0, -2)).sum(0).split(sizes)
        factors = torch.cat([factor.float().expand(size) for factor, size in zip(scale, sizes, strict=True)])
        dscale = torch.stack([part.sum() for part in of_scale]).to(scale.dtype)
        return dx, (by_norm * factors).view_as(products), flat.sum(0).to(bias.dtype), dscale, None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, post: Tensor, mixing: Tensor, streams: Tensor) -> Tensor:
        output, post, mixing, streams = (x.contiguous() for x in (output, post, mixing, streams))
        n, hidden, tokens = post.shape[-1], output.shape[-1], post.shape[:-1].numel()
        mixed = torch.empty_like(streams)
        if tokens:
            with on_device(streams):
                _write_forward[(triton.cdiv(tokens, TOKENS), triton.cdiv(hidden, CHANNELS))](
                    output, post, mixing, streams, mixed, tokens, n, hidden, TOKENS, CHANNELS, num_warps=4
                )
        ctx.save_for_backward(output, post, mixing, streams)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        output, post, mixing, streams = ctx.saved_tensors
        dy, n, hidden, tokens = grads[0].contiguous(), post.shape[-1], output.shape[-1], post.shape[:-1].numel()
        doutput, dpost, dmixing, dx = (torch.empty_like(x) for x in (output, post, mixing, streams))
        if tokens:
            with on_device(streams):
                _write_backward[(triton.cdiv(tokens, TOKENS), triton.cdiv(hidden, CHANNELS))](
                    dy, post, mixing, doutput, dx, tokens, n, hidden, TOKENS, CHANNELS, num_warps=4
                )
                _write_sums[(tokens,)](dy, output, streams, dpost, dmixing, n, hidden, PRODUCTS // n**2, num_warps=4)
        return doutput, dpost, dmixing, dx
