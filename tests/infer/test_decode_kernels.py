"""Kernels of decode steps in Triton's interpreter, against plain torch; and compiled for Hopper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.core.nn.kernels.interpreter import run_interpreted
from tests.infer.references import row_of

from mt_core.nn.cache import PagedScores
from mt_infer.cache.paged_attention import PageTable, plain_paged_attention
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.sampling.sampler import choose

pytestmark = pytest.mark.slow
PAGE, LENGTHS = 4, (1, 110, 67)
SCORES = PagedScores(0.3)
SLOPES, SINKS = torch.linspace(0.01, 0.3, 6), torch.linspace(-1.0, 2.0, 6)
ATTENTION = {
    "grouped": (2, (20,), 20, SCORES),
    "window": (2, (16,), 16, replace(SCORES, window=21)),
    "soft cap": (2, (16,), 16, replace(SCORES, softcap=2.0)),
    "slopes": (6, (16,), 16, replace(SCORES, slopes=SLOPES)),
    "sinks, window": (2, (16,), 16, replace(SCORES, sinks=SINKS, window=40)),
    "latents": (1, (40, 8), 40, SCORES),
    "values of another size": (1, (24,), 12, SCORES),
}


def paged_case(groups: int, dims: tuple[int, ...], width: int) -> tuple:
    """Sequences whose blocks are scattered. The values of latents are their first keys."""
    generator = torch.Generator().manual_seed(0)
    most = -(-max(LENGTHS) // PAGE)
    count = most * len(LENGTHS)
    blocks = torch.randperm(count, generator=generator).view(len(LENGTHS), most).int()
    queries = tuple(torch.randn(len(LENGTHS), 6, dim, generator=generator) for dim in dims)
    keys = tuple(torch.randn(count * PAGE, groups, dim, generator=generator) for dim in dims)
    values = keys[0] if len(dims) > 1 else torch.randn(count * PAGE, groups, width, generator=generator)
    return queries, keys, values, PageTable(blocks, torch.tensor(LENGTHS) - 1, PAGE)


def plain_attention(queries, keys, values, table: PageTable, scores: PagedScores) -> torch.Tensor:
    """Sequence by sequence, head by head, in fp64."""
    out = torch.zeros(*queries[0].shape[:2], values.shape[-1], dtype=torch.float64)
    share = queries[0].shape[1] // values.shape[1]
    for row, last in enumerate(table.positions.tolist()):
        first = 0 if scores.window is None else max(last + 1 - scores.window, 0)
        positions = range(first, last + 1)
        places = [int(table.blocks[row, p // PAGE]) * PAGE + p % PAGE for p in positions]
        for head in range(out.shape[1]):
            logits = sum(
                k[places, head // share].double() @ q[row, head].double() for q, k in zip(queries, keys, strict=True)
            )
            logits = logits * scores.scale
            if scores.softcap is not None:
                logits = scores.softcap * torch.tanh(logits / scores.softcap)
            if scores.slopes is not None:
                logits = logits - scores.slopes[head].double() * torch.tensor([last - p for p in positions])
            if scores.sinks is not None:
                logits = torch.cat((logits, scores.sinks[head, None].double()))
            weights = logits.softmax(0)[: len(places)]
            out[row, head] = weights @ values[places, head // share].double()
    return out


def errors_of_attention(rank: int, world: int) -> dict[str, float]:
    from mt_infer.cache.triton_attention import triton_paged_attention

    found = {}
    for name, (groups, dims, width, scores) in ATTENTION.items():
        case = paged_case(groups, dims, width)
        expected = plain_attention(*case, scores)
        for function in (plain_paged_attention, triton_paged_attention):
            error = (function(*case, scores).double() - expected).abs().max()
            found[f"{name}, {function.__name__}"] = float(error)
    return found


def test_paged_attention_of_every_kind() -> None:
    (errors,) = run_interpreted(errors_of_attention)
    assert {name: error for name, error in errors.items() if not error < 2e-6} == {}
    assert len(errors) == 2 * len(ATTENTION)


# -- sampling -----------------------------------------------------------------------------------------

VOCAB = 9001
SAMPLING = [
    SamplingParameters(temperature=0.0),
    SamplingParameters(),
    SamplingParameters(temperature=0.6, top_k=7),
    SamplingParameters(top_p=0.8),
    SamplingParameters(temperature=2.0, top_p=0.3, top_p_decay=0.9, top_p_bound=0.1),
    SamplingParameters(min_p=0.1),
    SamplingParameters(temperature=1.3, top_k=100, top_p=0.9, min_p=0.02),
    SamplingParameters(top_k=9000),
    SamplingParameters(temperature=0.7, top_p=0.9999),
]


def sampled_both_ways(rank: int, world: int) -> tuple[list[int], list[int]]:
    from mt_infer.sampling.triton_sampler import triton_sample

    generator = torch.Generator().manual_seed(0)
    rows = [
        row_of(replace(sampling, seed=seed, max_tokens=99), [1, 2], [3] * seed)
        for seed in range(2)
        for sampling in SAMPLING
    ]
    logits = 3 * torch.randn(len(rows), VOCAB, generator=generator)
    logits[::2] = (2 * logits[::2]).round() / 2  # many are equal
    logits[5, 100:] = float("-inf")
    return triton_sample(logits, rows).tolist(), choose(logits, rows).tolist()


def test_tokens_of_the_fused_sampler_are_those_of_the_plain_one() -> None:
    ((found, expected),) = run_interpreted(sampled_both_ways)
    assert found == expected
    assert len(set(expected)) > len(expected) // 2


# -- compiled -----------------------------------------------------------------------------------------

PART = {
    **dict.fromkeys(("q", "k", "q_second", "k_second", "v"), "*bf16"), "blocks": "*i32", "positions": "*i64",
    **dict.fromkeys(("parts", "lse", "slopes", "sinks"), "*fp32"), "scale": "fp32", "softcap": "fp32", "out": "*bf16",
}  # fmt: skip
SHAPES = [(4, 128, 0, 128), (32, 128, 0, 128), (8, 192, 0, 128), (32, 256, 0, 256)]
LATENTS = [(16, 512, 64, 512), (32, 512, 64, 512), (128, 512, 64, 512)]
"""(heads of a group, channels of a key, of its second part, of a value); DeepSeek-V3 has 128 heads on one latent."""
COMBINE = {"SINKS": True, "VALUE": 128, "SPLITS": 32, "BLOCK": 128}
SAMPLER = {"logits": "*fp32", "parameters": "*fp64", "tokens": "*i64"}


def part_of(shape: tuple[int, int, int, int], *, window: bool, softcap: bool) -> tuple[dict[str, Any], int]:
    """Constants of the kernel as it is launched for this shape, and warps."""
    from mt_infer.cache.triton_attention import channels, tile_of

    per_group, dim, second, value = shape
    tile = tile_of(per_group, dim, value)
    constants = {
        "PER_GROUP": per_group, "DIM": dim, "SECOND": second, "VALUE": value, "WINDOW": window, "SOFTCAP": softcap,
        "SLOPES": False, "slopes": None, "VALUES_ARE_KEYS": second > 0, "PAGE": 16, "SPLITS": 32, "HEADS": tile.heads,
        "KEYS": tile.keys, "BLOCK_DIM": channels(dim), "BLOCK_SECOND": channels(second), "BLOCK_VALUE": channels(value),
    }  # fmt: skip
    return constants, tile.warps


@pytest.mark.long
@pytest.mark.parametrize("shape", [*SHAPES, *LATENTS])
def test_paged_attention_compiles_for_hopper_without_spills(shape, tmp_path, monkeypatch) -> None:
    pytest.importorskip("triton")
    from tests.core.nn.kernels.cubin import bytes_of_stack
    from tests.core.nn.kernels.test_compilation import compile_for_hopper

    from mt_infer.cache.triton_attention import STAGES

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants, warps = part_of(shape, window=shape in SHAPES, softcap=shape in SHAPES)
    module = "mt_infer.cache.triton_attention"
    assembly = compile_for_hopper(module, "_paged_attention_part", PART, constants, warps, STAGES)
    assert bytes_of_stack(assembly["cubin"], tmp_path) == 0


COMPILED = [
    ("cache.triton_attention", "_paged_attention_combine", PART, COMBINE, 4),
    ("sampling.triton_sampler", "_sample_rows", SAMPLER, {"BLOCK": 8192}, 32),
]


def test_kernels_compile_for_hopper_without_spills(tmp_path, monkeypatch) -> None:
    pytest.importorskip("triton")
    from tests.core.nn.kernels.cubin import bytes_of_stack
    from tests.core.nn.kernels.test_compilation import compile_for_hopper

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for module, *case in COMPILED:
        assembly = compile_for_hopper(f"mt_infer.{module}", *case)
        assert bytes_of_stack(assembly["cubin"], tmp_path) == 0, case
