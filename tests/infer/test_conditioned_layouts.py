"""Models that take more than tokens: in layouts of several ranks, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ckpt.convert_cases import (
    GEMMA4_VL_EXPERTS,
    KIMI_K25,
    MINIMAX_M3_VL,
    MISTRAL3,
    MODELS,
    QWEN3_OMNI,
    QWEN3_VL,
    QWEN_NEXT_VL,
    QWEN_VL,
)
from tests.covering import EXHAUSTIVE
from tests.dist.in_turn import InTurn
from tests.infer.engines import configuration, engine_of, logprobs_of, run, tokens_of
from torch import Tensor

from mt_core.errors import ConfigError
from mt_infer.lockstep import LockstepEngine
from mt_infer.sampling.parameters import SamplingParameters

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
SP = "sequence_parallel"
RETRO = {
    "family": "retro",
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "position_embedding_type": "rope",
    "retro_chunk_length": 4,
    "retro_cross_attention_layers": [2, 4],
}
CASES: dict[str, dict[str, Any]] = {"t5": MODELS["t5"], "llava": MODELS["llava"], "retro": RETRO, "qwen_vl": QWEN_VL}
CASES |= {"qwen3_vl": QWEN3_VL, "qwen_next_vl": QWEN_NEXT_VL, "gemma4_vl": GEMMA4_VL_EXPERTS, "mistral3": MISTRAL3}
CASES |= {"kimi_k25": KIMI_K25, "minimax_m3_vl": MINIMAX_M3_VL, "qwen3_omni": QWEN3_OMNI}
DATA = {"retro": {"dataset_type": "builtin_retro", "retro_chunk_length": 4, "seq_length": 16}}
GREEDY = SamplingParameters(temperature=0.0, max_tokens=7, logprobs=0)
Outputs = list[tuple[list[int], list[float]]]


def requests(name: str) -> tuple[list[list[int]], list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(4)
    if name == "t5":
        return [[0], [0, 7]], [{"encoder_tokens": torch.randint(1, 101, (1, n), generator=generator)} for n in (9, 4)]
    if name in OF_ANY_SIZE:
        images, grids = torch.randn(9, 3, 4, 4, generator=generator), torch.tensor([[2, 3], [1, 3]])
        inputs = [{"images": part, "image_grids": grids[i : i + 1]} for i, part in enumerate((images[:6], images[6:]))]
        return [[5, *[100] * 6, 9], [*[100] * 3, 7, 8]], inputs
    if name == "qwen3_omni":
        images, grids = torch.randn(6, 3, 4, 4, generator=generator), torch.tensor([[2, 3]])
        sound, lengths = 0.3 * torch.randn(5000, generator=generator), torch.tensor([3300, 1700])
        heard = {"audio": sound, "audio_lengths": lengths}
        texts = [[5, *[99] * 3, 9, *[100] * 6, *[99] * 2], [*[100] * 6, 7, 8]]
        return texts, [{**heard, "images": images, "image_grids": grids}, {"images": images, "image_grids": grids}]
    if name == "llava":
        images = torch.randn(2, 3, 8, 8, generator=generator)
        return [[5, *[100] * 4, 9], [*[100] * 4, 7, 8]], [{"images": images[:1]}, {"images": images[1:]}]
    tokens = torch.randint(1, 101, (2, 9), generator=generator).tolist()
    neighbors = torch.randint(1, 101, (2, 3, 2, 8), generator=generator)
    return tokens, [{"neighbor_tokens": neighbors[:1]}, {"neighbor_tokens": neighbors[1:, :2]}]


def built(name: str, parallel: dict[str, Any], *, collective: bool) -> Any:
    sections = {"data": DATA[name]} if name in DATA else {}
    config = configuration(CASES[name], parallel=parallel, **sections)
    return engine_of(config, collective=collective)


def generated(engine: Any, name: str) -> Outputs:
    texts, inputs = requests(name)
    return [(tokens_of(events), logprobs_of(events)) for events in run(engine, texts, GREEDY, inputs)]


def on_rank(rank: int, world: int, layout: tuple[str, str]) -> Outputs | None:
    name, parallel = layout[0], PARALLEL[layout[1]]
    engine = LockstepEngine(built(name, parallel, collective=True))
    if rank:
        return engine.follow()
    found = generated(engine, name)
    engine.close()
    return found


PARALLEL: dict[str, dict[str, Any]] = {
    "tp": {TP: 2},
    "tp-sp": {TP: 2, SP: True},
    "pp": {PP: 2},
    "pp-zbv": {PP: 2, "pipeline_schedule": "zbv_zero_bubble"},
    "tp-sp-pp": {PP: 2, TP: 2, SP: True},
}
OF_ANY_SIZE = ("qwen_vl", "qwen3_vl", "qwen_next_vl", "gemma4_vl", "mistral3", "kimi_k25", "minimax_m3_vl")
"""Families of images of any size: with tensor parallelism alone they are exhaustive, as sequences that are divided have
it too, and llava has both."""
UNDIVIDED = {(name, "tp") for name in OF_ANY_SIZE} | {("minimax_m3_vl", "tp-sp")}
# With what sound adds to qwen3_vl, whose layouts are run by default.
UNDIVIDED |= {("qwen3_omni", parallel) for parallel in ("tp", "tp-sp", "pp")}
LAYOUTS = [
    *((2, (name, parallel)) for name in CASES for parallel in ("tp", "tp-sp") if (name, parallel) not in UNDIVIDED),
    *((2, ("t5", parallel)) for parallel in ("pp", "pp-zbv")),
    (2, ("qwen_vl", "pp")),
    (2, ("qwen3_vl", "pp")),
    (2, ("qwen_next_vl", "pp")),
    (2, ("gemma4_vl", "pp")),
    (2, ("mistral3", "pp")),
    (2, ("kimi_k25", "pp")),
    (4, ("t5", "tp-sp-pp")),
]
RUNS = InTurn(on_rank, LAYOUTS, [(2, one) for one in sorted(UNDIVIDED)])


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout"),
    [*LAYOUTS, *(pytest.param(2, one, marks=EXHAUSTIVE) for one in sorted(UNDIVIDED))],
    ids=str,
)
def test_several_ranks_generate_what_one_does(world: int, layout: tuple[str, str]) -> None:
    expected = generated(built(layout[0], {}, collective=False), layout[0])
    for (tokens, logprobs), (theirs, their_logprobs) in zip(RUNS.result(world, layout), expected, strict=True):
        assert tokens == theirs
        assert logprobs == pytest.approx(their_logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "tokens", "inputs", "words"),
    [
        ("t5", [0], {}, r"needs encoder_tokens \[1, S\]"),
        ("t5", [0], {"encoder_tokens": torch.zeros(3)}, r"shape \[3\]; it has to be \[1, S\]"),
        ("t5", [0], {"images": torch.zeros(1)}, "takes no images beside tokens; it takes encoder_tokens"),
        ("llava", [5, 100], {}, "images: the text has 1 image tokens .id 100., and its images have 0 features"),
        ("llava", [5], {"images": torch.zeros(1, 3, 8, 8)}, "0 image tokens.*have 4 features"),
    ],
)
def test_requests_that_do_not_fit_are_refused(
    name: str, tokens: list[int], inputs: dict[str, Tensor], words: str
) -> None:
    engine = built(name, {}, collective=False)
    with pytest.raises(ConfigError, match=words):
        engine.add(tokens, GREEDY, inputs)
    assert engine.is_idle
