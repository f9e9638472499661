"""Packers of quantized weights, number by number in plain Python and numpy: (stored tensors, the values)."""

from __future__ import annotations

import json

import numpy as np
import torch
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes one after another, lowest bits first, as int32 words."""
    number = 0
    for place, code in enumerate(codes.tolist()):
        number |= int(code) << place * bits
    words = -(-len(codes) * bits // 32)
    return np.frombuffer(number.to_bytes(4 * words, "little"), dtype="<i4")


def rows_of_words(codes: np.ndarray, bits: int) -> Tensor:
    return torch.from_numpy(np.stack([stream(row, bits) for row in codes]).copy())


def e2m1_bytes(codes: np.ndarray) -> Tensor:
    return torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))


def e2m1_value(code: int) -> float:
    return (-1.0 if code & 8 else 1.0) * E2M1[code & 7]


# -- DeepSeek-V3 -------------------------------------------------------------------------------------------


def fp8_blocks(out: int, inputs: int, block: tuple[int, int], *, exponents: torch.dtype | None = None) -> Packed:
    numbers = torch.randn(out, inputs, generator=torch.Generator().manual_seed(out)).to(torch.float8_e4m3fn)
    grid = (-(-out // block[0]), -(-inputs // block[1]))
    draw = generator(inputs).uniform(0.5, 2.0, grid).astype(np.float32)
    bytes_ = generator(out).integers(110, 130, grid).astype(np.uint8)
    scale = draw if exponents is None else np.ldexp(np.float32(1), bytes_.astype(int) - 127)
    values = torch.empty(out, inputs)
    for r in range(out):
        for c in range(inputs):
            values[r, c] = float(numbers[r, c]) * float(scale[r // block[0], c // block[1]])
    stored = torch.from_numpy(draw) if exponents is None else torch.from_numpy(bytes_).view(exponents)
    return {"weight": numbers, "weight_scale_inv": stored}, values.to(torch.bfloat16)


# -- GPTQ and AWQ, [in, out] ----------------------------------------------------------------------------------


def gptq(out: int, inputs: int, bits: int, group: int, *, version: int, ordered: bool) -> Packed:
    """ordered: inputs in the order of their groups; else each has a group of its own choice."""
    rng = generator(bits)
    codes = rng.integers(0, 1 << bits, (inputs, out))
    groups = inputs // group
    zeros = rng.integers(1, 1 << bits, (groups, out))
    scales = rng.uniform(0.01, 0.1, (groups, out)).astype(np.float16)
    index = np.arange(inputs) // group if ordered else rng.permutation(np.arange(inputs) // group)
    values = np.empty((out, inputs), np.float16)
    for i in range(inputs):
        for o in range(out):
            values[o, i] = np.float16(int(codes[i, o]) - int(zeros[index[i], o])) * scales[index[i], o]
    stored = {
        "qweight": rows_of_words(codes.T, bits).T.contiguous(),
        "qzeros": rows_of_words(zeros - (version == 1), bits),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    return stored, torch.from_numpy(values)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_words(codes: np.ndarray) -> Tensor:
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for column in range(words.shape[1]):
        for nibble, offset in enumerate(AWQ_ORDER):
            words[:, column] |= codes[:, 8 * column + offset].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))


def awq(out: int, inputs: int, group: int) -> Packed:
    rng = generator(out)
    codes, zeros = rng.integers(0, 16, (inputs, out)), rng.integers(0, 16, (inputs // group, out))
    scales = rng.uniform(0.01, 0.1, (inputs // group, out)).astype(np.float16)
    values = np.empty((out, inputs), np.float16)
    for i in range(inputs):
        values[:, i] = (codes[i] - zeros[i // group]).astype(np.float16) * scales[i // group]
    stored = {"qweight": awq_words(codes), "qzeros": awq_words(zeros), "scales": torch.from_numpy(scales)}
    return stored, torch.from_numpy(values)


# -- compressed-tensors ------------------------------------------------------------------------------------------


def pack_quantized(
    out: int, inputs: int, bits: int, group: int, *, zeros: bool, in_words: bool = False, order: bool = False
) -> Packed:
    """in_words: no code crosses a word, as earlier versions packed. order: columns have groups in any order."""
    rng = generator(bits + group)
    half = 1 << bits - 1
    codes = rng.integers(-half, half, (out, inputs))
    points = rng.integers(-half, half, (out, inputs // group)) if zeros else np.zeros((out, inputs // group), int)
    scale = torch.from_numpy(rng.uniform(0.01, 0.1, points.shape).astype(np.float32)).to(torch.bfloat16)
    index = rng.permutation(np.arange(inputs) // group) if order else np.arange(inputs) // group
    values = torch.empty(out, inputs, dtype=torch.bfloat16)
    for r in range(out):
        for c in range(inputs):
            values[r, c] = (
                torch.tensor(int(codes[r, c] - points[r, index[c]]), dtype=torch.bfloat16) * scale[r, index[c]]
            )
    packed = words_without_crossing(codes + half, bits) if in_words else rows_of_words(codes + half, bits)
    stored = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([out, inputs])}
    if zeros:
        stored["weight_zero_point"] = rows_of_words((points + half).T, bits).T.contiguous()
    if order:
        stored["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
    return stored, values


def words_without_crossing(codes: np.ndarray, bits: int) -> Tensor:
    per_word = 32 // bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), np.uint32)
    for column in range(codes.shape[1]):
        words[:, column // per_word] |= codes[:, column].astype(np.uint32) << np.uint32(bits * (column % per_word))
    return torch.from_numpy(words.view(np.int32))


def nvfp4(out: int, inputs: int, *, inverse: bool) -> Packed:
    """inverse: as compressed-tensors has the global scale, else as ModelOpt has the second one."""
    rng = generator(inputs)
    codes = rng.integers(0, 16, (out, inputs))
    scale = torch.from_numpy(rng.uniform(1.0, 400.0, (out, inputs // 16)).astype(np.float32)).to(torch.float8_e4m3fn)
    whole = torch.tensor([3000.0]) if inverse else torch.tensor(1 / 3000.0)
    values = torch.empty(out, inputs)
    for r in range(out):
        for c in range(inputs):
            factor = scale[r, c // 16].float()
            values[r, c] = e2m1_value(int(codes[r, c])) * (factor / whole[0] if inverse else factor * whole)
    names = ("weight_packed", "weight_global_scale") if inverse else ("weight", "weight_scale_2")
    return {names[0]: e2m1_bytes(codes), "weight_scale": scale, names[1]: whole}, values.to(torch.bfloat16)


# -- bitsandbytes ---------------------------------------------------------------------------------------------------


def nested_nf4(out: int, inputs: int) -> Packed:
    rng = generator(7)
    count = out * inputs
    codes, table = rng.integers(0, 16, count), np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    blocks = -(-count // 64)
    quantized, nested_table = rng.integers(0, 256, blocks), np.sort(rng.uniform(0, 1, 256)).astype(np.float32)
    nested = rng.uniform(0.1, 0.2, -(-blocks // 256)).astype(np.float32)
    values = np.empty(count, np.float32)
    for i, code in enumerate(codes):
        block = i // 64
        largest = np.float32(nested_table[quantized[block]] * nested[block // 256]) + np.float32(0.5)
        values[i] = table[code] * np.float32(largest)
    packed = np.append(codes, [0] * (count % 2)).reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out, inputs]}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
    stored = {
        "weight": torch.from_numpy((packed[:, 0] << 4 | packed[:, 1]).astype(np.uint8))[:, None],
        "weight.absmax": torch.from_numpy(quantized.astype(np.uint8)),
        "weight.quant_map": torch.from_numpy(table),
        "weight.nested_absmax": torch.from_numpy(nested),
        "weight.nested_quant_map": torch.from_numpy(nested_table),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return stored, torch.from_numpy(values).reshape(out, inputs).to(torch.bfloat16)


# -- MLX --------------------------------------------------------------------------------------------------------------


def mlx_affine(out: int, inputs: int, bits: int, group: int) -> Packed:
    rng = generator(bits)
    codes = rng.integers(0, 1 << bits, (out, inputs))
    scale, bias = (rng.uniform(-0.1, 0.1, (out, inputs // group)).astype(np.float16) for _ in range(2))
    values = np.empty((out, inputs), np.float16)
    for c in range(inputs):
        values[:, c] = codes[:, c].astype(np.float16) * scale[:, c // group] + bias[:, c // group]
    packed = rows_of_words(codes, bits).view(torch.uint32)
    return {"weight": packed, "scales": torch.from_numpy(scale), "biases": torch.from_numpy(bias)}, torch.from_numpy(
        values
    )
