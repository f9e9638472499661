"""Randomness of sampling: one number in [0, 1) for each generated token, by the request's seed and the token's index.

It does not depend on what else is in the batch, on chunks or restarts, and is the same on every machine.
"""

from __future__ import annotations

import secrets
import struct
from hashlib import blake2b


def new_seed() -> int:
    return secrets.randbits(63)


def sequence_seed(seed: int, index: int) -> int:
    """The seed of sequence number `index` of a request; its own for the first."""
    return _derived(seed, index, b"sequence")


def request_seed(seed: int, index: int) -> int:
    """The seed of request number `index` of those that share one, such as the lines of a file; its own for the first.

    It is no `sequence_seed`: a request's second sequence and the second request draw other numbers.
    """
    return _derived(seed, index, b"request")


def uniform(seed: int, position: int) -> float:
    """For the token that is generated as number `position` (from 0) of its sequence."""
    # 53 bits, the precision of fp64: every value is exact, and below 1.
    return (_hash(seed, position, b"token") >> 11) / 2**53


def _derived(seed: int, index: int, use: bytes) -> int:
    # >> 1: a seed of 63 bits, as new_seed gives.
    return seed if index == 0 else _hash(seed, index, use) >> 1


def _hash(first: int, second: int, use: bytes) -> int:
    key = struct.pack("<qq", _signed(first), second)
    # `person` separates the uses: a sequence's seed is no token's number.
    return int.from_bytes(blake2b(key, digest_size=8, person=use).digest(), "little")


def _signed(seed: int) -> int:
    """Any integer as one of 64 bits."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
