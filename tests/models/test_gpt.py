"""GPT against itself and against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from tests.infer.decoding import cached_logits

from mt_core.errors import ConfigError, PluginError
from mt_core.nn.layout import parameter_layouts
from mt_core.specs import MODELS
from mt_models.blocks.position_bias import alibi_slopes
from mt_models.blocks.rotary import RotaryAngles, inverse_frequencies, rotate

SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}
POSITIONS = {
    "learned": {"max_position_embeddings": 16},
    "rotary": {"position_embedding_type": "rope"},
    "rotary, part of the head, interleaved": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
    },
    "alibi": {"position_embedding_type": "alibi"},
    "none": {"position_embedding_type": "none"},
}
KINDS = {
    "GPT-2": {"max_position_embeddings": 16},
    "Llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
    },
    "multi-query": {"position_embedding_type": "alibi", "num_query_groups": 1, "activation": "squared_relu"},
    "untied, normalized queries": {
        "position_embedding_type": "rope",
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True,
        "activation": "geglu",
    },
}


def tokens(length: int = 12) -> torch.Tensor:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_decoding_with_a_cache_equals_the_full_forward(build, randomize, positions, backend) -> None:
    model = build(**SMALL, **POSITIONS[positions], attention_backend=backend)
    randomize(model)
    ids = tokens()
    decoded = cached_logits(model, ids, (5, 8, 9, 10, 11, 12))
    torch.testing.assert_close(decoded, model(ids), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_sees_nothing_behind_it(build, kind) -> None:
    model = build(**SMALL, **KINDS[kind])
    ids = tokens()
    before = model(ids)
    ids[:, 7:] = 1
    assert torch.equal(model(ids)[:, :7], before[:, :7])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_packed_documents_are_computed_as_if_alone(build, randomize, kind, backend) -> None:
    model = build(**SMALL, **KINDS[kind], attention_backend=backend)
    randomize(model)
    ids = tokens()
    segments = torch.tensor([[0] * 5 + [1] * 7] * 2)
    restarted = torch.tensor([[*range(5), *range(7)]] * 2)
    packed = model(ids, position_ids=restarted, segment_ids=segments)
    alone = torch.cat([model(ids[:, :5]), model(ids[:, 5:])], dim=1)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)


def test_initial_weights_follow_megatron(build) -> None:
    """N(0, 0.02), and 0.02 / sqrt(2 layers) for matrices that add to the residual stream; norms 1, biases 0."""
    model = build(num_layers=8, hidden_size=256, num_attention_heads=4, vocab_size=500, max_position_embeddings=64)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            scaled = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            expected = 0.02 / math.sqrt(16) if scaled else 0.02
            drawn = parameter[:500] if "word" in name else parameter
            assert drawn.std().item() == pytest.approx(expected, rel=0.03), name


def test_maximal_update_parametrization(build) -> None:
    """Four times as wide as the base: initial weights, rates and epsilons of Yang and Hu's table 8."""
    wide = {"hidden_size": 256, "num_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    model = build(**wide, vocab_size=500, mup_base_hidden_size=64, untie_embeddings_and_output_weights=True)
    layouts = parameter_layouts(model)
    for name, parameter in model.named_parameters():
        table = name.startswith("embedding.")
        factor = 1 / 4 if parameter.ndim == 2 and not table else 1.0
        assert (layouts[name].lr_mult, layouts[name].eps_mult) == (factor, factor), name
        if parameter.ndim == 2:
            layer = name.startswith("decoder.")
            into_stream = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            expected = 0.02 / (2 if layer else 1) / (2 if into_stream else 1)
            drawn = parameter[:500] if "word" in name or "output_layer" in name else parameter
            assert drawn.std().item() == pytest.approx(expected, rel=0.03), name
    # 1 / head size for the scores, and 1 / 4 for the logits.
    plain = build(**wide, vocab_size=500, untie_embeddings_and_output_weights=True)
    plain.load_state_dict(model.state_dict())
    for layer in plain.decoder.layers.children():
        layer.self_attention.query_scale = 1 / 8
    torch.testing.assert_close(model(tokens()), plain(tokens()) / 4)


def test_nothing_is_scaled_at_the_base_width_but_scores(build) -> None:
    keys = {**SMALL, "max_position_embeddings": 16}
    model, plain = build(**keys, mup_base_hidden_size=32, attention_multiplier=8**-0.5), build(**keys)
    assert torch.equal(model(tokens()), plain(tokens()))
    assert all(layout.lr_mult == layout.eps_mult == 1.0 for layout in parameter_layouts(model).values())


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimizer.optimizer=muon", "choose one of these"),
        ("optimizer.optimizer=sgd", "adam or lion, and not for sgd"),
        ("optimizer.decoupled_lr=0.1", "both say the learning rate of the output layer"),
    ],
)
def test_an_optimizer_without_rules_for_the_width_is_refused(build, setting, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(setting, **SMALL, max_position_embeddings=16, mup_base_hidden_size=16)


def test_one_norm_for_both_branches_is_two_equal_ones(build, randomize) -> None:
    keys = {**SMALL, "position_embedding_type": "rope", "parallel_residual": True}
    one, two = build(**keys, parallel_residual_norms=1), build(**keys)
    randomize(one)
    norms = {name: x for name, x in one.state_dict().items() if ".input_layernorm." in name}
    copies = {name.replace("input_layernorm", "pre_mlp_layernorm"): x for name, x in norms.items()}
    two.load_state_dict({**one.state_dict(), **copies})
    torch.testing.assert_close(one(tokens()), two(tokens()))
    torch.testing.assert_close(cached_logits(one, tokens(), (5, 8, 12)), one(tokens()), atol=2e-5, rtol=1e-4)


def test_parameter_names_are_those_of_megatron_core(build) -> None:
    model = build(**{**SMALL, "num_layers": 1}, max_position_embeddings=16)
    layer = "decoder.layers.0."
    assert sorted(name for name, _ in model.named_parameters()) == sorted(
        [
            "embedding.word_embeddings.weight",
            "embedding.position_embeddings.weight",
            *(
                f"{layer}{norm}.{kind}"
                for norm in ("input_layernorm", "pre_mlp_layernorm")
                for kind in ("weight", "bias")
            ),
            *(
                f"{layer}self_attention.{name}.{kind}"
                for name in ("linear_qkv", "linear_proj")
                for kind in ("weight", "bias")
            ),
            *(f"{layer}mlp.{name}.{kind}" for name in ("linear_fc1", "linear_fc2") for kind in ("weight", "bias")),
            "decoder.final_layernorm.weight",
            "decoder.final_layernorm.bias",
        ]
    )


@pytest.mark.parametrize(
    ("preset", "millions"), [("gpt2-124m", 124.44), ("gpt2-1.5b", 1557.61), ("gpt3-175b", 174.6e3)]
)
def test_presets_have_their_true_sizes(host, preset, millions) -> None:
    """GPT-2's counts are those of the released checkpoints; GPT-3's paper says 175 billion."""
    from mt_core.config.loading import load_config
    from mt_core.nn.build_context import ModelBuildContext
    from mt_core.nn.layout import parameter_layouts
    from mt_core.parallel.context import ParallelContext

    config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
    ctx = ParallelContext(device=torch.device("meta"))
    model = host[MODELS].get("gpt").build.load()(config.model, ModelBuildContext(config, ctx, host))
    count = sum(math.prod(layout.shape) for layout in parameter_layouts(model).values())
    assert count / 1e6 == pytest.approx(millions, rel=1e-3)


def test_dropout_is_active_in_training_only(build) -> None:
    model = build(**SMALL, position_embedding_type="rope", hidden_dropout=0.5, attention_dropout=0.5)
    assert torch.equal(model(tokens()), model(tokens()))
    model.train()
    assert not torch.equal(model(tokens()), model(tokens()))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_turns_each_pair_by_position_times_frequency(interleaved) -> None:
    """As multiplication of complex numbers, in fp64."""
    x = torch.randn(1, 6, 2, 8)
    positions = torch.tensor([[0, 1, 2, 5, 9, 30]])
    angles = RotaryAngles(positions, inverse_frequencies(8, 100.0))
    out = rotate(x, angles.cos, angles.sin, interleaved)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 4) for i in range(4)]
    for s, position in enumerate(positions[0].tolist()):
        for i, (a, b) in enumerate(pairs):
            angle = position * 100.0 ** (-2 * i / 8)
            turned = torch.complex(x[0, s, :, a].double(), x[0, s, :, b].double()) * complex(
                math.cos(angle), math.sin(angle)
            )
            torch.testing.assert_close(out[0, s, :, a].double(), turned.real, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(out[0, s, :, b].double(), turned.imag, atol=1e-6, rtol=1e-5)


def test_alibi_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12)[:8].tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12)[8:].tolist() == pytest.approx([2.0 ** -(i + 0.5) for i in range(4)])


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"num_attention_heads": 5},
            r"hidden_size=32 is not divisible by model.num_attention_heads=5.*1, 2, 4, 8, 16 or 32",
        ),
        (
            {"num_query_groups": 3},
            r"num_query_groups=3 does not divide model.num_attention_heads=4; it can be 1, 2 or 4",
        ),
        (
            {"max_position_embeddings": 8},
            r"data.seq_length=16 is longer than model.max_position_embeddings=8; use at most 8",
        ),
        (
            {"rotary_base": 5.0},
            r"rotary_base .* would be ignored: it only counts when model.position_embedding_type is rope",
        ),
        ({"position_embedding_type": "rope", "rotary_percent": 0.1}, r"leaves no channel to rotate"),
        ({"position_embedding_type": "sinusoidal"}, r"learned_absolute"),
        ({"hidden_sise": 32}, r'unknown key model.hidden_sise .*did you mean "hidden_size"'),
        ({"num_layers": "many"}, r"model.num_layers \(from --set\): got 'many', expected an integer"),
        ({}, r"max_position_embeddings is not set; learned positions need it, at least data.seq_length=16"),
    ],
)
def test_impossible_shapes_name_the_legal_values(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(**{**SMALL, **keys})


def test_an_unknown_backend_lists_the_known_ones(build) -> None:
    with pytest.raises(PluginError, match="model.attention_backend=flsh.*eager.*sdpa"):
        build(**SMALL, position_embedding_type="none", attention_backend="flsh")
