"""Hybrids against `transformers`' NemotronH and Bamba, their pattern, stages, caches and maps."""

from __future__ import annotations

import pytest
import torch
from tests.models import decoder_reference as ref
from tests.models.mamba_reference import build, configure, make_pair, segments_of
from torch import nn

from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.parallel.pipeline.partition import stages_from_layout
from mt_core.specs import MODELS
from mt_infer.cache.layout import cache_layout
from mt_models.hugging_face import load_reference
from mt_models.hybrid.config import check_pattern, layers_of, stages_of
from mt_models.hybrid.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

VOCAB = 97
NEMOTRON_H = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 40,
    "ssm_state_size": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "chunk_size": 8,
    "attn_implementation": "eager",
}
BAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "mamba_d_state": 6,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "attn_implementation": "eager",
}
OURS = {
    "family": "hybrid",
    "hybrid_layer_pattern": "M-*-M*",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 40,
    "mamba_head_dim": 8,
    "mamba_state_dim": 6,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 8,
    "vocab_size": VOCAB,
}


def nemotron_h(**keys):
    return transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**{**NEMOTRON_H, **keys}))


def bamba(**keys):
    return transformers.BambaForCausalLM(transformers.BambaConfig(**{**BAMBA, **keys}))


@pytest.mark.parametrize(
    ("reference", "keys"),
    [
        (nemotron_h, {}),
        (nemotron_h, {"use_bias": True, "use_conv_bias": False, "time_step_min": 0.3, "mlp_hidden_act": "silu"}),
        (nemotron_h, {"layers_block_type": ["full_attention", "mlp", "mlp", "linear_attention"], "vocab_size": 41}),
        (bamba, {}),
        (bamba, {"tie_word_embeddings": True, "attn_layer_indices": [0, 2], "time_step_limit": (0.2, 0.6)}),
    ],
)
def test_the_function_equals_the_reference(host, randomize, reference, keys) -> None:
    pair = make_pair(host, "hybrid", reference(**keys), randomize)
    tokens = ref.random_tokens(pair.ours.config.vocab_size, 21)
    ref.assert_same_function(pair, tokens)
    ref.assert_decoding_equals_forward(pair.ours, tokens)
    ref.assert_maps_round_trip(pair)


def test_training_packs_documents_that_do_not_see_one_another(host, randomize) -> None:
    model = build(host, configure(host, **OURS)).eval()
    randomize(model)
    lengths = (1, 9, 2, 7)
    tokens = ref.random_tokens(VOCAB, sum(lengths))
    packed = model(tokens, segment_ids=segments_of(*lengths))
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)


def test_stages_one_after_another_are_the_whole_model(host) -> None:
    """Each stage is built alone, with the layers of its part of the pattern."""
    keys = {**OURS, "hybrid_layer_pattern": "M-|*-M|*"}
    config = configure(host, **keys)
    whole = build(host, config).eval()
    tokens = ref.random_tokens(VOCAB, 12)
    weights = dict(whole.named_parameters())
    stages = stages_from_layout(config.model.pipeline_layout, config.model.num_layers, 3)
    assert [stage.layers for stage in stages] == [range(2), range(2, 5), range(5, 6)]
    hidden = None
    for stage in stages:
        environment = ModelBuildContext(config, whole.embedding.ctx, host, stages=(stage,))
        part = host[MODELS].get("hybrid").build.load()(config.model, environment).eval()
        with torch.no_grad():
            for name, parameter in part.named_parameters():
                parameter.copy_(weights[name])
        hidden = part.run_stage(stage, hidden, tokens)
    torch.testing.assert_close(hidden, whole(tokens))


def test_layers_of_experts_are_requested_by_their_number(host, monkeypatch) -> None:
    asked = []

    def feed_forward(self, name: str, options: object, layer: int) -> nn.Module:
        asked.append((name, layer))
        return nn.Identity()

    monkeypatch.setattr(ModelBuildContext, "feed_forward", feed_forward)
    config = configure(host, **OURS)
    model = config.model.model_copy(update={"hybrid_layer_pattern": "ME-*E", "moe": {"num_moe_experts": 4}})
    build(host, config.model_copy(update={"model": model}))
    assert asked == [("moe", 1), ("dense", 2), ("moe", 4)]


