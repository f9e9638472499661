"""With numerics.batch_invariant tokens and log-probabilities are the same bits, whatever happens around a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.ckpt.convert_cases import MODELS
from tests.covering import EXHAUSTIVE, covering
from tests.infer.engines import OPTIONS, configuration, engine_of, logprobs_of, prompts, run, tokens_of

from mt_core.errors import ConfigError
from mt_core.nn import batch_invariance
from mt_core.nn.batch_invariance import batch_invariant
from mt_core.testing import run_ranks
from mt_infer.engine import InferenceEngine
from mt_infer.requests import TokenEvent
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

pytestmark = pytest.mark.slow
DECODERS = [name for name in MODELS if name not in ("bert", "t5", "bart", "vision", "llava")]
TEXTS = prompts(37, 5, 18)
SAMPLING = [
    SamplingParameters(temperature=1.0, seed=number, max_tokens=4, logprobs=0, prompt_logprobs=0) for number in range(3)
]
ODD = ("gpt2", "bloom", "gemma2", "qwen_moe", "deepseek", "hybrid", "qwen_next")
"""One of each kind of cache and position."""
SHORT = ("gpt2", "llama", "qwen2", "mixtral", "gemma3", "deepseek", "hybrid")
"""Of families with biases and without, experts, windows, latent attention, recurrent states."""
DTYPES = ("fp32", "bf16")
CASES = [
    *covering(ODD, DTYPES),
    *(pytest.param(name, dtype, marks=EXHAUSTIVE) for name in DECODERS if name not in ODD for dtype in DTYPES),
]
UNSHARED = {"batch_invariant": True, "prefix_caching": False}


def engine(model: str, dtype: str = "fp32", longest: int = 64, **options: object) -> InferenceEngine:
    return engine_of(configuration(model, inference=options, precision={"dtype": dtype}), longest=longest)


def outcome(events: Sequence[TokenEvent]) -> tuple[list[int], list[float], list[float]]:
    prompt = next(event.prompt_logprobs for event in events if event.prompt_logprobs)
    return tokens_of(events), logprobs_of(events), [one.token for one in prompt[1:] if one is not None]


def trained(model: torch.nn.Module, text: Sequence[int]) -> list[float]:
    """What training's forward pass and loss give for each token but the first."""
    tokens = torch.tensor([text])
    with torch.no_grad(), batch_invariant():
        logits = model(tokens)[:, :-1]
        return (-F.cross_entropy(logits.float().flatten(0, 1), tokens[0, 1:], reduction="none")).tolist()


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_way_gives_the_same_bits(name, dtype) -> None:
    """In one step or in chunks, alone or in a batch, and as training computes it."""
    whole = engine(name, dtype, **UNSHARED, max_tokens_per_step=512)
    alone = [outcome(run(whole, [text], [own])[0]) for text, own in zip(TEXTS, SAMPLING, strict=True)]
    chunked = engine(name, dtype, **UNSHARED, max_tokens_per_step=11)
    assert [outcome(events) for events in run(chunked, TEXTS, SAMPLING)] == alone
    assert chunked.manager.used_blocks == 0
    for text, (tokens, logprobs, prompt) in zip(TEXTS, alone, strict=True):
        assert trained(whole.model.eval(), [*text, *tokens]) == [*prompt, *logprobs]


