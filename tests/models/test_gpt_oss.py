"""GPT-OSS against `transformers`."""

from __future__ import annotations

import pytest
import torch
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import Tensor, nn

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.methods import dequantized
from mt_ckpt.quantized.mxfp4_experts import decode_blocks
from mt_core.errors import CheckpointError, ConfigError
from mt_models.flops import flops_per_token, inactive_parameters, moe_flops
from mt_models.hugging_face import load_reference, to_reference

transformers = pytest.importorskip("transformers")

VOCAB, TOPK = 101, 2
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": TOPK,
    "max_position_embeddings": 128,
    "sliding_window": 4,
    "rope_parameters": YARN,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
CASES = {
    "windows in turn": {},
    "top 3, tied, two windows in three": {
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "a pattern that no number says": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_key_value_heads": 4,
    },
}
EXTERNAL = {key: value for key, value in SHAPE.items() if "implementation" not in key}


def gpt_oss(**keys) -> nn.Module:
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**SHAPE, **keys}))


SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 16, "vocab_size": 50}


@pytest.fixture
def build_small(build):
    """Our model from keys of [model] beside SMALL."""

    def make(**keys) -> nn.Module:
        return build(*ref.settings({**SMALL, "moe": {"num_experts": 4}, **keys}), family="gpt_oss")

    return make


@pytest.fixture
def clamping(randomize):
    """Weights so large that a part of gates and ups is beyond the clamp, and sinks as large as scores."""

    def fill(model: nn.Module) -> None:
        randomize(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("gate_up_proj", "gate_up_proj_bias", "sinks")):
                    parameter.mul_(6.0)

    return fill


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, clamping, case) -> None:
    pair = ref.make_pair(host, gpt_oss(**CASES[case]), clamping)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 19))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def test_these_weights_reach_the_clamp(host, clamping) -> None:
    """Or the tests above would say nothing of it."""
    pair = ref.make_pair(host, gpt_oss(), clamping)
    seen: list[Tensor] = []
    for layer in pair.ours.decoder.layers.children():
        layer.mlp.experts.linear_fc1.register_forward_hook(lambda module, args, out: seen.append(out))
    pair.ours(dense.random_tokens(VOCAB, 19))
    gates, ups = torch.cat(seen).chunk(2, -1)
    assert 0.02 < (gates > 7).float().mean() < 0.5
    assert 0.02 < (ups.abs() > 7).float().mean() < 0.7


def test_balance_loss_and_its_gradient_equal_the_reference(host, randomize) -> None:
    pair = ref.make_pair(host, gpt_oss(num_hidden_layers=1, router_aux_loss_coef=0.03), randomize)
    assert pair.ours.config.moe["moe_aux_loss_coeff"] == [0.03]
    ref.assert_same_balance(pair, dense.random_tokens(VOCAB, 11), pair.theirs.model.layers[0].mlp.router)


