# mypy: disable-error-code="no-untyped-def"
"""Products of queries and keys with keys of one chunk, decayed channel by channel (Kimi delta attention), and their
gradients.

With G_i the sum of g up to position i, the products are sum_d q_id k_jd exp(G_id - G_jd) for j <= i. Positions are
taken in blocks of 16. Between blocks the decay is divided at the end E of the block before i's, exp(G_i - E)
exp(E - G_j), of which neither exponent is above 0, so that the sums over channels are matrix products; within a block
the exponents are those of the differences themselves, one position of each block after the other.

Shapes: N sequences (batch times heads), K chunks of L positions, D channels, filled with zeros to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mt_models.blocks.triton_kernels.chunk_states import rows_at
from mt_models.blocks.triton_kernels.gated_chunks import inverse_of_unit_triangular


@triton.jit
def _kimi_products(
    q, k, total, scores, products,
    BLOCK_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_KEY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q, k [N, K, L, D], total [N, K, L, D] in fp32: G -> scores and products [N, K, L, L]: of q and of k with k."""
    at = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    of_keys = at * SIZE * BLOCK_DIM
    score = tl.zeros([SIZE, SIZE], tl.float32)
    product = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, BLOCK_DIM, BLOCK_KEY):
        channel = start + tl.arange(0, BLOCK_KEY)
        query = tl.load(rows_at(q + of_keys, place, BLOCK_DIM, channel)).to(tl.float32)
        key = tl.load(rows_at(k + of_keys, place, BLOCK_DIM, channel)).to(tl.float32)
        sums = tl.load(rows_at(total + of_keys, place, BLOCK_DIM, channel))
        for first in range(16, SIZE, 16):
            end = tl.load(total + of_keys + (first - 1) * BLOCK_DIM + channel)[None, :]
            inside = (place >= first) & (place < first + 16)
            left = tl.exp(tl.where(inside[:, None], sums - end, float("-inf")))
            right = tl.exp(tl.where((place < first)[:, None], end - sums, float("-inf")))
            decayed = tl.trans((key * right).to(k.dtype.element_ty))
            score = tl.dot((query * left).to(k.dtype.element_ty), decayed, acc=score, input_precision=PRECISION)
            product = tl.dot((key * left).to(k.dtype.element_ty), decayed, acc=product, input_precision=PRECISION)
        for number in range(16):
            partner = (place // 16) * 16 + number
            other = tl.load(rows_at(k + of_keys, partner, BLOCK_DIM, channel)).to(tl.float32)
            behind = sums - tl.load(rows_at(total + of_keys, partner, BLOCK_DIM, channel))
            other *= tl.exp(tl.where((place >= partner)[:, None], behind, float("-inf")))
            here = partner[:, None] == place[None, :]
            score += tl.where(here, tl.sum(query * other, 1)[:, None], 0.0)
            product += tl.where(here, tl.sum(key * other, 1)[:, None], 0.0)
    tl.store(rows_at(scores + at * SIZE * SIZE, place, SIZE, place), score)
    tl.store(rows_at(products + at * SIZE * SIZE, place, SIZE, place), product)


@triton.jit
def _kimi_rows_backward(
    k, total, dscores, dproducts, dq, drows,
    BLOCK_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_KEY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dscores, dproducts [N, K, L, L], 0 where j > i -> dq [N, K, L, D], and drows: the gradient of the keys i."""
    at = tl.program_id(0).to(tl.int64)
    place, channel = tl.arange(0, SIZE), tl.program_id(1) * BLOCK_KEY + tl.arange(0, BLOCK_KEY)
    of_keys, of_pairs = at * SIZE * BLOCK_DIM, at * SIZE * SIZE
    sums = tl.load(rows_at(total + of_keys, place, BLOCK_DIM, channel))
    of_query = tl.zeros([SIZE, BLOCK_KEY], tl.float32)
    of_key = tl.zeros([SIZE, BLOCK_KEY], tl.float32)
    for first in range(16, SIZE, 16):
        end = tl.load(total + of_keys + (first - 1) * BLOCK_DIM + channel)[None, :]
        inside = (place >= first) & (place < first + 16)
        left = tl.exp(tl.where(inside[:, None], sums - end, float("-inf")))
        right = tl.exp(tl.where((place < first)[:, None], end - sums, float("-inf")))
        key = tl.load(rows_at(k + of_keys, place, BLOCK_DIM, channel)).to(tl.float32)
        decayed = (key * right).to(k.dtype.element_ty)
        score = tl.load(rows_at(dscores + of_pairs, place, SIZE, place))
        of_query += left * tl.dot(score, decayed, input_precision=PRECISION)
        product = tl.load(rows_at(dproducts + of_pairs, place, SIZE, place))
        of_key += left * tl.dot(product, decayed, input_precision=PRECISION)
    for number in range(16):
        partner = (place // 16) * 16 + number
        other = tl.load(rows_at(k + of_keys, partner, BLOCK_DIM, channel)).to(tl.float32)
        behind = sums - tl.load(rows_at(total + of_keys, partner, BLOCK_DIM, channel))
        other *= tl.exp(tl.where((place >= partner)[:, None], behind, float("-inf")))
        of_query += other * tl.load(dscores + of_pairs + place * SIZE + partner).to(tl.float32)[:, None]
        of_key += other * tl.load(dproducts + of_pairs + place * SIZE + partner).to(tl.float32)[:, None]
    tl.store(rows_at(dq + of_keys, place, BLOCK_DIM, channel), of_query)
    tl.store(rows_at(drows + of_keys, place, BLOCK_DIM, channel), of_key)


@triton.jit
def _kimi_columns_backward(
    q, k, total, dscores, dproducts, dcolumns,
    BLOCK_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_KEY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dcolumns [N, K, L, D]: the gradient of the keys j; the others as of `_kimi_rows_backward`."""
    at = tl.program_id(0).to(tl.int64)
    place, channel = tl.arange(0, SIZE), tl.program_id(1) * BLOCK_KEY + tl.arange(0, BLOCK_KEY)
    of_keys, of_pairs = at * SIZE * BLOCK_DIM, at * SIZE * SIZE
    sums = tl.load(rows_at(total + of_keys, place, BLOCK_DIM, channel))
    of_key = tl.zeros([SIZE, BLOCK_KEY], tl.float32)
    for first in range(16, SIZE, 16):
        end = tl.load(total + of_keys + (first - 1) * BLOCK_DIM + channel)[None, :]
        inside = (place >= first) & (place < first + 16)
        left = tl.exp(tl.where(inside[:, None], sums - end, float("-inf")))
        right = tl.exp(tl.where((place < first)[:, None], end - sums, float("-inf")))
        query = tl.load(rows_at(q + of_keys, place, BLOCK_DIM, channel)).to(tl.float32)
        score = tl.trans(tl.load(rows_at(dscores + of_pairs, place, SIZE, place)))
        added = tl.dot(score, (query * left).to(k.dtype.element_ty), input_precision=PRECISION)
        key = tl.load(rows_at(k + of_keys, place, BLOCK_DIM, channel)).to(tl.float32)
        product = tl.trans(tl.load(rows_at(dproducts + of_pairs, place, SIZE, place)))
        added = tl.dot(product, (key * left).to(k.dtype.element_ty), acc=added, input_precision=PRECISION)
        of_key += right * added
    for number in range(16):
        partner = (place // 16) * 16 + number
        query = tl.load(rows_at(q + of_keys, partner, BLOCK_DIM, channel)).to(tl.float32)
        key = tl.load(rows_at(k + of_keys, partner, BLOCK_DIM, channel)).to(tl.float32)
        added = query * tl.load(dscores + of_pairs + partner * SIZE + place).to(tl.float32)[:, None]
        added += key * tl.load(dproducts + of_pairs + partner * SIZE + place).to(tl.float32)[:, None]
        ahead = tl.load(rows_at(total + of_keys, partner, BLOCK_DIM, channel)) - sums
        of_key += added * tl.exp(tl.where((partner >= place)[:, None], ahead, float("-inf")))
    tl.store(rows_at(dcolumns + of_keys, place, BLOCK_DIM, channel), of_key)


@triton.jit
def _triangular_inverses(system, inverse, SIZE: tl.constexpr):
    """(I + A)^-1 of systems A [N, K, L, L], which are 0 on and above the diagonal."""
    at = tl.program_id(0).to(tl.int64) * SIZE * SIZE
    place = tl.arange(0, SIZE)
    values = tl.load(rows_at(system + at, place, SIZE, place)).to(tl.float32)
    tl.store(rows_at(inverse + at, place, SIZE, place), inverse_of_unit_triangular(values, SIZE))
