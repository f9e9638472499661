# mypy: disable-error-code="no-untyped-def"
"""Kernels of a recurrence whose state is a matrix, over chunks whose own parts are known: the states between them, the
outputs, and the gradients of the parts.

With the state S before a chunk of L positions, its updates u, outputs o and the state behind it are

    u = U - W S          o = P u + Q S          S <- diag(d) S + K^T u

P holds the decayed scores of queries with keys, Q the queries decayed from the start of the chunk, K the keys decayed
to its end, d the decays over the chunk. [U, W] = X [beta v, R], where X is the inverse of the chunk's triangular system
and R holds the keys decayed from its start, times beta. Products take operands of the inputs' dtype and are summed in
fp32; S is fp32 from one chunk to the next.

Shapes: N sequences (batch times heads), K chunks of L positions, D channels of a key and V of a value, both filled with
zeros to whole blocks: P and X [N, K, L, L], Q, K and W [N, K, L, D], U and u [N, K, L, V], d [N, K, D] in fp32, states
before chunks [N, K, D, V]. Inputs and outputs are [B, S, H, ...], without what is filled.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_at(base, place, stride, column):
    """Addresses [L, C] of rows that are `stride` elements apart. Offsets from `base` fit into 32 bits."""
    return base + (place * stride)[:, None] + column[None, :]


@triton.jit
def chunk_of_program(heads, length, chunks, SIZE: tl.constexpr):
    """Number of the chunk among all, its row and head, its first position, and that in [B, S, H]."""
    # int64: of long sequences with many heads there are more than 2^31 elements.
    at = tl.program_id(0).to(tl.int64)
    sequence = at // chunks
    row, head = sequence // heads, sequence % heads
    begin = (at % chunks) * SIZE
    return at, row, head, begin, (row * length + begin) * heads + head


@triton.jit
def _states_of_chunks(
    removed, written, updates, over, state, before, last, chunks,
    HAS_STATE: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ALL_VALUES: tl.constexpr, SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """updates: read as U and written as u. state and last [N, DIM, VALUE] in fp32."""
    sequence = tl.program_id(0).to(tl.int64)
    place, channel = tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    value = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    inside = (channel < DIM)[:, None] & (value < VALUE)[None, :]
    if HAS_STATE:
        current = tl.load(rows_at(state + sequence * DIM * VALUE, channel, VALUE, value), mask=inside, other=0.0)
    else:
        current = tl.zeros([BLOCK_DIM, BLOCK_VALUE], tl.float32)
    for chunk in range(chunks):
        at = sequence * chunks + chunk
        operand = current.to(before.dtype.element_ty)
        tl.store(rows_at(before + at * BLOCK_DIM * ALL_VALUES, channel, ALL_VALUES, value), operand)
        remove = tl.load(rows_at(removed + at * SIZE * BLOCK_DIM, place, BLOCK_DIM, channel))
        looked_up = tl.dot(remove, operand, input_precision=PRECISION)
        here = rows_at(updates + at * SIZE * ALL_VALUES, place, ALL_VALUES, value)
        update = (tl.load(here).to(tl.float32) - looked_up).to(updates.dtype.element_ty)
        tl.store(here, update)
        write = tl.load(rows_at(written + at * SIZE * BLOCK_DIM, place, BLOCK_DIM, channel))
        current *= tl.load(over + at * BLOCK_DIM + channel)[:, None]
        current = tl.dot(tl.trans(write), update, acc=current, input_precision=PRECISION)
    tl.store(rows_at(last + sequence * DIM * VALUE, channel, VALUE, value), current, mask=inside)


@triton.jit
def _outputs_of_chunks(
    scores, read, updates, before, o, length, heads, chunks,
    VALUE: tl.constexpr, BLOCK_DIM: tl.constexpr, ALL_VALUES: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o [B, S, H, VALUE]"""
    at, _row, _head, begin, first = chunk_of_program(heads, length, chunks, SIZE)
    place, channel = tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    value = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    query = tl.load(rows_at(read + at * SIZE * BLOCK_DIM, place, BLOCK_DIM, channel))
    state = tl.load(rows_at(before + at * BLOCK_DIM * ALL_VALUES, channel, ALL_VALUES, value))
    out = tl.dot(query, state, input_precision=PRECISION)
    score = tl.load(rows_at(scores + at * SIZE * SIZE, place, SIZE, place))
    update = tl.load(rows_at(updates + at * SIZE * ALL_VALUES, place, ALL_VALUES, value))
    out = tl.dot(score, update, acc=out, input_precision=PRECISION)
    inside = (begin + place < length)[:, None] & (value < VALUE)[None, :]
    tl.store(rows_at(o + first * VALUE, place, heads * VALUE, value), out, mask=inside)