def test_only_attention_layers_keep_what_grows(host) -> None:
    model = build(host, configure(host, **OURS)).eval()
    layout = cache_layout(model)
    attention = [model.decoder.layers[number].self_attention for number in (2, 5)]
    assert [list(group.layers) for group in layout.groups] == [attention]
    assert [layer for layer, _ in layout.recurrent] == [model.decoder.layers[number].mixer for number in (0, 4)]


def test_a_stream_in_fp32_passes_all_kinds_of_layers(host) -> None:
    from mt_core.parallel.context import ParallelContext

    tokens = ref.random_tokens(VOCAB, 21)
    expected = build(host, configure(host, **OURS)).eval()(tokens)
    ctx = ParallelContext(params_dtype=torch.bfloat16)
    model = build(host, configure(host, **OURS, fp32_residual_connection=True), ctx).eval()
    seen = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    logits = model(tokens)
    assert seen == [torch.float32] * 6
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().mean() < 0.02 * expected.abs().mean()


# -- pattern -----------------------------------------------------------------------------------------


def test_a_pattern_is_layers_and_stages() -> None:
    assert layers_of("M-*|EM|-") == "M-*EM-"
    assert stages_of("M-*|EM|-") == [3, 2, 1]
    check_pattern("M-*|EM|-")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("MGM", r"'MGM' has 'G' \(gated delta net\) as layer 1; a layer can be M \(Mamba-2\), \* \(attention\), - "),
        ("M|x", "has 'x' as layer 1"),
        ("M/M", r"'/' \(multi-token prediction\)"),
        ("M||M", "has a stage without layers"),
        ("", "has a stage without layers"),
        ("|M", "has a stage without layers"),
    ],
)
def test_a_pattern_that_cannot_be_read_is_refused(host, pattern, words) -> None:
    with pytest.raises(ConfigError, match=words):
        configure(host, **{**OURS, "hybrid_layer_pattern": f'"{pattern}"'})


