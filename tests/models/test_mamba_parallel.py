"""Mamba and hybrids sharded over tensor- and context-parallel ranks against the same models in one process."""

from __future__ import annotations

import pytest
import torch
from tests.dist.in_turn import InTurn
from tests.models.decoder_reference import random_tokens
from tests.models.mamba_reference import build, configure, segments_of
from tests.models.plugin_host import host

from mt_core.errors import ConfigError
from mt_core.nn.context_parallel import shard_sequence, unshard_sequence
from mt_core.nn.embedding import gather_logits
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.collectives import all_reduce
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.testing import run_ranks
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine

pytestmark = pytest.mark.dist

VOCAB, LENGTH = 51, 16
COMMON = {
    "hidden_size": 32,
    "vocab_size": VOCAB,
    "mamba_head_dim": 8,
    "mamba_state_dim": 6,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 4,
}
MAMBA = {**COMMON, "family": "mamba", "num_layers": 2}
HYBRID = {
    **COMMON,
    "family": "hybrid",
    "hybrid_layer_pattern": "M-*M-",
    "num_attention_heads": 4,
    "num_query_groups": 2,
}
CASES = {
    "mamba": MAMBA,
    "mamba with biases": {**MAMBA, "mamba_proj_bias": True, "untie_embeddings_and_output_weights": False},
    "hybrid": {**HYBRID, "add_bias_linear": True},
}


def forward_backward(config, host, ctx: ParallelContext, segment_ids=None):
    """Logits of this rank's positions over the whole vocabulary, and the model with gradients summed as training
    would."""
    model = build(host, config, ctx)
    tokens = shard_sequence(random_tokens(VOCAB, LENGTH), 1, ctx.cp)
    segments = None if segment_ids is None else shard_sequence(segment_ids, 1, ctx.cp)
    logits = model(tokens, segment_ids=segments)
    weights = torch.randn(2, LENGTH, VOCAB, generator=torch.Generator().manual_seed(4))
    own = model.embedding.word_embeddings.range
    (logits * shard_sequence(weights, 1, ctx.cp)[..., own.start : own.stop]).sum().backward()
    layouts = parameter_layouts(model)
    for name, parameter in model.named_parameters():
        for axis in (*layouts[name].partial_gradient, "cp"):
            if ctx.axis(axis).size > 1:
                parameter.grad = all_reduce(parameter.grad, ctx.axis(axis))
    return gather_logits(logits.detach(), VOCAB, config.model.make_vocab_size_divisible_by, ctx), model


def compare(keys, ctx: ParallelContext, segment_ids=None) -> dict[str, float]:
    """Largest differences of logits and of this rank's slice of every gradient, in units of the largest value."""
    sharded = configure(host(), f"parallel.context_parallel_size={ctx.cp.size}", **keys)
    logits, model = forward_backward(sharded, host(), ctx, segment_ids)
    expected, whole = forward_backward(configure(host(), **keys), host(), ParallelContext(), segment_ids)
    found = {"logits": relative(unshard_sequence(logits, 1, ctx.cp), expected)}
    layouts, reference = parameter_layouts(model), dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = parameter_layouts(whole)[name].to_canonical(reference[name].grad)
        found[name] = relative(parameter.grad, layouts[name].to_local(gradient, ctx))
        # The way back: what the ranks hold is the whole parameter.
        assert torch.equal(layouts[name].to_canonical(parameter.detach(), ctx), whole_value(whole, name)), name
    return found


def whole_value(model: torch.nn.Module, name: str) -> torch.Tensor:
    return parameter_layouts(model)[name].to_canonical(dict(model.named_parameters())[name].detach())


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()


def differences(rank: int, world_size: int, layout: AxisSizes | bool) -> dict[str, float]:
    """layout: sizes with context parallelism, or whether the tensor-parallel ranks share the sequence."""
    return tensor_parallel(world_size, layout) if isinstance(layout, bool) else context_parallel(layout)


def tensor_parallel(world_size: int, sequence_parallel: bool) -> dict[str, float]:
    ctx = build_parallel_context(AxisSizes(tp=world_size), sequence_parallel=sequence_parallel)
    segments = segments_of(5, 1, 10)
    return {
        f"{case}, {kind}: {name}": difference
        for case, keys in CASES.items()
        for kind, ids in (("whole", None), ("packed", segments))
        for name, difference in compare(keys, ctx, ids).items()
    }


def refusals(rank: int, world_size: int) -> list[str]:
    ctx = build_parallel_context(AxisSizes(cp=world_size))
    sharded = "parallel.context_parallel_size=2"
    config = configure(host(), sharded, **MAMBA)
    messages = []
    with pytest.raises(ConfigError) as caught:
        InferenceEngine(build(host(), config, ctx), None, ctx, config.section(InferenceConfig), longest=8)
    messages.append(str(caught.value))
    for keys in ({**MAMBA, "data.seq_length": 18}, {**MAMBA, "mamba_num_heads": 3, "mamba_num_groups": 3}):
        length = keys.pop("data.seq_length", LENGTH)
        with pytest.raises(ConfigError) as caught:
            build(host(), configure(host(), sharded, f"data.seq_length={length}", **keys), ctx)
        messages.append(str(caught.value))
    return messages


def context_parallel(sizes: AxisSizes) -> dict[str, float]:
    ctx = build_parallel_context(sizes)
    cases = {
        "groups that divide": {**MAMBA, "mamba_num_groups": 4},
        "groups that are repeated": {**MAMBA, "mamba_num_groups": 3 * sizes.tp, "mamba_num_heads": 6 * sizes.tp},
        "hybrid": HYBRID,
    }
    return {
        f"{case}, {kind}: {name}": difference
        for case, keys in cases.items()
        for kind, ids in (("whole", None), ("packed", segments_of(5, 1, 10)))
        for name, difference in compare(keys, ctx, ids).items()
    }


def assert_equal_everywhere(results: list[dict[str, float]], at_least: int) -> None:
    for found in results:
        assert len(found) > at_least
        assert not {name: difference for name, difference in found.items() if difference > 2e-5}


CP2, TP2_CP2 = AxisSizes(cp=2), AxisSizes(cp=2, tp=2)
RUNS = InTurn(differences, [(2, False), (2, True), (2, CP2), (4, TP2_CP2)])


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_tensor_parallel_ranks_compute_what_one_does(sequence_parallel) -> None:
    assert_equal_everywhere(RUNS.of_ranks(2, sequence_parallel), 100)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [CP2, TP2_CP2], ids=["cp", "tp and cp"])
def test_two_context_parallel_ranks_compute_what_one_does(sizes) -> None:
    assert_equal_everywhere(RUNS.of_ranks(2 * sizes.tp, sizes), 60)


def test_what_context_parallelism_cannot_do_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for decoding, length, heads in run_ranks(2, refusals):
        assert "parallel.context_parallel_size=2 divides sequences, and the cache keeps whole ones" in decoding
        assert "data.seq_length=18 cannot be cut into the 2 x 2 equal chunks" in length
        assert "parallel.context_parallel_size=2 does not divide the Mamba heads of a tensor-parallel rank=3" in heads
