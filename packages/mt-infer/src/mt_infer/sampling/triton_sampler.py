# mypy: disable-error-code="no-untyped-def"
"""Sampling in one Triton launch: temperature, top-k, top-p, min-p and the draw, without a sort and without the host.

A program computes a row. It finds the thresholds of top-k and top-p by bisection of the bits of fp32, in which larger
numbers have larger keys: 32 passes over the row, which stays in the cache, instead of a sort of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device
from mt_infer.sampling.rows import SamplingRow

BLOCK = 8192
WARPS = 32
"""So many that no register is spilled on Hopper."""


@triton.jit
def _ordered_key(x):
    """int64 keys, larger for larger fp32 numbers."""
    # The bits of a positive float grow with it. Those of a negative one, read as an integer, grow with its magnitude:
    # reversed, they follow below. -0.0 and 0.0 both get 0. int64, so that nothing overflows.
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits, -2147483648 - bits)


@triton.jit
def _sample_row_loads(logits, row, start, vocab, temperature, BLOCK: tl.constexpr):
    """Logits of a block divided by the temperature; -inf behind the vocabulary."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    # Rounded as torch's division; `/` in Triton may be approximate for fp32.
    return tl.div_rn(x, temperature + tl.zeros([BLOCK], tl.float32))


@triton.jit
def _sample_rows(logits, parameters, tokens, vocab, BLOCK: tl.constexpr):
    """parameters [B, 5] fp64: temperature (0: the likeliest token), top_k (0: all), top_p, min_p, a uniform number."""
    row = tl.program_id(0).to(tl.int64)
    # fp64 for the uniform number; the rest is computed in fp32, as torch does.
    row_parameters = parameters + row * 5
    requested = tl.load(row_parameters).to(tl.float32)
    temperature = tl.where(requested > 0.0, requested, 1.0)
    top_k, top_p = tl.load(row_parameters + 1), tl.load(row_parameters + 2).to(tl.float32)
    min_p, noise = tl.load(row_parameters + 3).to(tl.float32), tl.load(row_parameters + 4)

    largest, best = float("-inf"), tl.cast(0, tl.int64)
    for start in range(0, vocab, BLOCK):
        x = _sample_row_loads(logits, row, start, vocab, temperature, BLOCK)
        here = tl.max(x, 0)
        # Strictly above: of equal logits the first id is taken, as by tl.argmax within a block.
        if here > largest:
            best = (start + tl.argmax(x, 0)).to(tl.int64)
            largest = here

    if requested > 0.0:
        # A threshold is a key: bisection over the 2^32 keys of fp32 ends with the exact one in 32 turns, each a count
        # (top-k) or a sum (top-p) over the row.
        # The smallest scaled logit that is kept.
        least = tl.cast(-2147483648, tl.int64)
        if (top_k > 0.0) & (top_k < vocab):
            above = tl.cast(2147483647, tl.int64)
            while least < above:
                # Invariant: count(key >= least) >= top_k > count(key >= above + 1). Rounded up, so that least = middle
                # makes progress.
                middle = (least + above + 1) >> 1
                count = 0
                for start in range(0, vocab, BLOCK):
                    x = _sample_row_loads(logits, row, start, vocab, temperature, BLOCK)
                    count += tl.sum((_ordered_key(x) >= middle).to(tl.int32), 0)
                if count >= top_k:
                    least = middle
                else:
                    above = middle - 1
        if top_p < 1.0:
            total = 0.0
            for start in range(0, vocab, BLOCK):
                x = _sample_row_loads(logits, row, start, vocab, temperature, BLOCK)
                total += tl.sum(tl.where(_ordered_key(x) >= least, tl.exp(x - largest), 0.0), 0)
            # The smallest key behind which less than top_p is left.
            below, above = least, _ordered_key(largest)
            while below < above:
                # Invariant: the mass above `above` is less than top_p. Rounded down, so that above = middle makes
                # progress.
                middle = (below + above) >> 1
                mass = 0.0
                for start in range(0, vocab, BLOCK):
                    x = _sample_row_loads(logits, row, start, vocab, temperature, BLOCK)
                    mass += tl.sum(tl.where(_ordered_key(x) > middle, tl.exp(x - largest), 0.0), 0)
                # Of what top_k left, as in transformers.
                if mass / total < top_p:
                    above = middle
                else:
                    below = middle + 1
            least = below
        # Of probabilities, without their common factor.
        # chance is exp(x - largest), 1 for the likeliest: min_p compares with it directly.
        floor = tl.where(min_p > 0.0, min_p, 0.0)
        total = 0.0
        for start in range(0, vocab, BLOCK):
            x = _sample_row_loads(logits, row, start, vocab, temperature, BLOCK)
            chance = tl.exp(x - largest)
            kept = (_ordered_key(x) >= least) & (chance >= floor)
            total += tl.sum(tl.where(kept, chance, 0.0), 0)
        # The probabilities that are kept, as fp32 numbers that are added up in fp64: as `draw` does.
        mass = tl.cast(0.0, tl.float64)
        for start in range(0, vocab, BLOCK):
            x = _sample_row_loads(logits, row, start, vocab, temperature, BLOCK)
            chance = tl.exp(x - largest)
            kept = (_ordered_key(x) >= least) & (chance >= floor)
            mass += tl.sum(tl.where(kept, chance / total, 0.0).to(tl.float64), 0)
        wanted, before = noise * mass, tl.cast(0.0, tl.float64)
        token = tl.cast(-1, tl.int64)
        for start in range(0, vocab, BLOCK):
            # A scalar branch: blocks behind the one that was hit are not read.
            if token < 0:
                x = _sample_row_loads(logits, row, start, vocab, temperature, BLOCK)
                chance = tl.exp(x - largest)
                kept = (_ordered_key(x) >= least) & (chance >= floor)
                cumulative = before + tl.cumsum(tl.where(kept, chance / total, 0.0).to(tl.float64), 0)
                # Ids whose cumulative probability is not above the number, which all come before the one that is drawn.
                passed = tl.sum((cumulative <= wanted).to(tl.int32), 0)
                if passed < BLOCK:
                    token = (start + passed).to(tl.int64)
                # The last one: cumulative sums do not fall.
                before = tl.max(cumulative, 0)
        # None was found where rounding left the last cumulative sum at `wanted`.
        best = tl.where(token < 0, best, token)
    tl.store(tokens + row, best)


def triton_sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """[B, vocab] -> [B] ids. As mt_infer.sampling.sampler.choose, for rows without adjustments and typical_p."""
    values = [
        (s.temperature, float(s.top_k), s.top_p_at(row.index), s.min_p, row.noise if s.temperature > 0 else 0.0)
        for row in rows
        for s in (row.sampling,)
    ]
    # Pinned, so that the copy does not wait for the device.
    host = torch.tensor(values, dtype=torch.float64, pin_memory=logits.is_cuda)
    parameters, tokens = host.to(logits.device, non_blocking=True), logits.new_empty(len(rows), dtype=torch.int64)
    logits = logits.contiguous()
    with on_device(logits):
        _sample_rows[(len(rows),)](logits, parameters, tokens, logits.shape[-1], BLOCK, num_warps=WARPS)
    return tokens
