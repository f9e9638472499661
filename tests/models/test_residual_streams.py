"""Hyper-connections of GPT and hybrids against Megatron-Core's formula, written out stream by stream."""

from __future__ import annotations

import math

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models.mamba_reference import build as build_hybrid
from tests.models.mamba_reference import configure
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionPattern
from mt_core.nn.auxiliary import auxiliary_losses
from mt_core.nn.dropout import Dropout
from mt_core.nn.kernels.choice import Kernels, use_kernels
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.residual_streams import StreamConnection
from mt_models.gpt.flops import training_flops as gpt_flops
from mt_models.hybrid.config import training_flops as hybrid_flops

VOCAB, HIDDEN, STREAMS, ITERATIONS = 61, 16, 3, 4
# Norms behind sums of streams: with a small epsilon common factors of their weights would change nothing.
SHAPE = {
    "num_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "norm_epsilon": 0.1,
}
STREAM_KEYS = {
    "enable_mhc_connections": True,
    "mhc_num_residual_streams": STREAMS,
    "mhc_sinkhorn_iterations": ITERATIONS,
}
HYBRID = {
    "family": '"hybrid"',
    "hybrid_layer_pattern": '"M-*"',
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "ffn_hidden_size": 24,
    "mamba_head_dim": 8,
    "mamba_state_dim": 6,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 8,
    "vocab_size": VOCAB,
    "norm_epsilon": 0.1,
}


def connected(streams: list[Tensor], connection: nn.Module, block) -> list[Tensor]:
    """streams: n tensors [B, S, H]. What Megatron-Core computes around a block, each weight by itself."""
    n, vector = len(streams), torch.cat(streams, -1)
    rms = vector.square().sum(-1).sqrt() / math.sqrt(vector.shape[-1])
    weights, bias = connection.mapping_proj.weight, connection.bias
    alphas = [*[connection.alpha_pre] * n, *[connection.alpha_post] * n, *[connection.alpha_res] * n * n]
    z = [(vector @ weights[k]) / (rms + 1e-6) * alphas[k] + bias[k] for k in range(2 * n + n * n)]
    exponentials = [[z[2 * n + i * n + j].exp() for j in range(n)] for i in range(n)]
    matrix = [[cell / sum(row) + 1e-6 for cell in row] for row in exponentials]
    for step in range(ITERATIONS):
        if step > 0:
            matrix = [[cell / (sum(row) + 1e-6) for cell in row] for row in matrix]
        columns = [sum(matrix[i][j] for i in range(n)) + 1e-6 for j in range(n)]
        matrix = [[matrix[i][j] / columns[j] for j in range(n)] for i in range(n)]
    block_input = sum((z[i].sigmoid() + 1e-6)[..., None] * streams[i] for i in range(n))
    output = block(block_input)
    return [
        2 * z[n + j].sigmoid()[..., None] * output + sum(matrix[i][j][..., None] * streams[i] for i in range(n))
        for j in range(n)
    ]


def summed(streams: list[Tensor], head: nn.Module, epsilon: float) -> Tensor:
    vector = torch.cat(streams, -1)
    products = vector @ head.weight.T / (vector.square().mean(-1, keepdim=True) + epsilon).sqrt()
    weights = (products * head.scale + head.bias).sigmoid() + epsilon
    return sum(weights[..., i : i + 1] * stream for i, stream in enumerate(streams))


def logits_of(model: nn.Module, streams: list[Tensor], epsilon: float) -> Tensor:
    normed = model.decoder.final_layernorm(summed(streams, model.decoder.hyper_head, epsilon))
    output = model.output_layer or model.embedding.word_embeddings
    return normed @ output.weight[:VOCAB].T


def gpt_reference(model: nn.Module, tokens: Tensor) -> Tensor:
    return logits_of(model, gpt_streams(model, tokens), model.config.norm_epsilon)


