"""Hybrids with layers of experts against `transformers`: Nemotron 3, its multi-token prediction, and Granite 4.0 H."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from tests.models.mamba_reference import build, configure
from torch import nn

from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import auxiliary_losses
from mt_models.hugging_face import load_reference, to_reference
from mt_models.hybrid.config import flops_per_token
from mt_models.hybrid.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

VOCAB = 89
MAMBA, ATTENTION = "linear_attention", "full_attention"
NEMOTRON = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "layers_block_type": [MAMBA, "moe", ATTENTION, "moe"],
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "intermediate_size": 22,
    "ssm_state_size": 5,
    "mamba_num_heads": 6,
    "mamba_head_dim": 9,
    "n_groups": 3,
    "chunk_size": 7,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 14,
    "moe_shared_expert_intermediate_size": 26,
    "routed_scaling_factor": 2.5,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
LATENT = {"moe_latent_size": 13, "n_group": 3, "topk_group": 2}
GRANITE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "layer_types": [MAMBA, ATTENTION, MAMBA],
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 14,
    "shared_intermediate_size": 22,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "mamba_d_state": 5,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 7,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
NO_GRADIENT = ("router.expert_bias",)


def nemotron(**keys) -> nn.Module:
    model = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**{**NEMOTRON, **keys}))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def granite(**keys) -> nn.Module:
    return transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**{**GRANITE, **keys}))


CASES = {
    "nemotron 3 nano": nemotron,
    "nemotron 3 super": partial(nemotron, **LATENT),
    "granite 4.0 h": granite,
    "granite 4.0 h tied, rotary": partial(granite, tie_word_embeddings=True, position_embedding_type="rope"),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, name) -> None:
    pair = ref.make_pair(host, CASES[name](), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), NO_GRADIENT)
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


@pytest.mark.parametrize("name", ["nemotron 3 super", "granite 4.0 h"])
def test_experts_in_one_tensor_are_read_too(host, randomize, name) -> None:
    pair = ref.make_pair(host, CASES[name](), randomize)
    model = ref.build_from(host, pair.family.read_config(pair.theirs.config.to_dict())).eval()
    load_reference(model, pair.theirs.state_dict(), pair.family)
    for own, other in zip(model.parameters(), pair.ours.parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("name", ["nemotron 3 super", "granite 4.0 h"])
def test_greedy_continuations_with_a_cache_are_those_of_the_reference(host, randomize, name) -> None:
    pair = ref.make_pair(host, CASES[name](), randomize)
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 22)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


# -- multi-token prediction --------------------------------------------------------------------------------------------

PREDICTS = {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*E"}


def predicted_by_reference(model: nn.Module, tensors: dict[str, torch.Tensor], tokens: torch.Tensor) -> list:
    """Logits of each depth, composed of the blocks of the reference with the tensors of a file."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

    config, hidden = model.config, model.model(tokens).last_hidden_state
    size, kinds = config.hidden_size, [ATTENTION, "moe"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        layer = NemotronHRMSNorm(size, config.layer_norm_epsilon)
        layer.weight = nn.Parameter(tensors[name])
        return layer(x)

    length, found = tokens.shape[1], []
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    for depth in range(2):
        first = f"mtp.layers.{2 * depth}."
        ahead = torch.cat([tokens[:, depth + 1 :], torch.zeros_like(tokens[:, : depth + 1])], 1)
        joined = [norm(f"{first}enorm.weight", model.model.embeddings(ahead)), norm(f"{first}hnorm.weight", hidden)]
        hidden = nn.functional.linear(torch.cat(joined, -1), tensors[f"{first}eh_proj.weight"])
        for place, kind in enumerate(kinds):
            prefix = f"mtp.layers.{2 * depth + place}."
            one = copy.deepcopy(config)
            one.layers_block_type = [kind]
            block = NemotronHBlock(one, 0).eval()
            own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
            block.load_state_dict(in_one_tensor(own, config.n_routed_experts), strict=False)
            hidden = block(hidden, attention_mask=mask if kind == ATTENTION else None)
        hidden = norm(f"mtp.layers.{2 * depth + 1}.final_layernorm.weight", hidden)
        found.append(model.lm_head(hidden))
    return found


def in_one_tensor(tensors: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    packed = {name: x for name, x in tensors.items() if ".experts." not in name}
    for name in ("up_proj", "down_proj"):
        names = [f"mixer.experts.{number}.{name}.weight" for number in range(experts)]
        if names[0] in tensors:
            packed[f"mixer.experts.{name}"] = torch.stack([tensors[one] for one in names])
    return packed


def test_each_depth_predicts_what_blocks_of_the_reference_do(host, randomize) -> None:
    """transformers leaves the layers out; here they are composed of its blocks, as vLLM composes its own."""
    reference = nemotron(**PREDICTS, **LATENT).float().eval()
    randomize(reference)
    config = configure(host, **quoted(HUGGING_FACE.read_config(reference.config.to_dict())))
    ours = build(host, config)
    randomize(ours)
    tensors = {**to_reference(ours, HUGGING_FACE), **ref.published(reference, reference.state_dict())}
    load_reference(ours, tensors, HUGGING_FACE)
    tokens = dense.random_tokens(VOCAB, 14)
    labels = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1)
    mask = torch.ones(tokens.shape)
    mask[:, -1] = 0
    (0.0 * ours(tokens, labels=labels, loss_mask=mask).sum()).backward()
    losses = [one.take() for one in auxiliary_losses(ours) if one.name.startswith("mtp")]
    expected = []
    for depth, logits in enumerate(predicted_by_reference(reference, tensors, tokens), 1):
        rows, wanted = logits[:, : -depth - 1], tokens[:, depth + 1 :]
        expected.append(0.05 * nn.functional.cross_entropy(rows.flatten(0, 1), wanted.flatten()).item())
    assert losses == pytest.approx(expected, rel=1e-5)


def quoted(keys: dict) -> dict:
    """As overrides have them."""
    found = {}
    for name, value in keys.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": one for key, one in quoted(value).items()}
        else:
            found[name] = f'"{value}"' if isinstance(value, str) else value
    return found


PREDICTING = {
    "family": "hybrid",
    "hybrid_layer_pattern": '"ME*-"',
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "vocab_size": VOCAB,
    "mtp_num_layers": 1,
    "mtp_hybrid_override_pattern": '"*E"',
    "moe.num_experts": 4,
}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mtp_hybrid_override_pattern": '"*M"'}, r"a layer can be \* \(attention\), - \(feed-forward\), E"),
        ({"mtp_num_layers": 0}, "are set together, or neither"),
        ({"embedding_multiplier": 2.0}, "embedding_multiplier=2.0 cannot be combined with model.mtp_num_layers=1"),
        ({"hidden_dropout": 0.1}, "hidden_dropout=0.1 cannot be combined"),
        (
            {"position_embedding_type": '"learned_absolute"', "max_position_embeddings": 16},
            "position_embedding_type=learned_absolute cannot be combined",
        ),
    ],
)
def test_predicted_layers_that_do_not_fit_are_refused(host, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        configure(host, **{**PREDICTING, **keys})


def test_depths_belong_to_the_last_stage(host) -> None:
    config = configure(host, **{**PREDICTING, "hybrid_layer_pattern": '"ME|*-"'})
    assert config.model.pipeline_layout == "Ett|ttmL"
    assert any(name.startswith("mtp.layers.0.mtp_model_layer.layers.1.") for name in build(host, config).state_dict())


def test_flops_of_prediction_are_of_training_alone(host) -> None:
    model = configure(host, **PREDICTING).model
    plain = model.model_copy(update={"mtp_num_layers": 0, "mtp_hybrid_override_pattern": None})
    with_depth, without = (flops_per_token(one, 16, experts=100.0) for one in (model, plain))
    assert with_depth.forward == without.forward == without.training / 3
    # Queries, keys, values and the output; scores of 8.5 keys and their sum; experts; eh_proj; logits
    depth = 2 * 4 * 32 * 32 + 4 * 32 * 8.5 + 100 + 2 * 64 * 32 + 2 * 32 * VOCAB
    assert with_depth.training == pytest.approx(3 * (without.forward + depth))


# -- configurations ----------------------------------------------------------------------------------------------------


def test_a_file_without_predicted_layers_is_read_without_them(host) -> None:
    external = nemotron(**PREDICTS).config.to_dict()
    assert HUGGING_FACE.held(external, ["mtp.layers.0.enorm.weight"]) == external
    held = HUGGING_FACE.read_config(HUGGING_FACE.held(external, ["lm_head.weight"]))
    assert held["mtp_num_layers"] == 0
    assert "mtp_hybrid_override_pattern" not in held


def test_layers_of_a_depth_are_read_from_the_list_or_the_pattern() -> None:
    external = nemotron(num_nextn_predict_layers=1).config.to_dict()
    assert HUGGING_FACE.read_config(external)["mtp_hybrid_override_pattern"] == "*E"
    listed = {**external, "mtp_layers_block_type": [ATTENTION, "mlp", "moe"]}
    assert HUGGING_FACE.read_config(listed)["mtp_hybrid_override_pattern"] == "*-E"
    with pytest.raises(ConfigError, match="contradict each other"):
        HUGGING_FACE.read_config({**listed, "mtp_hybrid_override_pattern": "E"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_shared_experts": 2}, "n_shared_experts=2 is not supported; it can be 1"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        ({"topk_group": 2}, "topk_group=2 is not supported with n_group=1"),
    ],
)
def test_experts_that_are_not_understood_are_refused(change, words) -> None:
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config({**nemotron().config.to_dict(), **change})


def test_experts_without_shared_ones_are_not_written(host) -> None:
    for activation in ("squared_relu", "swiglu"):
        keys = {**PREDICTING, "activation": activation, "hybrid_layer_pattern": '"ME*E"', "mtp_num_layers": 0}
        score = {} if activation == "swiglu" else {"moe.moe_router_score_function": '"sigmoid"'}
        config = configure(host, **{**keys, **score, "mtp_hybrid_override_pattern": "null"})
        with pytest.raises(ConfigError, match="moe_shared_expert_intermediate_size is not set"):
            HUGGING_FACE.write_config(config.model)


PATTERNS = {
    "nano": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "super": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
}


def nemotron_3(size: str, **keys) -> tuple:
    common = {"head_dim": 128, "num_key_value_heads": 2, "hybrid_override_pattern": PATTERNS[size]}
    return transformers.NemotronHConfig, transformers.NemotronHForCausalLM, {**common, **keys}


def granite_4_h(**keys) -> tuple:
    kinds = [ATTENTION if layer in (5, 15, 25, 35) else MAMBA for layer in range(40)]
    common = {"num_hidden_layers": 40, "layer_types": kinds, "vocab_size": 100352, "mamba_d_state": 128}
    common |= {"mamba_n_heads": keys["hidden_size"] // 32, "tie_word_embeddings": True}
    return transformers.GraniteMoeHybridConfig, transformers.GraniteMoeHybridForCausalLM, {**common, **keys}


NANO_3 = {"hidden_size": 2688, "mamba_num_heads": 64, "n_routed_experts": 128, "moe_intermediate_size": 1856}
NANO_3 |= {"moe_shared_expert_intermediate_size": 3712}
SUPER_3 = {"n_routed_experts": 512, "moe_intermediate_size": 2688, "moe_latent_size": 1024}
SUPER_3 |= {"moe_shared_expert_intermediate_size": 5376}
PUBLISHED = {
    "nemotron-3-nano-30b-a3b": nemotron_3("nano", **NANO_3),
    "nemotron-3-super-120b-a12b": nemotron_3("super", **SUPER_3),
    "granite-4.0-h-1b": granite_4_h(
        hidden_size=1536,
        num_attention_heads=12,
        num_key_value_heads=4,
        shared_intermediate_size=4096,
        num_local_experts=0,
    ),
    "granite-4.0-h-tiny": granite_4_h(
        hidden_size=1536,
        num_attention_heads=12,
        num_key_value_heads=4,
        shared_intermediate_size=1024,
        intermediate_size=512,
        num_local_experts=64,
    ),
    "granite-4.0-h-small": granite_4_h(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        shared_intermediate_size=1536,
        intermediate_size=768,
        num_local_experts=72,
    ),
}
BILLIONS = {"nemotron-3-nano-30b-a3b": 31.6, "granite-4.0-h-tiny": 6.9, "granite-4.0-h-small": 32.2}
"""As published."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_sizes_of_the_published_models(host, preset) -> None:
    config_type, model_type, shape = PUBLISHED[preset]
    reference = dense.without_values(model_type, config_type(**shape))
    biases = sum(b.numel() for name, b in reference.named_buffers() if name.endswith("e_score_correction_bias"))
    # transformers leaves out layers of multi-token prediction.
    none = ("model.mtp_num_layers=0", "model.mtp_hybrid_override_pattern=null") if "super" in preset else ()
    ours = dense.parameter_count(dense.build_preset(host, preset, *none))
    assert ours == reference.num_parameters() + biases
    if preset in BILLIONS:
        assert ours / 1e9 == pytest.approx(BILLIONS[preset], abs=0.06)