@triton.jit
def _states_of_chunks_backward(
    scores, read, written, removed, over, dout, dlast, dupdates, dbehind, dstate, length, heads, chunks,
    HAS_LAST: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ALL_VALUES: tl.constexpr, SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dupdates: gradient of u; dbehind [N, K, D, V]: of the states behind chunks; dstate: of that before the first."""
    sequence = tl.program_id(0).to(tl.int64)
    row, head = sequence // heads, sequence % heads
    place, channel = tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    value = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    inside = (channel < DIM)[:, None] & (value < VALUE)[None, :]
    if HAS_LAST:
        current = tl.load(rows_at(dlast + sequence * DIM * VALUE, channel, VALUE, value), mask=inside, other=0.0)
    else:
        current = tl.zeros([BLOCK_DIM, BLOCK_VALUE], tl.float32)
    for step in range(chunks):
        chunk = chunks - 1 - step
        at = sequence * chunks + chunk
        operand = current.to(dbehind.dtype.element_ty)
        tl.store(rows_at(dbehind + at * BLOCK_DIM * ALL_VALUES, channel, ALL_VALUES, value), operand)
        first = (row * length + chunk * SIZE) * heads + head
        valid = (chunk * SIZE + place < length)[:, None] & (value < VALUE)[None, :]
        grad = tl.load(rows_at(dout + first * VALUE, place, heads * VALUE, value), mask=valid, other=0.0)
        write = tl.load(rows_at(written + at * SIZE * BLOCK_DIM, place, BLOCK_DIM, channel))
        dupdate = tl.dot(write, operand, input_precision=PRECISION)
        score = tl.load(rows_at(scores + at * SIZE * SIZE, place, SIZE, place))
        dupdate = tl.dot(tl.trans(score), grad, acc=dupdate, input_precision=PRECISION)
        tl.store(rows_at(dupdates + at * SIZE * ALL_VALUES, place, ALL_VALUES, value), dupdate)
        current *= tl.load(over + at * BLOCK_DIM + channel)[:, None]
        query = tl.load(rows_at(read + at * SIZE * BLOCK_DIM, place, BLOCK_DIM, channel))
        current = tl.dot(tl.trans(query), grad, acc=current, input_precision=PRECISION)
        remove = tl.load(rows_at(removed + at * SIZE * BLOCK_DIM, place, BLOCK_DIM, channel))
        # With the sign turned, since products are added.
        turned = (-dupdate).to(dupdates.dtype.element_ty)
        current = tl.dot(tl.trans(remove), turned, acc=current, input_precision=PRECISION)
    tl.store(rows_at(dstate + sequence * DIM * VALUE, channel, VALUE, value), current, mask=inside)


@triton.jit
def _pairs_of_chunks_backward(
    inverse, updates, v, beta, dout, dupdates, dscores, dsystem, dv, dbeta, length, heads, chunks,
    v_row, v_position, v_head, VALUE: tl.constexpr, ALL_VALUES: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dupdates: read as the gradient of u, written as X^T times it, that of the right sides beta v; dscores and dsystem
    [N, K, L, L]: those of P and of the system, also where these are 0; dv [B, S, H, VALUE]; dbeta [B, S, H] in fp32:
    through beta v."""
    at, row, head, begin, first = chunk_of_program(heads, length, chunks, SIZE)
    place = tl.arange(0, SIZE)
    valid = begin + place < length
    rate = tl.load(beta + first + place * heads, mask=valid, other=0.0).to(tl.float32)
    turned = tl.trans(tl.load(rows_at(inverse + at * SIZE * SIZE, place, SIZE, place)))
    score = tl.zeros([SIZE, SIZE], tl.float32)
    system = tl.zeros([SIZE, SIZE], tl.float32)
    drate = tl.zeros([SIZE], tl.float32)
    content_base = v + row * v_row + begin * v_position + head * v_head
    for start in range(0, ALL_VALUES, BLOCK_VALUE):
        value = start + tl.arange(0, BLOCK_VALUE)
        inside = valid[:, None] & (value < VALUE)[None, :]
        here = rows_at(dupdates + at * SIZE * ALL_VALUES, place, ALL_VALUES, value)
        exact = tl.dot(turned, tl.load(here), input_precision=PRECISION)
        content = tl.load(rows_at(content_base, place, v_position, value), mask=inside, other=0.0)
        drate += tl.sum(exact * content.to(tl.float32), 1)
        tl.store(rows_at(dv + first * VALUE, place, heads * VALUE, value), exact * rate[:, None], mask=inside)
        right = exact.to(dupdates.dtype.element_ty)
        tl.store(here, right)
        update = tl.trans(tl.load(rows_at(updates + at * SIZE * ALL_VALUES, place, ALL_VALUES, value)))
        system = tl.dot(right, update, acc=system, input_precision=PRECISION)
        grad = tl.load(rows_at(dout + first * VALUE, place, heads * VALUE, value), mask=inside, other=0.0)
        score = tl.dot(grad, update, acc=score, input_precision=PRECISION)
    tl.store(dbeta + first + place * heads, drate, mask=valid)
    tl.store(rows_at(dscores + at * SIZE * SIZE, place, SIZE, place), score)
    tl.store(rows_at(dsystem + at * SIZE * SIZE, place, SIZE, place), -system)


@triton.jit
def _keys_of_chunks_backward(
    updates, before, dout, dright, dbehind, dread, dwritten, looked, dover, length, heads, chunks,
    VALUE: tl.constexpr, BLOCK_DIM: tl.constexpr, ALL_VALUES: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dread, dwritten [N, K, L, D]: the gradients of Q and K; looked: that of the right sides beta v times the state
    before the chunk, which is that of R with its sign turned; dover [N, K, D]: of d. A program computes BLOCK_KEY
    channels."""
    at, _row, _head, begin, first = chunk_of_program(heads, length, chunks, SIZE)
    place = tl.arange(0, SIZE)
    channel = tl.program_id(1) * BLOCK_KEY + tl.arange(0, BLOCK_KEY)
    of_query = tl.zeros([SIZE, BLOCK_KEY], tl.float32)
    of_written = tl.zeros([SIZE, BLOCK_KEY], tl.float32)
    of_right = tl.zeros([SIZE, BLOCK_KEY], tl.float32)
    kept = tl.zeros([BLOCK_KEY], tl.float32)
    for start in range(0, ALL_VALUES, BLOCK_VALUE):
        value = start + tl.arange(0, BLOCK_VALUE)
        behind = tl.load(rows_at(dbehind + at * BLOCK_DIM * ALL_VALUES, channel, ALL_VALUES, value))
        state = tl.load(rows_at(before + at * BLOCK_DIM * ALL_VALUES, channel, ALL_VALUES, value))
        kept += tl.sum(behind.to(tl.float32) * state.to(tl.float32), 1)
        update = tl.load(rows_at(updates + at * SIZE * ALL_VALUES, place, ALL_VALUES, value))
        of_written = tl.dot(update, tl.trans(behind), acc=of_written, input_precision=PRECISION)
        inside = (begin + place < length)[:, None] & (value < VALUE)[None, :]
        grad = tl.load(rows_at(dout + first * VALUE, place, heads * VALUE, value), mask=inside, other=0.0)
        of_query = tl.dot(grad, tl.trans(state), acc=of_query, input_precision=PRECISION)
        right = tl.load(rows_at(dright + at * SIZE * ALL_VALUES, place, ALL_VALUES, value))
        of_right = tl.dot(right, tl.trans(state), acc=of_right, input_precision=PRECISION)
    tl.store(rows_at(dread + at * SIZE * BLOCK_DIM, place, BLOCK_DIM, channel), of_query)
    tl.store(rows_at(dwritten + at * SIZE * BLOCK_DIM, place, BLOCK_DIM, channel), of_written)
    tl.store(rows_at(looked + at * SIZE * BLOCK_DIM, place, BLOCK_DIM, channel), of_right)
    tl.store(dover + at * BLOCK_DIM + channel, kept)
