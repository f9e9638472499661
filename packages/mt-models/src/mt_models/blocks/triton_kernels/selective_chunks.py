# mypy: disable-error-code="no-untyped-def"
"""Kernels of the state-space recurrence of Mamba-1 over chunks, and of its gradients.

With a state s [N] of each channel, the decays A_t = exp(dt_t a), which are 0 where a document begins, and u = dt x:

    s_t = A_t s_(t-1) + u_t b_t          y_t = s_t . c_t
    ds_t = dy_t c_t + A_(t+1) ds_(t+1)   du_t = ds_t . b_t     db_t = sum u_t ds_t     dc_t = sum dy_t s_t

where the sums are over channels. The products of the decays of a range of positions are the exponential of a sum of
dt; so states between chunks need no scan. Inside of a chunk states, and their gradients from the last position to the
first, are prefix scans. A_t s_(t-1), which the gradients of dt and a need, is s_t - u_t b_t. All numbers are fp32.

Shapes: B sequences, S positions, C channels, N numbers of the state, K chunks of L = SIZE positions: x, dt and y
[B, S, C], a [C, N], b and c [B, S, N], states [B, K, C, N]. N is filled with zeros to BLOCK_DIM.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _joined(decay, added, next_decay, next_added):
    """Two neighbouring ranges of positions -> the range of both."""
    return decay * next_decay, next_decay * added + next_added


@triton.jit
def channels_of_chunk(base, first, valid, channel, channels, SIZE: tl.constexpr):
    """[L, BLOCK] in fp32 of a tensor [B, S, C], with zeros where it ends."""
    place = tl.arange(0, SIZE)
    inside = valid[:, None] & (channel < channels)[None, :]
    places = base + first * channels + (place * channels)[:, None] + channel[None, :]
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def numbers_of_chunk(base, first, valid, number, DIM: tl.constexpr, SIZE: tl.constexpr):
    """[L, BLOCK_DIM] in fp32 of a tensor [B, S, N]"""
    place = tl.arange(0, SIZE)
    inside = valid[:, None] & (number < DIM)[None, :]
    places = base + first * DIM + (place * DIM)[:, None] + number[None, :]
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def documents_of_chunk(documents, row, begin, length, SIZE: tl.constexpr):
    """Documents [L] of positions, of the last position, and of that before the first (that of the first, at the begin
    of a sequence)."""
    position = begin + tl.arange(0, SIZE)
    here = documents + row * length
    of_positions = tl.load(here + position, mask=position < length, other=-1)
    return of_positions, tl.load(here + tl.minimum(begin + SIZE, length) - 1), tl.load(here + tl.maximum(begin - 1, 0))


@triton.jit
def begins_of_chunk(documents, row, begin, length, SIZE: tl.constexpr):
    """[L]: whether a position is the first of a document, but for that of the sequence."""
    position = begin + tl.arange(0, SIZE)
    here, valid = documents + row * length + position, position < length
    return tl.load(here, mask=valid, other=0) != tl.load(here - 1, mask=valid & (position > 0), other=0)


@triton.jit
def _selective_states(
    x, dt, a, b, documents, state, before, last, length, channels, chunks,
    HAS_STATE: tl.constexpr, SEGMENTS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """before [B, K, C, N]: states before chunks; state and last [B, C, N]."""
    row = tl.program_id(0).to(tl.int64)
    channel, number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_DIM)
    inside = (channel < channels)[:, None] & (number < DIM)[None, :]
    at = channel[:, None] * DIM + number[None, :]
    rate = tl.load(a + at, mask=inside, other=0.0)
    if HAS_STATE:
        current = tl.load(state + row * channels * DIM + at, mask=inside, other=0.0)
    else:
        current = tl.zeros([BLOCK, BLOCK_DIM], tl.float32)
    for chunk in range(chunks):
        tl.store(before + (row * chunks + chunk) * channels * DIM + at, current, mask=inside)
        begin, place = chunk * SIZE, tl.arange(0, SIZE)
        first, valid = row * length + begin, begin + place < length
        behind = (begin + place + 1 < length) & (place + 1 < SIZE)
        step = channels_of_chunk(dt, first, valid, channel, channels, SIZE)
        later = tl.cumsum(channels_of_chunk(dt, first + 1, behind, channel, channels, SIZE), 0, reverse=True)
        written = step * channels_of_chunk(x, first, valid, channel, channels, SIZE)
        key = numbers_of_chunk(b, first, valid, number, DIM, SIZE)
        over = tl.exp(tl.sum(step, 0)[:, None] * rate)
        if SEGMENTS:
            document, ending, earlier = documents_of_chunk(documents, row, begin, length, SIZE)
            written = tl.where((document == ending)[:, None], written, 0.0)
            over = tl.where(ending == earlier, over, 0.0)
        added = tl.exp(later[:, :, None] * rate[None, :, :]) * written[:, :, None] * key[:, None, :]
        current = over * current + tl.sum(added, 0)
    tl.store(last + row * channels * DIM + at, current, mask=inside)


@triton.jit
def _selective_outputs(
    x, dt, a, b, c, documents, before, y, length, channels, chunks,
    SEGMENTS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, begin = program // chunks, (program % chunks) * SIZE
    channel, number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_DIM)
    inside = (channel < channels)[:, None] & (number < DIM)[None, :]
    at = channel[:, None] * DIM + number[None, :]
    place = tl.arange(0, SIZE)
    first, valid = row * length + begin, begin + place < length
    rate = tl.load(a + at, mask=inside, other=0.0)
    start = tl.load(before + program * channels * DIM + at, mask=inside, other=0.0)
    step = channels_of_chunk(dt, first, valid, channel, channels, SIZE)
    written = step * channels_of_chunk(x, first, valid, channel, channels, SIZE)
    key = numbers_of_chunk(b, first, valid, number, DIM, SIZE)
    query = numbers_of_chunk(c, first, valid, number, DIM, SIZE)
    decay = tl.exp(step[:, :, None] * rate[None, :, :])
    if SEGMENTS:
        begins = begins_of_chunk(documents, row, begin, length, SIZE)
        decay = tl.where(begins[:, None, None], 0.0, decay)
    added = written[:, :, None] * key[:, None, :]
    added = tl.where((place == 0)[:, None, None], added + decay * start[None, :, :], added)
    _, states = tl.associative_scan((decay, added), 0, _joined)
    output = tl.sum(states * query[:, None, :], 2)
    outputs = y + first * channels + (place * channels)[:, None] + channel[None, :]
    tl.store(outputs, output, mask=valid[:, None] & (channel < channels)[None, :])


@triton.jit
def _selective_states_backward(
    dt, a, c, documents, dy, dlast, behind, dstate, length, channels, chunks,
    HAS_LAST: tl.constexpr, SEGMENTS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """behind [B, K, C, N]: gradients of the states behind chunks; dlast and dstate [B, C, N]."""
    row = tl.program_id(0).to(tl.int64)
    channel, number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_DIM)
    inside = (channel < channels)[:, None] & (number < DIM)[None, :]
    at = channel[:, None] * DIM + number[None, :]
    rate = tl.load(a + at, mask=inside, other=0.0)
    if HAS_LAST:
        current = tl.load(dlast + row * channels * DIM + at, mask=inside, other=0.0)
    else:
        current = tl.zeros([BLOCK, BLOCK_DIM], tl.float32)
    for passed in range(chunks):
        chunk = chunks - 1 - passed
        tl.store(behind + (row * chunks + chunk) * channels * DIM + at, current, mask=inside)
        begin = chunk * SIZE
        first, valid = row * length + begin, begin + tl.arange(0, SIZE) < length
        step = channels_of_chunk(dt, first, valid, channel, channels, SIZE)
        asked = channels_of_chunk(dy, first, valid, channel, channels, SIZE)
        query = numbers_of_chunk(c, first, valid, number, DIM, SIZE)
        over = tl.exp(tl.sum(step, 0)[:, None] * rate)
        if SEGMENTS:
            document, ending, earlier = documents_of_chunk(documents, row, begin, length, SIZE)
            asked = tl.where((document == earlier)[:, None], asked, 0.0)
            over = tl.where(ending == earlier, over, 0.0)
        decay = tl.exp(tl.cumsum(step, 0)[:, :, None] * rate[None, :, :])
        current = over * current + tl.sum(decay * asked[:, :, None] * query[:, None, :], 0)
    tl.store(dstate + row * channels * DIM + at, current, mask=inside)


@triton.jit
def _selective_backward(
    x, dt, a, b, c, documents, dy, before, behind, dx, ddt, db, dc, length, channels, chunks, positions,
    SEGMENTS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """A program computes PARTS blocks of channels; db and dc [programs of a chunk, B, S, N] are sums over its channels.
    behind: what each chunk adds to the gradient of a takes the place of the gradients."""
    program = tl.program_id(0).to(tl.int64)
    row, begin = program // chunks, (program % chunks) * SIZE
    number, place = tl.arange(0, BLOCK_DIM), tl.arange(0, SIZE)
    first, valid = row * length + begin, begin + place < length
    following = (begin + place + 1 < length) & (place + 1 < SIZE)
    key = numbers_of_chunk(b, first, valid, number, DIM, SIZE)
    query = numbers_of_chunk(c, first, valid, number, DIM, SIZE)
    dkey, dquery = tl.zeros([SIZE, BLOCK_DIM], tl.float32), tl.zeros([SIZE, BLOCK_DIM], tl.float32)
    for part in range(PARTS):
        channel = (tl.program_id(1) * PARTS + part) * BLOCK + tl.arange(0, BLOCK)
        inside = (channel < channels)[:, None] & (number < DIM)[None, :]
        at = channel[:, None] * DIM + number[None, :]
        of_chunk = program * channels * DIM + at
        rate = tl.load(a + at, mask=inside, other=0.0)
        step = channels_of_chunk(dt, first, valid, channel, channels, SIZE)
        content = channels_of_chunk(x, first, valid, channel, channels, SIZE)
        decay = tl.exp(step[:, :, None] * rate[None, :, :])
        if SEGMENTS:
            begins = begins_of_chunk(documents, row, begin, length, SIZE)
            decay = tl.where(begins[:, None, None], 0.0, decay)
        start = tl.load(before + of_chunk, mask=inside, other=0.0)
        added = (step * content)[:, :, None] * key[:, None, :]
        added = tl.where((place == 0)[:, None, None], added + decay * start[None, :, :], added)
        _, states = tl.associative_scan((decay, added), 0, _joined)
        asked = channels_of_chunk(dy, first, valid, channel, channels, SIZE)
        dquery += tl.sum(states * asked[:, :, None], 1)
        carried = states - (step * content)[:, :, None] * key[:, None, :]
        next_decay = tl.exp(
            channels_of_chunk(dt, first + 1, following, channel, channels, SIZE)[:, :, None] * rate[None, :, :]
        )
        if SEGMENTS:
            carried = tl.where(begins[:, None, None], 0.0, carried)
            next_begins = begins_of_chunk(documents, row, begin + 1, length, SIZE) & following
            next_decay = tl.where(next_begins[:, None, None], 0.0, next_decay)
        end = tl.load(behind + of_chunk, mask=inside, other=0.0)
        added = asked[:, :, None] * query[:, None, :]
        added = tl.where((place == SIZE - 1)[:, None, None], added + end[None, :, :], added)
        _, dstates = tl.associative_scan((next_decay, added), 0, _joined, reverse=True)
        dkey += tl.sum(dstates * (step * content)[:, :, None], 1)
        dwritten = tl.sum(dstates * key[:, None, :], 2)
        moved = dstates * carried
        tl.store(behind + of_chunk, tl.sum(moved * step[:, :, None], 0), mask=inside)
        of_positions = first * channels + (place * channels)[:, None] + channel[None, :]
        written = valid[:, None] & (channel < channels)[None, :]
        tl.store(ddt + of_positions, tl.sum(moved * rate[None, :, :], 2) + dwritten * content, mask=written)
        tl.store(dx + of_positions, dwritten * step, mask=written)
    sums = (tl.program_id(1) * positions + first) * DIM + (place * DIM)[:, None] + number[None, :]
    sum_mask = valid[:, None] & (number < DIM)[None, :]
    tl.store(db + sums, dkey, mask=sum_mask)
    tl.store(dc + sums, dquery, mask=sum_mask)
