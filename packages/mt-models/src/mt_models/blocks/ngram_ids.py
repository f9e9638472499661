"""Rows of tables for n-grams of token ids: hashes into a table of each of several heads (Qwen4-Exp, 2026).

Head h of the n-grams of length n has, for the tokens t_0 (a position's own), t_1 (the one before) ... t_{n-1},

    row = (t_0 m_0 xor t_1 m_1 xor ... t_{n-1} m_{n-1}) mod p_h

with odd multipliers m of the layer and a prime p_h, the rows of the head's table; no two heads have the same prime.
Behind the end of a text the tokens before it count as ends of texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
SEED_STRIDE = 10007
"""Difference of the seeds of two layers."""


@dataclass(frozen=True)
class NGramTable:
    """The rows of one layer: sizes and offsets of its heads' tables, one behind the other, and the multipliers."""

    sizes: tuple[int, ...]
    multipliers: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(sum(self.sizes[:head]) for head in range(len(self.sizes)))

    def rows(self, divisible_by: int) -> int:
        """Rows of all tables, and those that fill them up."""
        return -(-sum(self.sizes) // divisible_by) * divisible_by


def ngram_table(*, index: int, vocab_size: int, longest: int, heads: int, least_rows: int, seed: int) -> NGramTable:
    """The table of the layer that is number `index` of those with n-grams. longest: tokens of the longest n-gram;
    heads: of each length from 2; least_rows: the first table has the next prime from here on."""
    count = (longest - 1) * heads
    return NGramTable(
        primes(least_rows, index * count, count), multipliers(vocab_size, longest, seed + SEED_STRIDE * index)
    )


def primes(start: int, skipped: int, count: int) -> tuple[int, ...]:
    """`count` primes in order, without the first `skipped` from `start` on."""
    all_primes, number = list[int](), start
    while len(all_primes) < skipped + count:
        if is_prime(number):
            all_primes.append(number)
        number += 1
    return tuple(all_primes[skipped:])


def is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))


def multipliers(vocab_size: int, count: int, seed: int) -> tuple[int, ...]:
    """Odd numbers of which none times a token id is above 2^63."""
    bound = max(((1 << 63) - 1) // max(vocab_size, 1) // 2, 1)
    return tuple(2 * (splitmix64(seed + GOLDEN * (place + 1)) % bound) + 1 for place in range(count))


def splitmix64(value: int) -> int:
    """The output of SplitMix64 for a state (Steele, Lea and Flood, 2014)."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