def as_hybrid(name: str) -> str:
    """A GPT's name: its layer i is the attention layer 2i and the feed-forward layer 2i + 1."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(2 * int(parts[2]) + (parts[3] in ("mlp", "pre_mlp_layernorm")))
    return ".".join(parts)


def test_layernorm_and_learned_positions_are_those_of_gpt2(host, randomize) -> None:
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "n_inner": 40}
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).float().eval()
    randomize(reference)
    maps = host[MODELS].get("gpt").name_maps["hf"].load()
    gpt = build(host, configure(host, **maps.read_config(reference.config.to_dict()))).eval()
    load_reference(gpt, reference.state_dict(), maps)
    keys = {
        "hybrid_layer_pattern": "*-*-",
        "num_query_groups": 4,
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": 24,
        "activation": "gelu_tanh",
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
    }
    model = build(host, configure(host, **{**OURS, **keys})).eval()
    model.load_state_dict({as_hybrid(name): tensor for name, tensor in gpt.state_dict().items()})
    assert model.max_sequence_length == 24
    tokens = torch.randint(VOCAB, (2, 16))
    torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=1e-5, atol=1e-5)


def test_dropout_of_a_hybrid_is_on_embeddings_and_layers_in_training(host) -> None:
    config = configure(host, **{**OURS, "hidden_dropout": 0.5})
    model, plain = build(host, config), build(host, configure(host, **OURS)).eval()
    tokens = torch.randint(VOCAB, (2, 16))
    torch.testing.assert_close(model.eval()(tokens), plain(tokens), rtol=0, atol=0)
    model.train()
    kept = {}

    def note(name: str) -> None:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            kept[name] = (output != 0).float().mean().item() / (inputs[0] != 0).float().mean().item()

        model.get_submodule(name).register_forward_hook(hook)

    names = ["embedding.dropout", *(f"decoder.layers.{number}.dropout" for number in range(5))]
    for name in names:
        note(name)
    model(tokens)
    assert list(kept) == names
    assert all(0.4 < share < 0.6 for share in kept.values())


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"position_embedding_type": "learned_absolute"}, "learned_absolute needs model.max_position_embeddings"),
        (
            {"position_embedding_type": "learned_absolute", "max_position_embeddings": 8},
            "data.seq_length=16 is longer than model.max_position_embeddings=8",
        ),
        ({"num_attention_heads": 5}, "model.hidden_size=32 is not divisible by model.num_attention_heads=5"),
        ({"num_query_groups": 3}, "model.num_query_groups=3 does not divide model.num_attention_heads=4"),
        ({"rotary_percent": 0.5}, "rotary_percent"),
        ({"position_embedding_type": "rope", "rotary_percent": 0.4}, "model.rotary_percent=0.4 rotates 3 of the 8"),
        ({"hybrid_layer_pattern": "ME"}, r"'ME' has layers of experts \(E\); set model.moe"),
        ({"mamba_num_groups": 3}, "model.mamba_num_groups=3 does not divide"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(host, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        configure(host, **{**OURS, **keys})


def test_a_pattern_has_a_multiple_of_the_pipeline_stages(host) -> None:
    from mt_models.hybrid.config import check_hybrid

    config = configure(host, **{**OURS, "hybrid_layer_pattern": "M-|*-|M"})
    for size, legal in ((3, True), (2, False)):
        parallel = config.parallel.model_copy(update={"pipeline_model_parallel_size": size})
        sharded = config.model_copy(update={"parallel": parallel})
        if legal:
            check_hybrid(sharded)
        else:
            with pytest.raises(ConfigError, match="pipeline_model_parallel_size=2 does not divide .*pattern=3"):
                check_hybrid(sharded)


@pytest.mark.parametrize(("ranks", "legal"), [(2, True), (4, True), (8, False)])
def test_ranks_are_a_multiple_of_the_groups_and_divide_the_heads(host, ranks: int, legal: bool) -> None:
    """One group is then on every rank; 4 heads are on 4 ranks at most."""
    from mt_models.hybrid.config import check_hybrid

    sizes = {"hidden_size": 64, "mamba_num_groups": 8, "mamba_head_dim": 8, "mamba_num_heads": 16}
    config = configure(host, **{**OURS, **sizes, "num_query_groups": 1})
    parallel = config.parallel.model_copy(update={"tensor_model_parallel_size": ranks})
    divided = config.model_copy(update={"parallel": parallel})
    if legal:
        check_hybrid(divided)
    else:
        with pytest.raises(ConfigError, match=r"num_attention_heads=4"):
            check_hybrid(divided)


def test_stages_are_said_once(host, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    twice = ("parallel.pipeline_model_parallel_size=2", 'parallel.pipeline_model_parallel_layout="Ett|ttL"')
    with pytest.raises(ConfigError, match="both divide the layers into stages; remove the second, or the | of"):
        configure(host, *twice, **{**OURS, "hybrid_layer_pattern": "M-|*-"})


# -- shapes and maps ---------------------------------------------------------------------------------


def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    kinds = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
    published = {"layers_block_type": [kinds[symbol] for symbol in pattern]}
    assert len(published["layers_block_type"]) == 52
    classes = transformers.NemotronHConfig, transformers.NemotronHForCausalLM
    ref.assert_presets_match(host, "hybrid", {"nemotron-h-8b": published}, *classes)
    published = {"vocab_size": 128256, "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128}
    classes = transformers.BambaConfig, transformers.BambaForCausalLM
    ref.assert_presets_match(host, "hybrid", {"bamba-9b": published}, *classes)


def test_old_and_new_spellings_of_nemotron_h_are_read_alike(host, randomize) -> None:
    pair = make_pair(host, "hybrid", nemotron_h(), randomize)
    new = pair.theirs.config.to_dict()
    old = {key: value for key, value in new.items() if key not in ("layers_block_type", "layer_types", "head_dim")}
    old |= {"hybrid_override_pattern": "M-*M-", "num_hidden_layers": 5, "attention_head_dim": 12, "rms_norm_eps": 1e-5}
    assert HUGGING_FACE.read_config(old) == HUGGING_FACE.read_config(new)
    legacy = {"linear_attention": "mamba", "full_attention": "attention", "mlp": "mlp"}
    renamed = {**new, "layers_block_type": [legacy[kind] for kind in new["layers_block_type"]]}
    assert HUGGING_FACE.read_config(renamed) == HUGGING_FACE.read_config(new)

    state = {f"backbone.{name.removeprefix('model.')}": x for name, x in pair.theirs.state_dict().items()}
    state["lm_head.weight"] = state.pop("backbone.lm_head.weight")
    model = build(host, configure(host, **HUGGING_FACE.read_config(new))).eval()
    load_reference(model, state, HUGGING_FACE)
    tokens = ref.random_tokens(VOCAB, 9)
    assert torch.equal(model(tokens), pair.ours(tokens))


def test_a_tensor_that_the_pattern_does_not_have_is_named(host) -> None:
    reference = nemotron_h()
    external = reference.config.to_dict()
    external["layers_block_type"] = ["mlp", *external["layers_block_type"][1:]]
    model = build(host, configure(host, **HUGGING_FACE.read_config(external)))
    with pytest.raises(CheckpointError, match=r"model.layers.0.mixer.up_proj.weight is missing.*; .*A_log is in the"):
        load_reference(model, reference.state_dict(), HUGGING_FACE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers_block_type": ["conv"]}, "layers_block_type='conv' is not supported; it can be linear_attention, "),
        ({"layers_block_type": None}, "neither layers_block_type nor hybrid_override_pattern"),
        ({"rms_norm_eps": 1e-6}, "layer_norm_epsilon=1e-05 and rms_norm_eps=1e-06 contradict each other"),
        ({"mlp_hidden_act": "mish"}, "mlp_hidden_act='mish' is not supported; it can be relu2, "),
        ({"attention_bias": True}, "attention_bias=True is not supported; it can be False"),
        ({"flux": 1}, "not known: flux=1"),
    ],
)
def test_a_nemotron_h_that_is_not_understood_is_refused(change, words) -> None:
    external = {**nemotron_h().config.to_dict(), **change}
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config(external)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_layer_indices": [3]}, r"attn_layer_indices=\[3\] names layers that are not among num_hidden_layers=3"),
        ({"mamba_d_head": 4}, "mamba_n_heads=8 times mamba_d_head=4 is not mamba_expand x hidden_size = 64"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'default' and partial_rotary_factor 0.5"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported; it can be False"),
    ],
)
def test_a_bamba_that_is_not_understood_is_refused(change, words) -> None:
    external = {**bamba().config.to_dict(), **change}
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config(external)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"add_bias_linear": True}, "model.add_bias_linear=True cannot be written as a Hugging Face nemotron_h"),
        (
            {"normalization": "LayerNorm"},
            "model.normalization=LayerNorm cannot be written as a Hugging",
        ),
        ({"hidden_dropout": 0.1}, "model.hidden_dropout=0.1 cannot be written as a Hugging Face nemotron_h"),
        (
            {"position_embedding_type": "learned_absolute", "max_position_embeddings": 16},
            "position_embedding_type=learned_absolute cannot be written as a Hugging Face",
        ),
        ({"activation": "swiglu"}, "model.activation=swiglu cannot be written as a nemotron_h; it can be squared_relu"),
        ({"position_embedding_type": "rope"}, "model.rotary_percent=1.0 cannot be written as a Hugging Face bamba"),
        (
            {"position_embedding_type": "rope", "rotary_percent": 0.5, "activation": "swiglu"},
            r"hybrid_layer_pattern='M-\*-M\*' cannot be written as a Hugging Face bamba",
        ),
    ],
)
def test_what_has_no_place_in_the_format_is_not_written(host, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.write_config(configure(host, **{**OURS, **keys}).model)
