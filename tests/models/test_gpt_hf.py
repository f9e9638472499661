"""GPT-2, GPTBigCode, BLOOM and GPT-NeoX through the name map against `transformers`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.models import decoder_reference as ref

from mt_core.errors import ConfigError
from mt_models.hugging_face import load_reference, to_reference

transformers = pytest.importorskip("transformers")

VOCAB = 101
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "attn_implementation": "eager"}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 6, "attn_implementation": "eager"}
NEOX = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 80,
    "attn_implementation": "eager",
}
NEMOTRON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
}
CASES = {
    "Nemotron": ("NemotronForCausalLM", NEMOTRON, {}),
    "Nemotron, biased, tied, wide heads": (
        "NemotronForCausalLM",
        NEMOTRON,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "GPT-2": ("GPT2LMHeadModel", GPT2, {}),
    "GPT-2, untied, exact gelu, narrow": (
        "GPT2LMHeadModel",
        GPT2,
        {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 56},
    ),
    "GPTBigCode": ("GPTBigCodeForCausalLM", GPT2, {}),
    "BLOOM, six heads": ("BloomForCausalLM", BLOOM, {}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", NEOX, {}),
    "GPT-NeoX in sequence, half rotary": (
        "GPTNeoXForCausalLM",
        NEOX,
        {
            "use_parallel_residual": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
        },
    ),
}


def make(case: str):
    name, shape, keys = CASES[case]
    model_type = getattr(transformers, name)
    return model_type(model_type.config_class(**{**shape, **keys}))


def randomize_in_bf16(randomize, model) -> None:
    """Weights as published files have them: what a map adds to a norm's weight comes off it again bit for bit."""
    randomize(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, backend, case) -> None:
    pair = ref.make_pair(host, make(case), partial(randomize_in_bf16, randomize), backend)
    ref.assert_same_function(pair, ref.random_tokens(VOCAB, 13))
    ref.assert_decoding_equals_forward(pair.ours, ref.random_tokens(VOCAB, 13))
    ref.assert_maps_round_trip(pair)


def test_files_of_gpt2_itself_leave_out_the_prefix(host, randomize) -> None:
    pair = ref.make_pair(host, make("GPT-2"), randomize)
    published = {name.removeprefix("transformer."): x for name, x in pair.theirs.state_dict().items()}
    published["h.0.attn.bias"] = published["ln_f.bias"]  # a mask, which older versions stored
    del published["lm_head.weight"]
    require_loaded(pair, published)


def test_files_of_gpt_neox_call_the_output_embed_out(host, randomize) -> None:
    pair = ref.make_pair(host, make("GPT-NeoX"), randomize)
    state = pair.theirs.state_dict()
    state["embed_out.weight"] = state.pop("lm_head.weight")
    require_loaded(pair, state)


def require_loaded(pair: ref.Pair, published: dict[str, torch.Tensor]) -> None:
    """Under these names every weight finds its place again."""
    before = {name: parameter.detach().clone() for name, parameter in pair.ours.named_parameters()}
    with torch.no_grad():
        for parameter in pair.ours.parameters():
            parameter.fill_(torch.nan)
    load_reference(pair.ours, published, pair.family)
    for name, parameter in pair.ours.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0)


def test_twenty_steps_of_training_follow_the_reference(host) -> None:
    torch.manual_seed(0)
    ref.assert_same_training(ref.make_pair(host, make("GPT-2"), lambda model: None))