def gpt_streams(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    positions = torch.arange(tokens.shape[1])[None]
    pattern, angles = AttentionPattern(), model.angles(positions, None)
    streams = [model.embedding(tokens, positions)] * STREAMS
    for number in model.decoder.layers.numbers():
        streams = through_gpt_layer(model.decoder.layers[number], streams, pattern, angles)
    return streams


def through_gpt_layer(layer: nn.Module, streams: list[Tensor], pattern, angles) -> list[Tensor]:
    attend = lambda x: layer.self_attention(layer.input_layernorm(x), pattern, angles, None)  # noqa: E731
    streams = connected(streams, layer.self_attention_hyper_connection, attend)
    return connected(streams, layer.mlp_hyper_connection, lambda x: layer.mlp(layer.pre_mlp_layernorm(x)))


def hybrid_reference(model: nn.Module, tokens: Tensor) -> Tensor:
    return logits_of(model, hybrid_streams(model, tokens), model.config.norm_epsilon)


def hybrid_streams(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    angles = model.angles(torch.arange(tokens.shape[1])[None], None)
    streams, pattern = [model.embedding(tokens, torch.arange(tokens.shape[1])[None])] * STREAMS, AttentionPattern()
    mamba, feed_forward, attention = (model.decoder.layers[number] for number in range(3))
    streams = connected(streams, mamba.hyper_connection, lambda x: mamba.mixer(mamba.norm(x), None, None))
    streams = connected(
        streams, feed_forward.hyper_connection, lambda x: feed_forward.mlp(feed_forward.pre_mlp_layernorm(x))
    )
    return connected(
        streams,
        attention.hyper_connection,
        lambda x: attention.self_attention(attention.input_layernorm(x), pattern, angles, None),
    )


def assert_same(model: nn.Module, reference) -> None:
    tokens = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
    gradients = []
    for function in (model, lambda tokens: reference(model, tokens)):
        model.zero_grad()
        logits = function(tokens)
        logits.square().mean().backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        if len(gradients) == 1:
            ours = logits
    torch.testing.assert_close(ours, logits, rtol=2e-5, atol=2e-5)
    for name, gradient in gradients[0].items():
        scale = gradients[1][name].abs().max()
        if scale < 1e-5:
            # The streams of the first block are equal, and those behind it alike, so that mixing them changes little.
            assert f"layers.{max(model.decoder.layers.numbers())}" not in name, name
            assert gradient.abs().max() < 1e-5, name
            continue
        torch.testing.assert_close(gradient / scale, gradients[1][name] / scale, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("keys", [{"max_position_embeddings": 16}, {"position_embedding_type": "rope"}])
def test_gpt_computes_the_formula(build, randomize, keys) -> None:
    model = build(**SHAPE, **STREAM_KEYS, **keys)
    randomize(model)
    assert_same(model, gpt_reference)


def test_a_hybrid_computes_the_formula(host, randomize) -> None:
    model = build_hybrid(host, configure(host, **HYBRID, **STREAM_KEYS)).eval()
    mixer = {name: value.clone() for name, value in model.decoder.layers[0].mixer.state_dict().items()}
    randomize(model)
    # Rates and time steps of Mamba keep the sizes that they start with.
    model.decoder.layers[0].mixer.load_state_dict(mixer)
    assert_same(model, hybrid_reference)


def predicted(model: nn.Module, depth: int, streams: list[Tensor], embedded: Tensor) -> list[Tensor]:
    """Streams of a depth of multi-token prediction, from those of the depth before and the embeddings that it reads."""
    of_depth = model.mtp.layers[depth]
    started = of_depth.enorm(embedded) @ of_depth.e_proj.weight.T
    return [started + of_depth.hnorm(stream) @ of_depth.h_proj.weight.T for stream in streams]


def prediction_losses(model: nn.Module, tokens: Tensor, labels: Tensor) -> list[Tensor]:
    """The loss of each depth of a gpt, over the positions whose target is within the sequence."""
    positions, pattern = torch.arange(tokens.shape[1])[None], AttentionPattern()
    angles = model.angles(positions, None)
    streams = gpt_streams(model, tokens)
    losses = []
    for depth in range(model.config.mtp_num_layers):
        ahead = nn.functional.pad(tokens[:, depth + 1 :], (0, depth + 1))
        streams = predicted(model, depth, streams, model.embedding(ahead, positions))
        streams = through_gpt_layer(model.mtp.layers[depth].mtp_model_layer, streams, pattern, angles)
        summed_up = summed(streams, model.mtp.layers[depth].hyper_head, model.config.norm_epsilon)
        output = model.output_layer or model.embedding.word_embeddings
        logits = model.mtp.layers[depth].final_layernorm(summed_up) @ output.weight[:VOCAB].T
        kept = slice(0, tokens.shape[1] - depth - 1)
        targets = labels[:, depth + 1 :]
        losses.append(nn.functional.cross_entropy(logits[:, kept].flatten(0, 1), targets.flatten()))
    return losses


@pytest.mark.parametrize("keys", [{"mtp_num_layers": 2}, {"untie_embeddings_and_output_weights": True}])
def test_depths_of_prediction_compute_the_formula(build, randomize, keys) -> None:
    """Losses and the gradients of all parameters. The second depth reads the streams of the first, not their sum."""
    keys = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5, "position_embedding_type": "rope", **keys}
    model = build(**SHAPE, **STREAM_KEYS, **keys).train()
    randomize(model)
    numbers = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(VOCAB, (2, 9), generator=numbers) for _ in range(2))
    losses = prediction_losses(model, tokens, labels)
    (0.5 / len(losses) * sum(losses)).backward()
    expected = gradients_of(model)
    model.zero_grad()
    by_name = {loss.name: loss for loss in auxiliary_losses(model)}
    for loss in by_name.values():
        loss.scale = 1.0
    (0.0 * model(tokens, labels=labels, loss_mask=torch.ones(2, 9)).sum()).backward()
    taken = [by_name[f"mtp_{number + 1}_loss"].take() for number in range(len(losses))]
    assert taken == pytest.approx([0.5 / len(losses) * float(loss) for loss in losses], rel=1e-4)
    ours = gradients_of(model)
    assert {name for name in ours if ".hyper_head." in name} >= {f"mtp.layers.0.hyper_head.{leaf}" for leaf in LEAVES}
    for name, gradient in expected.items():
        atol = 2e-3 * float(gradient.abs().max()) + 1e-6
        torch.testing.assert_close(ours[name], gradient, rtol=2e-3, atol=atol, msg=name)


LEAVES = ("weight", "bias", "scale")


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def test_a_hybrid_predicts_from_its_streams(host, randomize) -> None:
    keys = {"mtp_num_layers": 1, "mtp_hybrid_override_pattern": '"*-"', "position_embedding_type": '"rope"'}
    model = build_hybrid(host, configure(host, **HYBRID, **STREAM_KEYS, **keys)).train()
    mixer = {name: value.clone() for name, value in model.decoder.layers[0].mixer.state_dict().items()}
    randomize(model)
    model.decoder.layers[0].mixer.load_state_dict(mixer)
    tokens = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
    positions, pattern = torch.arange(7)[None], AttentionPattern()
    angles = model.angles(positions, None)
    ahead = nn.functional.pad(tokens[:, 1:], (0, 1))
    streams = predicted(model, 0, hybrid_streams(model, tokens), model.embedding(ahead, positions))
    attention, feed_forward = (model.mtp.layers[0].mtp_model_layer.layers[place] for place in range(2))
    attend = lambda x: attention.self_attention(attention.input_layernorm(x), pattern, angles, None)  # noqa: E731
    streams = connected(streams, attention.hyper_connection, attend)
    feed = lambda x: feed_forward.mlp(feed_forward.pre_mlp_layernorm(x))  # noqa: E731
    streams = connected(streams, feed_forward.hyper_connection, feed)
    logits = model.mtp.layers[0].final_layernorm(summed(streams, model.mtp.layers[0].hyper_head, 0.1))
    logits = logits @ (model.output_layer or model.embedding.word_embeddings).weight[:VOCAB].T
    (loss,) = (loss for loss in auxiliary_losses(model) if loss.name == "mtp_1_loss")
    loss.scale = 1.0
    (0.0 * model(tokens, labels=tokens, loss_mask=torch.ones(2, 7)).sum()).backward()
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.take() == pytest.approx(0.1 * float(expected), rel=1e-4)


def test_the_names_of_parameters_are_megatrons(build) -> None:
    names = {name for name, _ in build(**SHAPE, **STREAM_KEYS, max_position_embeddings=16).named_parameters()}
    for block in ("self_attention", "mlp"):
        stem = f"decoder.layers.1.{block}_hyper_connection"
        leaves = ("mapping_proj.weight", "bias", "alpha_pre", "alpha_post", "alpha_res")
        assert names >= {f"{stem}.{leaf}" for leaf in leaves}


def test_initial_values(build) -> None:
    model = build(**SHAPE, **STREAM_KEYS, mhc_init_gating_factor=0.25, max_position_embeddings=16)
    connection = model.decoder.layers[0].mlp_hyper_connection
    assert [getattr(connection, f"alpha_{part}").item() for part in ("pre", "post", "res")] == [0.25] * 3
    assert not connection.bias.any()
    # Xavier's uniform distribution has no number beyond its bound.
    bound = math.sqrt(6 / (STREAMS * HIDDEN + STREAMS * (2 + STREAMS)))
    largest = float(connection.mapping_proj.weight.detach().abs().max())
    assert 0.95 * bound < largest <= bound
    head = model.decoder.hyper_head
    assert float(head.weight.detach().abs().max()) <= math.sqrt(6 / (STREAMS * HIDDEN + STREAMS))
    assert (head.scale.item(), head.bias.abs().sum().item()) == (1.0, 0.0)


def test_decoding_with_a_cache_equals_the_forward_pass(build, randomize) -> None:
    model = build(**SHAPE, **STREAM_KEYS, max_position_embeddings=16)
    randomize(model)
    tokens = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(cached_logits(model, tokens, [5, *range(6, 13)]), model(tokens), rtol=1e-4, atol=1e-4)


def test_dropout_drops_what_a_stream_gets_of_a_block(build) -> None:
    connection = StreamConnection(build(**SHAPE, **STREAM_KEYS, max_position_embeddings=16).config, ParallelContext())
    nn.init.zeros_(connection.mapping_proj.weight)
    for parameter in (connection.alpha_pre, connection.alpha_post, connection.alpha_res, connection.bias):
        nn.init.zeros_(parameter)
    streams, output = torch.zeros(2, 50, STREAMS * HIDDEN), torch.ones(2, 50, HIDDEN)
    _, post, mixing = connection(streams)
    dropped = connection.mixed(output, post, mixing, streams, Dropout(0.25, ParallelContext()).train())
    # post = 2 sigmoid(0) = 1: an element is 0, or 1 / (1 - rate).
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert 0.2 < float((dropped == 0).float().mean()) < 0.3
    first, second = dropped.unflatten(-1, (STREAMS, -1)).unbind(-2)[:2]
    assert not torch.equal(first, second)
    kept = connection.mixed(output, post, mixing, streams, Dropout(0.25, ParallelContext()).eval())
    assert torch.equal(kept, torch.ones_like(kept))


def test_recomputing_connections_changes_no_gradient(build, randomize) -> None:
    gradients = []
    for overrides in ((), ("recompute.recompute_granularity=selective", 'recompute.recompute_modules=["mhc"]')):
        model = build(*overrides, **SHAPE, **STREAM_KEYS, max_position_embeddings=16)
        randomize(model)
        model(torch.arange(14)[None]).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"parallel_residual": True}, "model.parallel_residual=true cannot be combined"),
        ({"mup_base_hidden_size": 8}, "model.mup_base_hidden_size=8 cannot be combined"),
    ],
)
def test_what_has_one_stream_is_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(**SHAPE, **STREAM_KEYS, max_position_embeddings=16, **keys)


