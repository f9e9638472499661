"""Numbers of a few bits: how they are packed into bytes, and what small floating-point numbers stand for."""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 (OCP Microscaling Formats, 2023) by its three low bits; the fourth is the sign."""
E2M1_MAX, E4M3_MAX, E2M3_MAX = 6.0, 448.0, 7.5
CODES_A_GROUP = 8
"""Eight codes of b bits are b bytes, whatever b is."""


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of a dense stream along the last dimension, lowest bits first.

    packed: [..., words] of any integer dtype, whose bytes are the stream. Returns uint8 [..., count].
    """
    # Little-endian, as the machine is: the bytes of the words in their order are the stream.
    data = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return data[..., :count]
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return (data[..., None] >> shifts & (1 << bits) - 1).flatten(-2)[..., :count]
    groups = -(-count // CODES_A_GROUP)
    missing = groups * bits - data.shape[-1]
    if missing > 0:  # codes of the last group that are not stored
        data = torch.nn.functional.pad(data, (0, missing))
    # [..., groups, bits] bytes -> one number of at most 56 bits for each group
    grouped = data[..., : groups * bits].unflatten(-1, (groups, bits)).long()
    numbers = (grouped << torch.arange(0, 8 * bits, 8)).sum(-1)
    codes = numbers[..., None] >> torch.arange(0, CODES_A_GROUP * bits, bits) & (1 << bits) - 1
    return codes.flatten(-2)[..., :count].to(torch.uint8)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """The inverse of unpack_bits: uint8 [..., count] -> int32 [..., ceil(count * bits / 32)], filled up with zeros."""
    count = codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, -count % 32))
    if bits == 8:
        data = codes
    else:
        grouped = codes.unflatten(-1, (-1, CODES_A_GROUP)).long()
        numbers = (grouped << torch.arange(0, CODES_A_GROUP * bits, bits)).sum(-1)
        data = (numbers[..., None] >> torch.arange(0, 8 * bits, 8) & 255).flatten(-2).to(torch.uint8)
    return data.contiguous().view(torch.int32)[..., : -(-count * bits // 32)].contiguous()


def unpack_words(packed: Tensor, bits: int, count: int) -> Tensor:
    """The same as unpack_bits for words of 32 bits that each hold as many whole codes as fit."""
    per_word = 32 // bits
    shifts = torch.arange(0, per_word * bits, bits, dtype=torch.int32)
    codes = packed[..., None] >> shifts & (1 << bits) - 1
    return codes.flatten(-2)[..., :count].to(torch.uint8)


def decode_e2m1(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 or int8 [..., n], the first number of a byte in its low half -> [..., 2n]."""
    signed = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=dtype)
    byte = torch.arange(256)
    both = torch.stack((signed[byte % 16], signed[byte // 16]), -1)  # [256, 2]
    # int: an index of uint8 would be read as a mask.
    return both[packed.view(torch.uint8).int()].flatten(-2)


def encode_e2m1(values: Tensor) -> Tensor:
    """[..., 2n] in fp32 -> uint8 [..., n], rounded to the nearest number, a tie to the even code."""
    codes = _e2m1_magnitudes(values) | values.signbit().to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4


def round_e2m1(values: Tensor) -> Tensor:
    """The nearest numbers of E2M1, a tie to the even code, as `encode_e2m1` rounds; in fp32."""
    magnitudes = torch.tensor(MAGNITUDES, device=values.device)[_e2m1_magnitudes(values).int()]
    return magnitudes.copysign(values)


def _e2m1_magnitudes(values: Tensor) -> Tensor:
    """The three low bits of codes, uint8."""
    # Midpoints of neighbours. A tie is at an even code's upper edge or an odd code's lower one: right=False keeps the
    # lower code at an equal value, so that ties above odd codes are moved up by hand.
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    size = values.abs().contiguous()
    codes = torch.bucketize(size, middle)
    upwards = (codes % 2 == 1) & (size == middle[codes.clamp(max=6)])
    return (codes + upwards).to(torch.uint8)


def decode_e2m3(packed: Tensor, count: int) -> Tensor:
    """uint8 [..., 3 count / 4], a dense stream of six bits -> [..., count] in fp32."""
    codes = unpack_bits(packed, 6, count).int()
    small = [m / 8 for m in range(8)]
    table = torch.tensor([*small, *((1 + m / 8) * 2.0**e for e in range(3) for m in range(8))])
    return torch.where(codes & 32 != 0, -table[codes & 31], table[codes & 31])


def decode_e8m0(exponents: Tensor) -> Tensor:
    """uint8 or float8_e8m0fnu -> 2^(e - 127) in fp32; 255 is NaN."""
    # The dtype converts 255 to NaN, which 2.0 ** (e - 127) would not.
    return exponents.view(torch.float8_e8m0fnu).float()


_E4M3_TO_BF16 = 2.0**120
"""What bits of e4m3 in the places of bf16's exponent and fraction are too small by: biases 7 and 127."""
_SIGN_AND_E4M3 = -0x7801
_CHUNK = 1 << 15
"""Elements whose intermediate values stay in a core's cache, and so few that torch starts no threads for them."""


def multiply_e4m3(out: Tensor, stored: Tensor, scales: Tensor, size: int) -> bool:
    """out [rows, columns] = stored (e4m3) times scales [rows, groups of `size` columns], in fp32 and rounded once.

    Three times as fast as torch's conversion of e4m3, and bit for bit the same. False, and nothing is written that
    counts, where it does not serve: for groups that do not divide the columns, scales of 128 and above and NaN.
    """
    rows, columns = out.shape
    if columns % size or not bool((scales.abs() < 128.0).all()) or _has_nan(stored):
        return False
    factors = (scales * _E4M3_TO_BF16)[:, :, None]
    step = max(1, _CHUNK // columns)
    # One memory for all chunks: fresh memory costs more than the arithmetic.
    bits = torch.empty(step, columns, dtype=torch.int16)
    products = torch.empty(step, columns)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        count = part.stop - first
        chunk, product = bits[:count], products[:count]
        # Widening an int8 repeats the sign. Times 16 and masked, s eeee fff is s 0000 eeee fff 0000 in bf16.
        chunk.copy_(stored[part].view(torch.int8)).mul_(16).bitwise_and_(_SIGN_AND_E4M3)
        groups = product.unflatten(1, (-1, size))
        torch.mul(chunk.view(torch.bfloat16).unflatten(1, (-1, size)), factors[part], out=groups)
        out[part] = product
    return True


def _has_nan(stored: Tensor) -> bool:
    """NaN is 0x7f, the largest int8, and 0xff, the largest uint8."""
    return int(stored.view(torch.int8).amax()) == 0x7F or int(stored.view(torch.uint8).amax()) == 0xFF


def multiply_groups_(values: Tensor, scales: Tensor, size: int) -> Tensor:
    """values [rows, columns] times scales [rows, groups], in place; a group is `size` columns, the last maybe fewer."""
    whole = values.shape[1] // size * size
    if whole:
        values[:, :whole].unflatten(1, (-1, size)).mul_(scales[:, : whole // size, None])
    if whole < values.shape[1]:
        values[:, whole:].mul_(scales[:, -1:])
    return values