PUBLISHED = {
    "gpt2-124m": (12, 768, 12),
    "gpt2-355m": (24, 1024, 16),
    "gpt2-774m": (36, 1280, 20),
    "gpt2-1.5b": (48, 1600, 25),
}
GPT3 = {
    "gpt3-125m": (12, 768, 12),
    "gpt3-350m": (24, 1024, 16),
    "gpt3-760m": (24, 1536, 16),
    "gpt3-1.3b": (24, 2048, 16),
    "gpt3-2.7b": (32, 2560, 32),
    "gpt3-6.7b": (32, 4096, 32),
    "gpt3-13b": (40, 5120, 40),
    "gpt3-175b": (96, 12288, 96),
}


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "positions"), [(PUBLISHED, 1024), (GPT3, 2048)])
def test_presets_have_the_sizes_of_the_published_models(host, sizes, positions) -> None:
    shapes = {
        name: {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": positions}
        for name, (layers, hidden, heads) in sizes.items()
    }
    ref.assert_presets_match(host, "gpt", shapes, transformers.GPT2Config, transformers.GPT2LMHeadModel)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        ("gpt2", {"embd_pdrop": 0.0}, "embd_pdrop=0.0 and resid_pdrop=0.1 differ"),
        (
            "gpt2",
            {"activation_function": "mish"},
            "activation_function='mish' cannot be used: .* it can be gelu_new",
        ),
        ("gpt_bigcode", {"multi_query": False}, "multi_query=False is not supported; it can be True"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm=True is not supported"),
        ("bloom", {"n_inner": 7}, "n_inner=7 is not supported; it can be null or 4 x hidden_size = 192"),
        (
            "gpt_neox",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling of type linear is not",
        ),
        ("nemotron", {"head_dim": 10}, "an odd number of channels"),
        ("nemotron", {"mlp_bias": True}, "attention_bias=False and mlp_bias=True"),
        ("nemotron", {"hidden_act": "tanh"}, "it can be relu2"),
        ("gpt_neox", {"rotary": 1}, "fields that are not known: rotary=1"),
    ],
)
def test_a_hugging_face_configuration_that_cannot_be_read(host, kind, fields, words) -> None:
    shape = {"bloom": BLOOM, "gpt_neox": NEOX, "nemotron": NEMOTRON}.get(kind, GPT2)
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, kind).read_config({"model_type": kind, **shape, **fields})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"position_embedding_type": "none"},
            r"gpt2 and gpt_bigcode \(model.position_embedding_type=none; it can be learned_absolute\), bloom \(.*; it "
            r"can be alibi\), gpt_neox and nemotron and llama and qwen2 and qwen3 and granite \(.*; it can be rope\)",
        ),
        ({"position_embedding_type": "alibi"}, r"bloom \(model.embedding_layernorm=False; it can be True\)"),
        (
            {"position_embedding_type": "rope", "normalization": "RMSNorm"},
            r"gpt_neox and nemotron \(model.normalization=RMSNorm; it can be LayerNorm\), llama .* "
            r"\(model.activation=gelu; it can",
        ),
        (
            {"max_position_embeddings": 16, "num_query_groups": 2},
            r"gpt2 \(model.num_query_groups=2; it can be None or 4\), gpt_bigcode \(.* it can be 1\)",
        ),
    ],
)
def test_a_gpt_that_no_format_can_express_names_the_key(host, build, keys, words) -> None:
    model = build(num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=50, **keys)
    activation = {"activation": "gelu_tanh"} if keys.get("position_embedding_type") == "alibi" else {}
    config = model.config.model_copy(update=activation)
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "gpt2").write_config(config)


def test_factors_are_those_of_granite(host, build, randomize) -> None:
    """transformers computes the logits of a model with factors from the Granite that is written of it."""
    keys = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCAB}
    llama = {"position_embedding_type": "rope", "normalization": "RMSNorm", "activation": "swiglu"}
    factors = {"add_bias_linear": False, "mup_base_hidden_size": 8, "embedding_multiplier": 3.0}
    model = build(**keys, **llama, **factors)
    randomize(model)
    family = ref.family_of(host, "gpt2")
    external = family.write_config(model.config)
    assert (external["attention_multiplier"], external["logits_scaling"]) == (1 / 8, 4.0)
    config = transformers.GraniteConfig.from_dict(external, attn_implementation="eager")
    theirs = transformers.GraniteForCausalLM(config).eval()
    theirs.load_state_dict(to_reference(model, family), strict=False)  # the tied output matrix is no tensor of ours
    ref.assert_same_function(ref.Pair(model, theirs, family), ref.random_tokens(VOCAB, 12))


def test_a_preset_turned_to_rotary_has_no_table_of_positions(host) -> None:
    """The preset's max_position_embeddings then means nothing."""
    model = ref.build_preset(host, "gpt2-124m", "model.position_embedding_type=rope")
    assert model.embedding.position_embeddings is None
    assert model.max_sequence_length is None


SIX_HEADS = ["model.hidden_size=48", "model.num_attention_heads=6", "model.num_query_groups=3"]


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            [*SIX_HEADS, "model.ffn_hidden_size=192"],
            r"=4 does not fit model.num_query_groups=3 .* it can be 1, 3 or 6$",
        ),
        # 3 and 6 divide the heads, but not the width.
        ([*SIX_HEADS, "model.ffn_hidden_size=64"], r"=4 does not fit model.num_query_groups=3 .* it can be 1$"),
        # 3 and 6 divide the width, but not the heads.
        (["model.ffn_hidden_size=66"], r"=4 does not divide the width of the feed-forward .*=66; it can be 1 or 2$"),
    ],
)
def test_tensor_parallel_ranks_get_whole_groups(host, family, keys, words) -> None:
    shape = ["num_layers=1", "hidden_size=32", "num_attention_heads=4", "vocab_size=50"]
    shape += ["position_embedding_type=rope"] if family == "gpt" else []
    config = ref.load(host, f"model.family={family}", *[f"model.{key}" for key in shape], *keys)
    parallel = config.parallel.model_copy(update={"tensor_model_parallel_size": 4})
    with pytest.raises(ConfigError, match=words):
        host.check_config(config.model_copy(update={"parallel": parallel}))