def test_a_sink_takes_weight_from_the_keys_of_its_head_alone(build_small) -> None:
    """A sink of -30 is none, one of 30 takes all."""
    model = build_small()
    attention = model.decoder.layers[0].self_attention
    q, k, v = (torch.randn(1, 5, 4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    pattern = model.pattern(None, q.device)
    with torch.no_grad():
        attention.core_attention.softmax_offset.copy_(torch.tensor([-30.0, 30.0, -30.0, -30.0]))
    out = attention.attend(q, k, v, pattern)
    plain = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    ).transpose(1, 2)
    torch.testing.assert_close(out[:, :, [0, 2, 3]], plain[:, :, [0, 2, 3]], atol=1e-6, rtol=1e-5)
    assert out[:, :, 1].abs().max() < 1e-10


def test_which_layers_have_the_window(build_small) -> None:
    def windows(**keys) -> list[int | None]:
        config = build_small(num_layers=4, **keys).config
        return [config.window_of(layer) for layer in range(4)]

    assert windows(sliding_window=3) == [3, None, 3, None]
    assert windows(window_attn_skip_freq=4) == [128, 128, 128, None]
    assert windows(window_attn_skip_freq=1) == [None] * 4
    assert windows(window_attn_skip_freq="([0]*2+[1]*2)") == [None, None, 128, 128]


# -- files -----------------------------------------------------------------------------------------


def test_a_saved_checkpoint_is_read_and_every_expert_counted(host, clamping, tmp_path) -> None:
    """Files as transformers writes them: two matrices and two biases for all experts of a layer."""
    from safetensors.torch import load_file

    reference = gpt_oss()
    clamping(reference)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert ref.expert_tensors(tensors) == 4 * SHAPE["num_hidden_layers"]
    family = ref.family_of(host, "gpt_oss")
    model = ref.build_from(host, family.read_config(reference.config.to_dict())).eval()
    load_reference(model, tensors, family)
    tokens = dense.random_tokens(VOCAB, 9)
    dense.assert_near(model(tokens), reference.eval()(tokens).logits)


def packed(*shape: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random MXFP4: blocks [*shape, 16] of every byte, scales [*shape] of exponents around 1."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)


def test_mxfp4_numbers_by_hand() -> None:
    """Two blocks: 1 and -6 at 2^0, and 0.5 and 3 at 2^-3; the low half of a byte comes first."""
    blocks = torch.zeros(2, 16, dtype=torch.uint8)
    blocks[0, 0], blocks[1, 15] = 0x2 | 0xF << 4, 0x1 | 0x5 << 4
    found = decode_blocks(blocks, torch.tensor([127, 124], dtype=torch.uint8))
    assert found[:2].tolist() == [1.0, -6.0]
    assert found[-2:].tolist() == [0.0625, 0.375]
    assert found.count_nonzero() == 4
    assert decode_blocks(blocks, torch.tensor([255, 127], dtype=torch.uint8))[:32].isnan().all()


class StateTensors:
    """A state dict as the tensors of files."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def test_published_files_in_mxfp4_are_read(host, clamping) -> None:
    """Against what transformers makes of the same blocks and scales."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    shape = {"hidden_size": 64, "intermediate_size": 32}
    reference = gpt_oss(**shape).bfloat16()
    clamping(reference)
    tensors = dict(reference.state_dict())
    for number, layer in enumerate(reference.model.layers):
        for seed, (name, sizes) in enumerate({"gate_up_proj": (6, 64, 2), "down_proj": (6, 64, 1)}.items()):
            blocks, scales = packed(*sizes, seed=2 * number + seed)
            with torch.no_grad():
                getattr(layer.mlp.experts, name).copy_(convert_moe_packed_tensors(blocks, scales))
            prefix = f"model.layers.{number}.mlp.experts.{name}"
            del tensors[prefix]
            tensors |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
    family = ref.family_of(host, "gpt_oss")
    external = {**reference.config.to_dict(), **PUBLISHED_EXTRAS}
    stored, external = dequantized(StateTensors(tensors), external)
    model = ref.build_from(host, family.read_config(external)).bfloat16()
    load_reference(model, {name: stored.read(name) for name in stored.infos}, family)
    back = to_reference(model, family)
    state = reference.state_dict()
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert "quantization_config" not in family.write_config(model.config)


PUBLISHED_EXTRAS = {
    "experts_per_token": TOPK,
    "initial_context_length": 4096,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
}
PUBLISHED_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def test_the_preset_is_the_published_configuration(host) -> None:
    family = ref.family_of(host, "gpt_oss")
    keys = family.read_config(PUBLISHED_20B)
    preset = dense.load(host, preset="gpt-oss-20b").model
    assert type(preset).model_validate({**preset.model_dump(), **keys}) == preset
    written = family.write_config(preset)
    left_out = {"quantization_config", "experts_per_token", "initial_context_length", "transformers_version"}
    ids = {key for key in PUBLISHED_20B if key.endswith("_token_id")}
    expected = {key: PUBLISHED_20B[key] for key in PUBLISHED_20B.keys() - left_out - ids - set(IGNORED_HERE)}
    assert {key: written[key] for key in expected} == expected


IGNORED_HERE = ("use_cache", "output_router_logits")


def test_scaling_that_is_not_given_is_the_published_one(host) -> None:
    family = ref.family_of(host, "gpt_oss")
    bare = {key: value for key, value in PUBLISHED_20B.items() if not key.startswith("rope_")}
    assert family.read_config(bare) == family.read_config(PUBLISHED_20B)


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    def shape(layers, experts):
        fields = {"num_hidden_layers": layers, "num_local_experts": experts}
        return transformers.GptOssConfig, transformers.GptOssForCausalLM, fields

    ref.assert_presets_match(host, "gpt_oss", {"gpt-oss-20b": shape(24, 32), "gpt-oss-120b": shape(36, 128)})


@pytest.mark.parametrize(("preset", "total", "active"), [("gpt-oss-20b", 20.91, 3.61), ("gpt-oss-120b", 116.83, 5.13)])
def test_total_and_active_parameters_are_the_published_ones(host, preset, total, active) -> None:
    """Billions, of the model card; its active ones leave out the embedding and not the LM head."""
    model = dense.build_preset(host, preset)
    count = dense.parameter_count(model)
    assert count / 1e9 == pytest.approx(total, rel=1e-3)
    embedding = model.config.vocab_size * model.config.hidden_size
    assert (count - inactive_parameters(model.config) - embedding) / 1e9 == pytest.approx(active, rel=0.01)


def test_flops_are_those_of_the_chosen_experts_and_of_windows(build_small) -> None:
    sizes = {"num_layers": 4, "hidden_size": 64, "num_query_groups": 2, "ffn_hidden_size": 48, "vocab_size": 128}
    model = build_small(**sizes, moe={"num_experts": 8, "moe_router_topk": 3})
    flops = flops_per_token(model.config, 16, convention="full", feed_forward=moe_flops(model.config))
    ref.assert_active_flops(model, flops, {"feed_forward": (".mlp",)})
    narrow = model.config.model_copy(update={"sliding_window": 4})
    seen = flops_per_token(narrow, 16, feed_forward=moe_flops(narrow)).attention_core
    keys = 2 * (1 + 2 + 3 + 13 * 4) / 16 + 2 * 17 / 2  # two layers with the window, two without
    assert seen == pytest.approx(4 * 64 * keys)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"window_attn_skip_freq": "[1]*3"}, r"model.window_attn_skip_freq='\[1\]\*3' has 3 entries; it needs one"),
        ({"window_attn_skip_freq": "[2]*2"}, "model.window_attn_skip_freq=.* has the entry 2"),
        ({"attention_backend": "sdpa"}, "attention_backend=sdpa cannot serve this model: .*log-sum-exp.*; use eager"),
        ({"attention_backend": "flash_attn_2"}, "flash-attn is not installed|has no gradient"),
        ({"activation": "swiglu"}, "activation"),
    ],
)
def test_impossible_configurations_are_refused(build_small, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build_small(**keys)


def test_a_model_without_experts_is_refused(build) -> None:
    with pytest.raises(ConfigError, match="model.moe"):
        build(*ref.settings(SMALL), family="gpt_oss")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported; it can be 7.0"),
        ({"attention_bias": False}, "attention_bias=False is not supported; it can be True"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types has chunked_attention, which is not supported"),
        ({"qk_norm": True}, "fields that are not known: qk_norm=True"),
    ],
)
def test_a_hugging_face_configuration_that_cannot_be_read(host, fields, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "gpt_oss").read_config({"model_type": "gpt_oss", **EXTERNAL, **fields})


