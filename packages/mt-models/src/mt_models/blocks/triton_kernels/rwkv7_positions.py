# mypy: disable-error-code="no-untyped-def"
"""Kernels of the recurrence of RWKV-7, one position after the other.

With P the state before a position, 0 where a document begins:

    c = z^T P          S = diag(exp(w)) P - (z * a) c^T + k v^T          o = r^T S

and with dS the gradient of S from later positions and from o, dc = -dS^T (z * a) and dm = -dS c:

    dP = diag(exp(w)) dS + z dc^T          dz = P dc + dm * a          da = dm * z          dw = exp(w) * sum_v dS * P

Shapes: B sequences, S positions, H heads, D channels of a key, V channels of a value, K states that are kept. r, w, k,
z and a are [B, S, H, D], v and o [B, S, H, V], states [B, H, D, V]; all are contiguous.
"""

import triton
import triton.language as tl


@triton.jit
def _channels(x, at, channel, SIZE: tl.constexpr):
    """Channels of one position and head, in fp32."""
    return tl.load(x + at * SIZE + channel, mask=channel < SIZE, other=0.0).to(tl.float32)


@triton.jit
def _continues(documents, row, t, length):
    """1.0 where position t is of the document of the one before, or is the first, and else 0.0."""
    first = documents + row * length
    return (tl.load(first + t) == tl.load(first + tl.maximum(t - 1, 0))).to(tl.float32)


@triton.jit
def _after(current, w, k, v, z, a, at, channel, value, DIM: tl.constexpr, VALUE: tl.constexpr):
    """The state after the position of which `current` is the state before."""
    looked = _channels(z, at, channel, DIM)
    removed = looked * _channels(a, at, channel, DIM)
    answer = tl.sum(looked[:, None] * current, 0)
    current *= tl.exp(_channels(w, at, channel, DIM))[:, None]
    current -= removed[:, None] * answer[None, :]
    return current + _channels(k, at, channel, DIM)[:, None] * _channels(v, at, value, VALUE)[None, :]


@triton.jit
def _rwkv7_forward(
    r, w, k, v, z, a, documents, state, o, kept, last, length, heads, count,
    HAS_STATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, KEEPS: tl.constexpr, EVERY: tl.constexpr,
    DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """KEEPS: writes the states before each EVERY-th position to kept [B, H, K, D, V]; K = count."""
    # int64: states of many sequences have more than 2^31 elements.
    program = tl.program_id(0).to(tl.int64)
    row, head = program // heads, program % heads
    channel = tl.arange(0, BLOCK_DIM)
    value = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    places = channel[:, None] * VALUE + value[None, :]
    inside = (channel < DIM)[:, None] & (value < VALUE)[None, :]
    current = tl.zeros((BLOCK_DIM, BLOCK_VALUE), tl.float32)
    if HAS_STATE:
        current += tl.load(state + program * DIM * VALUE + places, mask=inside, other=0.0)
    for t in range(length):
        if KEEPS and t % EVERY == 0:
            tl.store(kept + (program * count + t // EVERY) * DIM * VALUE + places, current, mask=inside)
        if HAS_DOCUMENTS:
            current *= _continues(documents, row, t, length)
        at = (row * length + t) * heads + head
        current = _after(current, w, k, v, z, a, at, channel, value, DIM, VALUE)
        read = tl.sum(_channels(r, at, channel, DIM)[:, None] * current, 0)
        tl.store(o + at * VALUE + value, read, mask=value < VALUE)
    tl.store(last + program * DIM * VALUE + places, current, mask=inside)


@triton.jit
def _rwkv7_backward(
    r, w, k, v, z, a, documents, kept, do, dlast, between, dr, dw, dk, dv, dz, da, dstate, length, heads, count,
    positions, slots,
    HAS_LAST: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, EVERY: tl.constexpr,
    DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """between [B, H, slots, D, V]: where a program writes the states before EVERY positions. dr, dw, dk, dz and da have
    a part of each block of value channels: [blocks, B, S, H, D]; positions is B S."""
    program = tl.program_id(0).to(tl.int64)
    row, head = program // heads, program % heads
    part = tl.program_id(1).to(tl.int64) * positions * heads
    channel = tl.arange(0, BLOCK_DIM)
    value = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    channels, values = channel < DIM, value < VALUE
    places = channel[:, None] * VALUE + value[None, :]
    inside = channels[:, None] & values[None, :]
    dcurrent = tl.zeros((BLOCK_DIM, BLOCK_VALUE), tl.float32)
    if HAS_LAST:
        dcurrent += tl.load(dlast + program * DIM * VALUE + places, mask=inside, other=0.0)
    for block in range(count):
        number = count - 1 - block
        begin = number * EVERY
        here = tl.minimum(EVERY, length - begin)
        current = tl.load(kept + (program * count + number) * DIM * VALUE + places, mask=inside, other=0.0)
        for i in range(here):
            t = begin + i
            if HAS_DOCUMENTS:
                current *= _continues(documents, row, t, length)
            tl.store(between + (program * slots + i) * DIM * VALUE + places, current, mask=inside)
            at = (row * length + t) * heads + head
            current = _after(current, w, k, v, z, a, at, channel, value, DIM, VALUE)
        # Threads read what others wrote.
        tl.debug_barrier()
        for i in range(here):
            t = begin + here - 1 - i
            before = tl.load(between + (program * slots + here - 1 - i) * DIM * VALUE + places, mask=inside, other=0.0)
            at = (row * length + t) * heads + head
            asked, kept_part = _channels(r, at, channel, DIM), tl.exp(_channels(w, at, channel, DIM))
            looked, rate = _channels(z, at, channel, DIM), _channels(a, at, channel, DIM)
            written, content = _channels(k, at, channel, DIM), _channels(v, at, value, VALUE)
            dread = _channels(do, at, value, VALUE)
            removed = looked * rate
            answer = tl.sum(looked[:, None] * before, 0)
            # The state after the position, which is what was read.
            after = kept_part[:, None] * before - removed[:, None] * answer[None, :]
            after += written[:, None] * content[None, :]
            to = (part + at) * DIM + channel
            tl.store(dr + to, tl.sum(after * dread[None, :], 1), mask=channels)
            dcurrent += asked[:, None] * dread[None, :]
            tl.store(dv + at * VALUE + value, tl.sum(dcurrent * written[:, None], 0), mask=values)
            tl.store(dk + to, tl.sum(dcurrent * content[None, :], 1), mask=channels)
            tl.store(dw + to, kept_part * tl.sum(dcurrent * before, 1), mask=channels)
            dremoved = -tl.sum(dcurrent * answer[None, :], 1)
            danswer = -tl.sum(dcurrent * removed[:, None], 0)
            tl.store(da + to, dremoved * looked, mask=channels)
            tl.store(dz + to, tl.sum(before * danswer[None, :], 1) + dremoved * rate, mask=channels)
            dcurrent = kept_part[:, None] * dcurrent + looked[:, None] * danswer[None, :]
            if HAS_DOCUMENTS:
                dcurrent *= _continues(documents, row, t, length)
        # The next block of positions writes where these are read.
        tl.debug_barrier()
    tl.store(dstate + program * DIM * VALUE + places, dcurrent, mask=inside)
