# mypy: disable-error-code="no-untyped-def"
"""Kernels of the state-space recurrence of Mamba-2 over chunks, and of its gradients.

With the state S [N, P] before a chunk of L positions, u = dt x, G_i the sum of g = dt a up to position i, and
D_ij = exp(G_i - G_j) for j <= i, else 0, the outputs and the state behind the chunk are

    y_i = sum_j D_ij (c_i . b_j) u_j + exp(G_i) S^T c_i          S <- exp(G_L) S + sum_j exp(G_L - G_j) b_j u_j^T

Products take operands of the inputs' dtype and are summed in fp32; S is fp32 from one chunk to the next.

Shapes: B sequences, S positions, H heads of P channels, G groups with N numbers of the state: a group's b and c serve
H / G adjacent heads. N and P are filled with zeros to whole blocks: states before chunks [B H, K, N, P].
"""

from __future__ import annotations

import triton
import triton.language as tl

from mt_models.blocks.triton_kernels.chunk_states import chunk_of_program, rows_at
from mt_models.blocks.triton_kernels.gated_chunks import decays_of_chunk


@triton.jit
def _ssd_states(
    x, dt, g, b, documents, state, before, last, length, heads, repeats, chunks,
    x_row, x_position, x_head, b_row, b_position, b_head,
    HAS_STATE: tl.constexpr, SEGMENTS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ALL_VALUES: tl.constexpr, SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """before: states before chunks; state and last [B, H, P, N] in fp32."""
    sequence = tl.program_id(0).to(tl.int64)
    row, head = sequence // heads, sequence % heads
    place, channel = tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    value = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    inside = (channel < DIM)[:, None] & (value < VALUE)[None, :]
    if HAS_STATE:
        current = tl.load(rows_at(state + sequence * DIM * VALUE, channel, 1, value * DIM), mask=inside, other=0.0)
    else:
        current = tl.zeros([BLOCK_DIM, BLOCK_VALUE], tl.float32)
    for chunk in range(chunks):
        begin = chunk * SIZE
        first = (row * length + begin) * heads + head
        valid = begin + place < length
        here = before + (sequence * chunks + chunk) * BLOCK_DIM * ALL_VALUES
        tl.store(rows_at(here, channel, ALL_VALUES, value), current)
        _, _, to_end, over = decays_of_chunk(g, documents, row, begin, first, heads, length, SEGMENTS, SIZE)
        step = tl.load(dt + first + place * heads, mask=valid, other=0.0)
        content = x + row * x_row + begin.to(tl.int64) * x_position + head * x_head
        content = rows_at(content, place, x_position, value)
        content = tl.load(content, mask=valid[:, None] & (value < VALUE)[None, :], other=0.0).to(tl.float32)
        update = (content * (step * to_end)[:, None]).to(before.dtype.element_ty)
        key = b + row * b_row + begin.to(tl.int64) * b_position + (head // repeats) * b_head
        key = tl.load(
            rows_at(key, place, b_position, channel), mask=valid[:, None] & (channel < DIM)[None, :], other=0.0
        )
        current = tl.dot(tl.trans(key), update, acc=current * over, input_precision=PRECISION)
    tl.store(rows_at(last + sequence * DIM * VALUE, channel, 1, value * DIM), current, mask=inside)


@triton.jit
def _ssd_outputs(
    x, dt, g, b, c, documents, before, y, length, heads, repeats, chunks,
    x_row, x_position, x_head, b_row, b_position, b_head, c_row, c_position, c_head,
    SEGMENTS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ALL_VALUES: tl.constexpr, SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y [B, S, H, P]"""
    at, row, head, begin, first = chunk_of_program(heads, length, chunks, SIZE)
    place, channel = tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    value = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    valid = begin + place < length
    keys = valid[:, None] & (channel < DIM)[None, :]
    inside = valid[:, None] & (value < VALUE)[None, :]
    query = c + row * c_row + begin * c_position + (head // repeats) * c_head
    query = tl.load(rows_at(query, place, c_position, channel), mask=keys, other=0.0)
    key = b + row * b_row + begin * b_position + (head // repeats) * b_head
    key = tl.load(rows_at(key, place, b_position, channel), mask=keys, other=0.0)
    within, reach, _, _ = decays_of_chunk(g, documents, row, begin, first, heads, length, SEGMENTS, SIZE)
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * within
    state = tl.load(rows_at(before + at * BLOCK_DIM * ALL_VALUES, channel, ALL_VALUES, value))
    out = tl.dot(query, state, input_precision=PRECISION) * reach[:, None]
    step = tl.load(dt + first + place * heads, mask=valid, other=0.0)
    content = x + row * x_row + begin * x_position + head * x_head
    content = tl.load(rows_at(content, place, x_position, value), mask=inside, other=0.0).to(tl.float32)
    update = (content * step[:, None]).to(query.dtype)
    out = tl.dot(score.to(query.dtype), update, acc=out, input_precision=PRECISION)
    tl.store(rows_at(y + first * VALUE, place, heads * VALUE, value), out, mask=inside)


@triton.jit
def _ssd_states_backward(
    g, c, documents, dy, dlast, before, dbehind, dover, dstate, length, heads, repeats, chunks,
    c_row, c_position, c_head,
    HAS_LAST: tl.constexpr, PARTS: tl.constexpr, SEGMENTS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_DIM: tl.constexpr, ALL_VALUES: tl.constexpr, SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dbehind: gradients of the states behind chunks; dover [B H, K, PARTS] in fp32: parts of those of the decays over
    chunks, one for each program of a chunk; dlast, dstate [B, H, P, N] in fp32: of the last and the first state."""
    sequence = tl.program_id(0).to(tl.int64)
    row, head = sequence // heads, sequence % heads
    place, channel = tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    value = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    inside = (channel < DIM)[:, None] & (value < VALUE)[None, :]
    if HAS_LAST:
        current = tl.load(rows_at(dlast + sequence * DIM * VALUE, channel, 1, value * DIM), mask=inside, other=0.0)
    else:
        current = tl.zeros([BLOCK_DIM, BLOCK_VALUE], tl.float32)
    for number in range(chunks):
        chunk = chunks - 1 - number
        begin = chunk * SIZE
        first = (row * length + begin) * heads + head
        valid = begin + place < length
        at = sequence * chunks + chunk
        tl.store(rows_at(dbehind + at * BLOCK_DIM * ALL_VALUES, channel, ALL_VALUES, value), current)
        ahead = tl.load(rows_at(before + at * BLOCK_DIM * ALL_VALUES, channel, ALL_VALUES, value))
        tl.store(dover + at * PARTS + tl.program_id(1), tl.sum(tl.sum(ahead.to(tl.float32) * current, 1), 0))
        _, reach, _, over = decays_of_chunk(g, documents, row, begin, first, heads, length, SEGMENTS, SIZE)
        grad = rows_at(dy + first * VALUE, place, heads * VALUE, value)
        grad = tl.load(grad, mask=valid[:, None] & (value < VALUE)[None, :], other=0.0).to(tl.float32)
        grad = (grad * reach[:, None]).to(dbehind.dtype.element_ty)
        query = c + row * c_row + begin.to(tl.int64) * c_position + (head // repeats) * c_head
        query = tl.load(
            rows_at(query, place, c_position, channel), mask=valid[:, None] & (channel < DIM)[None, :], other=0.0
        )
        current = tl.dot(tl.trans(query), grad, acc=current * over, input_precision=PRECISION)
    tl.store(rows_at(dstate + sequence * DIM * VALUE, channel, 1, value * DIM), current, mask=inside)


@triton.jit
def _ssd_values_backward(
    x, dt, g, b, c, documents, dy, dbehind, dx, ddt, dg, dproducts, length, heads, repeats, chunks,
    x_row, x_position, x_head, b_row, b_position, b_head, c_row, c_position, c_head,
    SEGMENTS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ALL_VALUES: tl.constexpr, SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx [B, S, H, P]; ddt [B, S, H] in fp32: through u; dg [B, S, H] in fp32: of G through D; dproducts
    [B H, K, L, L]: of the products of c with b."""
    at, row, head, begin, first = chunk_of_program(heads, length, chunks, SIZE)
    place, channel = tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    valid = begin + place < length
    keys = valid[:, None] & (channel < DIM)[None, :]
    query = c + row * c_row + begin * c_position + (head // repeats) * c_head
    query = tl.load(rows_at(query, place, c_position, channel), mask=keys, other=0.0)
    key = b + row * b_row + begin * b_position + (head // repeats) * b_head
    key = tl.load(rows_at(key, place, b_position, channel), mask=keys, other=0.0)
    within, _, to_end, _ = decays_of_chunk(g, documents, row, begin, first, heads, length, SEGMENTS, SIZE)
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * within
    turned = tl.trans(score.to(key.dtype))
    step = tl.load(dt + first + place * heads, mask=valid, other=0.0)
    dscore = tl.zeros([SIZE, SIZE], tl.float32)
    dstep = tl.zeros([SIZE], tl.float32)
    content_base = x + row * x_row + begin * x_position + head * x_head
    for start in range(0, ALL_VALUES, BLOCK_VALUE):
        value = start + tl.arange(0, BLOCK_VALUE)
        inside = valid[:, None] & (value < VALUE)[None, :]
        behind = tl.load(rows_at(dbehind + at * BLOCK_DIM * ALL_VALUES, channel, ALL_VALUES, value))
        dupdate = tl.dot(key, behind, input_precision=PRECISION) * to_end[:, None]
        grad = tl.load(rows_at(dy + first * VALUE, place, heads * VALUE, value), mask=inside, other=0.0)
        dupdate = tl.dot(turned, grad, acc=dupdate, input_precision=PRECISION)
        tl.store(rows_at(dx + first * VALUE, place, heads * VALUE, value), dupdate * step[:, None], mask=inside)
        content = tl.load(rows_at(content_base, place, x_position, value), mask=inside, other=0.0).to(tl.float32)
        dstep += tl.sum(dupdate * content, 1)
        update = (content * step[:, None]).to(key.dtype)
        dscore = tl.dot(grad, tl.trans(update), acc=dscore, input_precision=PRECISION)
    tl.store(ddt + first + place * heads, dstep, mask=valid)
    along = dscore * score
    tl.store(dg + first + place * heads, tl.sum(along, 1) - tl.sum(along, 0), mask=valid)
    tl.store(rows_at(dproducts + at * SIZE * SIZE, place, SIZE, place), dscore * within)


@triton.jit
def chunk_of_group(heads, repeats, length, chunks, SIZE: tl.constexpr):
    """Row, group, number of groups, chunk of the program, and its first position."""
    program = tl.program_id(0).to(tl.int64)
    chunk, groups = program % chunks, heads // repeats
    return (program // chunks) // groups, (program // chunks) % groups, groups, chunk, chunk * SIZE


@triton.jit
def _ssd_reads_backward(
    g, b, c, documents, dy, before, dproducts, dg, dc, length, heads, repeats, chunks,
    b_row, b_position, b_head, c_row, c_position, c_head,
    SEGMENTS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ALL_VALUES: tl.constexpr, SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dc [B, S, G, N]; dg: the gradient of G, to which that through reads of the state before the chunk is added. A
    program computes a chunk of one group, one of its heads after the other."""
    row, group, groups, chunk, begin = chunk_of_group(heads, repeats, length, chunks, SIZE)
    place, channel = tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    valid = begin + place < length
    keys = valid[:, None] & (channel < DIM)[None, :]
    query = c + row * c_row + begin * c_position + group * c_head
    query = tl.load(rows_at(query, place, c_position, channel), mask=keys, other=0.0)
    key = b + row * b_row + begin * b_position + group * b_head
    key = tl.load(rows_at(key, place, b_position, channel), mask=keys, other=0.0)
    dquery = tl.zeros([SIZE, BLOCK_DIM], tl.float32)
    for number in range(repeats):
        head = group * repeats + number
        at = (row * heads + head) * chunks + chunk
        first = (row * length + begin) * heads + head
        _, reach, _, _ = decays_of_chunk(g, documents, row, begin, first, heads, length, SEGMENTS, SIZE)
        of_read = tl.zeros([SIZE, BLOCK_DIM], tl.float32)
        for start in range(0, ALL_VALUES, BLOCK_VALUE):
            value = start + tl.arange(0, BLOCK_VALUE)
            state = tl.load(rows_at(before + at * BLOCK_DIM * ALL_VALUES, channel, ALL_VALUES, value))
            grad = rows_at(dy + first * VALUE, place, heads * VALUE, value)
            grad = tl.load(grad, mask=valid[:, None] & (value < VALUE)[None, :], other=0.0)
            of_read = tl.dot(grad, tl.trans(state), acc=of_read, input_precision=PRECISION)
        of_read *= reach[:, None]
        dtotal = tl.load(dg + first + place * heads, mask=valid, other=0.0)
        tl.store(dg + first + place * heads, dtotal + tl.sum(of_read * query.to(tl.float32), 1), mask=valid)
        products = tl.load(rows_at(dproducts + at * SIZE * SIZE, place, SIZE, place))
        dquery = tl.dot(products, key, acc=dquery + of_read, input_precision=PRECISION)
    out = dc + ((row * length + begin) * groups + group) * DIM
    tl.store(rows_at(out, place, groups * DIM, channel), dquery, mask=keys)


@triton.jit
def _ssd_writes_backward(
    x, dt, g, b, c, documents, dover, dbehind, dproducts, dg, db, length, heads, repeats, chunks,
    x_row, x_position, x_head, b_row, b_position, b_head, c_row, c_position, c_head,
    PARTS: tl.constexpr, SEGMENTS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ALL_VALUES: tl.constexpr, SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """db [B, S, G, N]; dg: read as the gradient of G but for what is written into the state behind the chunk, written
    as that of g. A program computes a chunk of one group, one of its heads after the other."""
    row, group, groups, chunk, begin = chunk_of_group(heads, repeats, length, chunks, SIZE)
    place, channel = tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    valid = begin + place < length
    keys = valid[:, None] & (channel < DIM)[None, :]
    query = c + row * c_row + begin * c_position + group * c_head
    query = tl.load(rows_at(query, place, c_position, channel), mask=keys, other=0.0)
    key = b + row * b_row + begin * b_position + group * b_head
    key = tl.load(rows_at(key, place, b_position, channel), mask=keys, other=0.0)
    dkey = tl.zeros([SIZE, BLOCK_DIM], tl.float32)
    for number in range(repeats):
        head = group * repeats + number
        at = (row * heads + head) * chunks + chunk
        first = (row * length + begin) * heads + head
        _, _, to_end, over = decays_of_chunk(g, documents, row, begin, first, heads, length, SEGMENTS, SIZE)
        step = tl.load(dt + first + place * heads, mask=valid, other=0.0)
        of_written = tl.zeros([SIZE, BLOCK_DIM], tl.float32)
        for start in range(0, ALL_VALUES, BLOCK_VALUE):
            value = start + tl.arange(0, BLOCK_VALUE)
            behind = tl.load(rows_at(dbehind + at * BLOCK_DIM * ALL_VALUES, channel, ALL_VALUES, value))
            content = rows_at(x + row * x_row + begin * x_position + head * x_head, place, x_position, value)
            content = tl.load(content, mask=valid[:, None] & (value < VALUE)[None, :], other=0.0).to(tl.float32)
            update = (content * step[:, None]).to(key.dtype)
            of_written = tl.dot(update, tl.trans(behind), acc=of_written, input_precision=PRECISION)
        of_written *= to_end[:, None]
        ending = tl.sum(of_written * key.to(tl.float32), 1)
        at_end = tl.sum(ending, 0) + over * tl.sum(tl.load(dover + at * PARTS + tl.arange(0, PARTS)), 0)
        dtotal = tl.load(dg + first + place * heads, mask=valid, other=0.0) - ending
        dtotal += tl.where(place == SIZE - 1, at_end, 0.0)
        # g_i enters the sums G_i and all behind it.
        tl.store(dg + first + place * heads, tl.cumsum(dtotal, 0, reverse=True), mask=valid)
        products = tl.load(rows_at(dproducts + at * SIZE * SIZE, place, SIZE, place))
        dkey = tl.dot(tl.trans(products), query, acc=dkey + of_written, input_precision=PRECISION)
    out = db + ((row * length + begin) * groups + group) * DIM
    tl.store(rows_at(out, place, groups * DIM, channel), dkey, mask=keys)