@pytest.mark.parametrize("width", [32, 768])
def test_gpt2_from_a_hugging_face_folder_has_the_bits_of_training(width: int, tmp_path: Path) -> None:
    """Its files keep the matrices transposed. 768: the width of GPT-2 itself. 2 s."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    keys = {"n_layer": 2 if width == 32 else 1, "n_head": 4, "n_embd": width, "vocab_size": 96, "n_positions": 64}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**keys, **special)).save_pretrained(tmp_path)
    settings = {"inference": {**OPTIONS, "max_tokens_per_step": 11}, "numerics": {"batch_invariant": True}}
    generator = TextGenerator.load(tmp_path, device="cpu", settings=settings)
    together = [one for (one,) in generator.generate(TEXTS, [replace(own, ignore_eod=True) for own in SAMPLING])]
    for text, done in zip(TEXTS, together, strict=True):
        own = [one.token for one in (*(done.prompt_logprobs or ())[1:], *done.logprobs) if one is not None]
        assert len(done.tokens) == 4
        assert trained(generator.model, [*text, *done.tokens]) == own


@pytest.mark.parametrize("name", SHORT)
def test_short_first_prompts_give_the_bits_of_training(name) -> None:
    """Of three tokens, and nothing was computed before: attention then sees blocks that are mostly zeros."""
    batch_invariance._mode.cache_clear()
    served = engine(name, **UNSHARED)
    texts = prompts(3, 3, 37)
    for text, own in zip(texts, SAMPLING, strict=True):
        tokens, logprobs, prompt = outcome(run(served, [text], [own])[0])
        assert trained(served.model, [*text, *tokens]) == [*prompt, *logprobs]


def test_a_verdict_does_not_depend_on_the_factor_that_asks_for_it(monkeypatch) -> None:
    """What is tried has the shape, order in memory and dtype of a product's factor, and no zeros of it."""
    tried = []
    monkeypatch.setattr(batch_invariance, "_is_invariant", lambda b: tried.append(b) or True)
    with torch.no_grad(), batch_invariance._BatchInvariance():
        torch.mm(torch.ones(3, 48), torch.zeros(64, 48).t())
        torch.bmm(torch.ones(4, 3, 64), torch.zeros(4, 64, 9))
        torch.mm(torch.ones(3, 16), torch.zeros(16, 1).expand(16, 8))
    assert [tuple(b.shape) for b in tried] == [(1, 48, 64), (1, 64, 9), (1, 16, 8)]
    assert tried[0].stride()[1:] == (1, 48)
    assert all(len(b.unique()) == b.numel() for b in tried)


def test_a_machine_that_cannot_is_found_before_the_first_request(monkeypatch) -> None:
    batch_invariance._mode.cache_clear()
    monkeypatch.setattr(batch_invariance, "_is_invariant", lambda b: b.shape[1] != 48)
    try:
        with pytest.raises(ConfigError, match=r"numerics.batch_invariant=true: .* a matrix of \[48, 32\] in float32"):
            engine("llama", **UNSHARED)
    finally:
        batch_invariance._mode.cache_clear()


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "hybrid", "deepseek"])
def test_prefixes_and_preemption_change_nothing(name) -> None:
    """Prompts that begin alike, in a cache that holds little more than one sequence."""
    start = prompts(11)[0]
    texts = [[*start, *text] for text in prompts(9, 14, 3)]
    sampling = [SamplingParameters(temperature=0.7, seed=number, max_tokens=8, logprobs=0) for number in range(3)]
    roomy = engine(name, longest=36, batch_invariant=True, prefix_caching=False)
    expected = [(tokens_of(events), logprobs_of(events)) for events in run(roomy, texts, sampling)]
    tight = engine(name, longest=36, batch_invariant=True, cache_memory_gb=least_memory(roomy) * 1.02)
    run(tight, texts[:1], sampling[:1])
    found = [(tokens_of(events), logprobs_of(events)) for events in run(tight, texts, sampling)]
    assert found == expected
    assert tight.scheduler.preemptions
    assert tight.manager.used_blocks == 0


def least_memory(engine: InferenceEngine) -> float:
    """GiB that hold one sequence of the longest length, and the states of all."""
    layout, limits = engine.manager.layout, engine.manager.limits
    per_position = sum(group.bytes_per_position for group in layout.groups)
    positions = limits.max_model_len + limits.block_size
    return (positions * per_position + limits.slots * layout.bytes_per_sequence) / 2**30


def reduced(rank: int, world_size: int) -> list[torch.Tensor]:
    """Sum and maximum over ranks of values whose sum depends on the order."""
    values = [torch.tensor([1e8, 1.0, -1e8][(rank + shift) % world_size]) for shift in range(world_size)]
    total, largest = torch.stack(values), torch.stack(values)
    with batch_invariant():
        dist.all_reduce(total)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [total, largest]


def test_sums_over_ranks_are_in_their_order() -> None:
    """1e8 + 1 - 1e8 is 0 in fp32, 1 - 1e8 + 1e8 as well, and -1e8 + 1e8 + 1 is 1."""
    for total, largest in run_ranks(3, reduced):
        assert total.tolist() == [0.0, 0.0, 1.0]
        assert largest.tolist() == [1e8] * 3