def test_models_without_a_hugging_face_form_are_refused(host, build_small) -> None:
    family = ref.family_of(host, "gpt_oss")
    model = build_small(moe={"num_experts": 4, "moe_router_pre_softmax": True})
    with pytest.raises(ConfigError, match="moe_router_pre_softmax=True cannot be written as a Hugging Face gpt_oss"):
        family.write_config(model.config)


def test_tensors_that_do_not_fit_are_refused(host, randomize) -> None:
    pair = ref.make_pair(host, gpt_oss(), randomize)
    tensors = dict(pair.theirs.state_dict())
    sinks = tensors.pop("model.layers.1.self_attn.sinks")
    with pytest.raises(CheckpointError, match=r"model.layers.1.self_attn.sinks is missing in the checkpoint"):
        load_reference(pair.ours, tensors, pair.family)
    tensors["model.layers.1.self_attn.sinks"] = sinks


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"_scales": None}, "down_proj is quantized, but .*down_proj_scales is missing in the checkpoint"),
        ({"_blocks": None}, "down_proj_scales is the scale of .*down_proj_blocks, which is missing"),
        ({"_scales": torch.ones(6, 32, 1)}, "down_proj_scales is float32; this format has uint8"),
        ({"_scales": torch.ones(6, 32, 2, dtype=torch.uint8)}, r"down_proj_scales has the shape \[6, 32, 2\]"),
        ({"_blocks": torch.ones(6, 32, 16, dtype=torch.uint8)}, r"down_proj_blocks has the shape \[6, 32, 16\]; it is"),
        ({"": torch.ones(6, 32, 32)}, "down_proj is in the checkpoint twice"),
    ],
)
def test_packed_experts_that_are_none_are_refused(changed: dict[str, Tensor | None], words: str) -> None:
    blocks, scales = packed(6, 32, 1, seed=0)
    given = {"_blocks": blocks, "_scales": scales, **changed}
    tensors = {f"experts.down_proj{end}": tensor for end, tensor in given.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=words):
        dequantized(StateTensors(tensors), PUBLISHED_EXTRAS)