def test_streams_without_connections_are_refused(build) -> None:
    with pytest.raises(ConfigError, match="mhc_num_residual_streams"):
        build(**SHAPE, mhc_num_residual_streams=2, max_position_embeddings=16)
    with pytest.raises(ConfigError, match="recompute.recompute_modules has mhc"):
        build(
            "recompute.recompute_granularity=selective",
            'recompute.recompute_modules=["mhc"]',
            **SHAPE,
            max_position_embeddings=16,
        )


def test_a_kernel_with_another_norm_is_refused(build) -> None:
    model = build(**SHAPE, **STREAM_KEYS, max_position_embeddings=16)
    with pytest.raises(ConfigError, match="kernels.hyper_connection=triton cannot be used with model.enable_mhc"):
        use_kernels(model.modules(), Kernels({"hyper_connection": "triton"}, "cpu", "fp32"))


def test_flops_count_depths_on_streams(host) -> None:
    """Connections of the layers of the depth, its sum, and h_proj for the streams behind the first."""
    n, length = STREAMS, 16
    each = 2 * ((2 + n) * n * n * HIDDEN + (2 + n) * n * HIDDEN)
    depth = 2 * (n * n * HIDDEN + n * HIDDEN) + 2 * (n - 1) * HIDDEN * HIDDEN
    gpt = {"family": '"gpt"', **SHAPE, "position_embedding_type": '"rope"'}
    for flops, keys, further, connections in (
        (gpt_flops, gpt, {"mtp_num_layers": 2}, 4),
        (hybrid_flops, HYBRID, {"mtp_num_layers": 2, "mtp_hybrid_override_pattern": '"-"'}, 2),
    ):
        none, one, several, both = (
            flops(configure(host, **keys, **more)) for more in ({}, further, STREAM_KEYS, {**STREAM_KEYS, **further})
        )
        assert both - several - (one - none) == 3 * length * (connections * each + 2 * depth)


def test_flops_count_connections(host) -> None:
    n, length = STREAMS, 16
    each = 2 * ((2 + n) * n * n * HIDDEN + (2 + n) * n * HIDDEN)
    head = 2 * (n * n * HIDDEN + n * HIDDEN)
    gpt = {"family": '"gpt"', **SHAPE, "max_position_embeddings": 16}
    for flops, keys, connections in ((gpt_flops, gpt, 4), (hybrid_flops, HYBRID, 3)):
        one, several = (flops(configure(host, **keys, **further)) for further in ({}, STREAM_KEYS))
        assert several - one == 3 * length * (connections * each + head)
