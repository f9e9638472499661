# mypy: disable-error-code="no-untyped-def"
"""Kernels of the parts of each chunk of the gated delta rule, and of the gradients of its inputs.

The formulas, and the letters in the comments, are those of `mt_models.blocks.chunked_delta_rule`; what happens between
chunks is in `chunk_states`. A program computes one chunk of one value head. The triangular system is inverted by
halves: with the inverses X of its diagonal blocks of s positions, those of 2 s are

    [X1 0; -X2 A21 X1  X2]  =  X - X M X        with M the blocks A21 alone

which is a forward substitution by blocks and as stable.

Shapes: B sequences, S positions, G key heads, H value heads, D channels of a key, V of a value, L positions of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mt_models.blocks.triton_kernels.chunk_states import chunk_of_program, rows_at


@triton.jit
def unit_rows(base, place, stride, channel, inside, length, eps):
    """Rows [L, D] in fp32 with the length given, and the factors [L] that they were multiplied by."""
    x = tl.load(rows_at(base, place, stride, channel), mask=inside, other=0.0).to(tl.float32)
    factor = length / tl.sqrt(tl.sum(x * x, 1) + eps)
    return x * factor[:, None], factor


@triton.jit
def decays_of_chunk(g, documents, row, begin, first, heads, length, SEGMENTS: tl.constexpr, SIZE: tl.constexpr):
    """D [L, L]; from before the chunk to behind each position [L]; from there to its end [L]; over the chunk."""
    place = tl.arange(0, SIZE)
    logs = tl.load(g + first + place * heads, mask=begin + place < length, other=0.0).to(tl.float32)
    total = tl.cumsum(logs, 0)
    end = tl.sum(tl.where(place == SIZE - 1, total, 0.0), 0)
    seen = place[:, None] >= place[None, :]
    reach, to_end, over = tl.exp(total), tl.exp(end - total), tl.exp(end)
    if SEGMENTS:
        # Positions behind the last are of its document.
        numbers = documents + row * length
        document = tl.load(numbers + tl.minimum(begin + place, length - 1))
        last = tl.load(numbers + tl.minimum(begin + SIZE - 1, length - 1))
        before = tl.load(numbers + tl.maximum(begin - 1, 0))
        seen = seen & (document[:, None] == document[None, :])
        reach = tl.where(document == before, reach, 0.0)
        to_end = tl.where(document == last, to_end, 0.0)
        over = tl.where(last == before, over, 0.0)
    # Masked before the exponential, which would overflow for positions ahead.
    within = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
    return within, reach, to_end, over


@triton.jit
def inverse_of_unit_triangular(system, SIZE: tl.constexpr):
    """(I + A)^-1 [L, L] in fp32 of A [L, L], which is 0 on and above the diagonal."""
    place = tl.arange(0, SIZE)
    row, column = place[:, None], place[None, :]
    # Of blocks of two positions.
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where((row == column + 1) & (row % 2 == 1), system, 0.0)
    half = 2
    while half < SIZE:
        lower = ((row // half) % 2 == 1) & (column // half == row // half - 1)
        product = tl.dot(inverse, tl.where(lower, system, 0.0), input_precision="tf32x3")
        inverse -= tl.dot(product, inverse, input_precision="tf32x3")
        half *= 2
    return inverse


@triton.jit
def _gated_systems(
    q, k, g, beta, documents, inverse, scores, length, heads, repeats, chunks, scale, eps,
    q_row, q_position, q_head, k_row, k_position, k_head,
    SEGMENTS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """g and beta [B, S, H], documents [B, S] -> inverse: X, and scores: P."""
    at, row, head, begin, first = chunk_of_program(heads, length, chunks, SIZE)
    place, channel = tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    valid = begin + place < length
    keys = valid[:, None] & (channel < DIM)[None, :]
    known = k + row * k_row + begin * k_position + (head // repeats) * k_head
    key, _ = unit_rows(known, place, k_position, channel, keys, 1.0, eps)
    asked = q + row * q_row + begin * q_position + (head // repeats) * q_head
    query, _ = unit_rows(asked, place, q_position, channel, keys, scale, eps)
    key, query = key.to(inverse.dtype.element_ty), query.to(inverse.dtype.element_ty)
    within, _, _, _ = decays_of_chunk(g, documents, row, begin, first, heads, length, SEGMENTS, SIZE)
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * within
    tl.store(rows_at(scores + at * SIZE * SIZE, place, SIZE, place), score)
    rate = tl.load(beta + first + place * heads, mask=valid, other=0.0).to(tl.float32)
    system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * within * rate[:, None]
    system = tl.where(place[:, None] > place[None, :], system, 0.0)
    tl.store(rows_at(inverse + at * SIZE * SIZE, place, SIZE, place), inverse_of_unit_triangular(system, SIZE))


@triton.jit
def _gated_parts(
    q, k, v, g, beta, documents, inverse, read, written, removed, updates, over,
    length, heads, repeats, chunks, scale, eps,
    q_row, q_position, q_head, k_row, k_position, k_head, v_row, v_position, v_head,
    SEGMENTS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ALL_VALUES: tl.constexpr, SIZE: tl.constexpr, BLOCK_VALUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From X: read, written, removed, updates and over are Q, K, W, U and d."""
    at, row, head, begin, first = chunk_of_program(heads, length, chunks, SIZE)
    place, channel = tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    valid = begin + place < length
    keys = valid[:, None] & (channel < DIM)[None, :]
    _, reach, to_end, kept = decays_of_chunk(g, documents, row, begin, first, heads, length, SEGMENTS, SIZE)
    asked = q + row * q_row + begin * q_position + (head // repeats) * q_head
    query, _ = unit_rows(asked, place, q_position, channel, keys, scale, eps)
    tl.store(rows_at(read + at * SIZE * BLOCK_DIM, place, BLOCK_DIM, channel), query * reach[:, None])
    known = k + row * k_row + begin * k_position + (head // repeats) * k_head
    key, _ = unit_rows(known, place, k_position, channel, keys, 1.0, eps)
    tl.store(rows_at(written + at * SIZE * BLOCK_DIM, place, BLOCK_DIM, channel), key * to_end[:, None])
    tl.store(over + at * BLOCK_DIM + channel, tl.zeros([BLOCK_DIM], tl.float32) + kept)
    solved = tl.load(rows_at(inverse + at * SIZE * SIZE, place, SIZE, place))
    rate = tl.load(beta + first + place * heads, mask=valid, other=0.0).to(tl.float32)
    right = (key * (rate * reach)[:, None]).to(inverse.dtype.element_ty)
    remove = tl.dot(solved, right, input_precision=PRECISION)
    tl.store(rows_at(removed + at * SIZE * BLOCK_DIM, place, BLOCK_DIM, channel), remove)
    content_base = v + row * v_row + begin * v_position + head * v_head
    for start in range(0, ALL_VALUES, BLOCK_VALUE):
        value = start + tl.arange(0, BLOCK_VALUE)
        inside = valid[:, None] & (value < VALUE)[None, :]
        content = tl.load(rows_at(content_base, place, v_position, value), mask=inside, other=0.0).to(tl.float32)
        content = (content * rate[:, None]).to(inverse.dtype.element_ty)
        update = tl.dot(solved, content, input_precision=PRECISION)
        tl.store(rows_at(updates + at * SIZE * ALL_VALUES, place, ALL_VALUES, value), update)


@triton.jit
def _gated_systems_backward(
    k, g, beta, documents, scores, dscores, dsystem, dg, dbeta, length, heads, repeats, chunks, eps,
    k_row, k_position, k_head,
    SEGMENTS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dscores, dsystem: read as the gradients of P and of the system, written as those of the products of queries and
    of keys with keys; dg [B, S, H] in fp32: the gradient of G through D; dbeta [B, S, H] in fp32: added to."""
    at, row, head, begin, first = chunk_of_program(heads, length, chunks, SIZE)
    place, channel = tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    valid = begin + place < length
    of_head = first + place * heads
    known = k + row * k_row + begin * k_position + (head // repeats) * k_head
    key, _ = unit_rows(known, place, k_position, channel, valid[:, None] & (channel < DIM)[None, :], 1.0, eps)
    key = key.to(scores.dtype.element_ty)
    products = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    within, _, _, _ = decays_of_chunk(g, documents, row, begin, first, heads, length, SEGMENTS, SIZE)
    rate = tl.load(beta + of_head, mask=valid, other=0.0).to(tl.float32)
    of_system = rows_at(dsystem + at * SIZE * SIZE, place, SIZE, place)
    system = tl.load(of_system).to(tl.float32) * within
    system = tl.where(place[:, None] > place[None, :], system, 0.0)
    of_rate = system * products
    drate = tl.load(dbeta + of_head, mask=valid, other=0.0) + tl.sum(of_rate, 1)
    tl.store(dbeta + of_head, drate, mask=valid)
    tl.store(of_system, system * rate[:, None])
    of_scores = rows_at(dscores + at * SIZE * SIZE, place, SIZE, place)
    dscore = tl.load(of_scores).to(tl.float32)
    score = tl.load(rows_at(scores + at * SIZE * SIZE, place, SIZE, place)).to(tl.float32)
    along = dscore * score + of_rate * rate[:, None]
    tl.store(of_scores, dscore * within)
    tl.store(dg + of_head, tl.sum(along, 1) - tl.sum(along, 0), mask=valid)


@triton.jit
def _gated_parts_backward(
    q, k, g, beta, documents, dscores, dsystem, dread, dwritten, looked, dover, dq, dk, dg, dbeta,
    length, heads, repeats, chunks, scale, eps, q_row, q_position, q_head, k_row, k_position, k_head,
    SEGMENTS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk [B, S, H, D]: of each value head; dg [B, S, H]: read as the gradient of G through D, written as that of
    g; dbeta [B, S, H] in fp32: added to."""
    at, row, head, begin, first = chunk_of_program(heads, length, chunks, SIZE)
    place, channel = tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    valid = begin + place < length
    of_head = first + place * heads
    keys = valid[:, None] & (channel < DIM)[None, :]
    of_keys = at * SIZE * BLOCK_DIM
    _, reach, to_end, kept = decays_of_chunk(g, documents, row, begin, first, heads, length, SEGMENTS, SIZE)
    known = k + row * k_row + begin * k_position + (head // repeats) * k_head
    key, _ = unit_rows(known, place, k_position, channel, keys, 1.0, eps)
    narrow = key.to(dscores.dtype.element_ty)
    asked = q + row * q_row + begin * q_position + (head // repeats) * q_head
    query, query_factor = unit_rows(asked, place, q_position, channel, keys, scale, eps)
    narrow_query = query.to(narrow.dtype)
    # What positions read of the state before the chunk.
    products = tl.load(rows_at(dscores + at * SIZE * SIZE, place, SIZE, place))
    dquery = tl.load(rows_at(dread + of_keys, place, BLOCK_DIM, channel)).to(tl.float32) * reach[:, None]
    dtotal = tl.load(dg + of_head, mask=valid, other=0.0) + tl.sum(dquery * query, 1)
    dquery = tl.dot(products, narrow, acc=dquery, input_precision=PRECISION)
    # Of rows that were given a length: their part along the row is left out.
    dquery = (dquery - query * (tl.sum(dquery * query, 1) / (scale * scale))[:, None]) * query_factor[:, None]
    tl.store(rows_at(dq + first * DIM, place, heads * DIM, channel), dquery, mask=keys)
    # Loads of what follows stay behind it: together they would not fit into registers.
    tl.debug_barrier()
    # What keys look up there, and what they write into the state behind the chunk.
    key, key_factor = unit_rows(known, place, k_position, channel, keys, 1.0, eps)
    rate = tl.load(beta + of_head, mask=valid, other=0.0).to(tl.float32)
    right = tl.load(rows_at(looked + of_keys, place, BLOCK_DIM, channel)).to(tl.float32)
    along_keys = tl.sum(right * key, 1) * reach
    drate = tl.load(dbeta + of_head, mask=valid, other=0.0) - along_keys
    tl.store(dbeta + of_head, drate, mask=valid)
    dkey = tl.load(rows_at(dwritten + of_keys, place, BLOCK_DIM, channel)).to(tl.float32) * to_end[:, None]
    ending = tl.sum(dkey * key, 1)
    at_end = tl.sum(ending, 0) + kept * tl.sum(tl.load(dover + at * BLOCK_DIM + channel), 0)
    dtotal += tl.where(place == SIZE - 1, at_end, 0.0) - ending - rate * along_keys
    # g_i enters the sums G_i and all behind it.
    tl.store(dg + of_head, tl.cumsum(dtotal, 0, reverse=True), mask=valid)
    dkey -= right * (rate * reach)[:, None]
    dkey = tl.dot(tl.trans(products), narrow_query, acc=dkey, input_precision=PRECISION)
    system = tl.load(rows_at(dsystem + at * SIZE * SIZE, place, SIZE, place))
    dkey = tl.dot(system, narrow, acc=dkey, input_precision=PRECISION)
    dkey = tl.dot(tl.trans(system), narrow, acc=dkey, input_precision=PRECISION)
    dkey = (dkey - key * tl.sum(dkey * key, 1)[:, None]) * key_factor[:, None]
    tl.store(rows_at(dk + first * DIM, place, heads * DIM, channel), dkey, mask=keys)
