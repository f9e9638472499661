"""Decoders sharded over two tensor-parallel ranks against the same decoders in one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests.dist.in_turn import InTurn
from tests.models.decoder_reference import load, random_tokens
from tests.models.plugin_host import host

from mt_core.config.schema import Config
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.embedding import gather_logits
from mt_core.nn.layout import initialize, parameter_layouts
from mt_core.parallel.collectives import all_reduce
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.specs import MODELS

pytestmark = pytest.mark.dist

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 51}
CASES = {
    "gpt": {"max_position_embeddings": 16},
    "gpt, ALiBi": {"position_embedding_type": "alibi", "embedding_layernorm": True, "parallel_residual": True},
    "llama": {"num_query_groups": 2, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_query_groups": 2, "sliding_window": 4},
    "qwen": {"num_query_groups": 2, "kv_channels": 16},
    "gemma": {"num_query_groups": 2, "sliding_window": 4, "sliding_window_pattern": 2},
    # Fewer groups than ranks: each holds a copy of the group.
    "llama, one group": {"num_query_groups": 1},
    "hybrid, one group": {
        "hybrid_layer_pattern": "M*-*",
        "num_layers": None,  # of the pattern
        "num_query_groups": 1,
        "mamba_head_dim": 8,
        "mamba_state_dim": 6,
        "mamba_num_groups": 2,
        "mamba_chunk_size": 8,
    },
}


def forward_backward(config, host, ctx: ParallelContext):
    """Logits over the whole vocabulary, and the model with gradients as the data-parallel step would see them."""
    model = host[MODELS].get(config.model.family).build.load()(config.model, ModelBuildContext(config, ctx, host))
    initialize(model, 1, ctx)
    logits = model(random_tokens(SHAPE["vocab_size"], 16))
    weights = torch.randn(2, 16, SHAPE["vocab_size"], generator=torch.Generator().manual_seed(4))
    own = model.embedding.word_embeddings.range
    (logits * weights[..., own.start : own.stop]).sum().backward()
    layouts = parameter_layouts(model)
    for name, parameter in model.named_parameters():
        for axis in layouts[name].partial_gradient:
            parameter.grad = all_reduce(parameter.grad, ctx.axis(axis))
    multiple = config.model.make_vocab_size_divisible_by
    return gather_logits(logits.detach(), SHAPE["vocab_size"], multiple, ctx), model


@cache
def config_of(case: str) -> Config:
    values = {key: x for key, x in {**SHAPE, **CASES[case]}.items() if x is not None}.items()
    settings = [f"model.{key}={str(x).lower() if isinstance(x, bool) else x}" for key, x in values]
    return load(host(), f"model.family={case.split(',')[0]}", "data.seq_length=16", *settings)


@cache
def in_one_process(case: str):
    return forward_backward(config_of(case), host(), ParallelContext())


def differences(rank: int, world_size: int, sequence_parallel: bool) -> dict[str, float]:
    """Of logits and of this rank's slice of every gradient, in units of the largest value."""
    sharded = build_parallel_context(AxisSizes(tp=world_size), sequence_parallel=sequence_parallel)
    found = {}
    for case in CASES:
        logits, model = forward_backward(config_of(case), host(), sharded)
        expected, whole = in_one_process(case)
        found[f"{case}: logits"] = relative(logits, expected)
        layouts, reference = parameter_layouts(model), dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            gradient = layouts[name].to_local(
                parameter_layouts(whole)[name].to_canonical(reference[name].grad), sharded
            )
            found[f"{case}: {name}"] = relative(parameter.grad, gradient)
    return found


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()


RUNS = InTurn(differences, [(2, sequence_parallel) for sequence_parallel in (False, True)])


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_compute_the_logits_and_gradients_of_one(sequence_parallel) -> None:
    for found in RUNS.of_ranks(2, sequence_parallel):
        assert len(found) > 100
        wrong = {name: difference for name, difference in found.items() if difference > 2e-5}
        assert not wrong
