"""Qwen3-Next and Qwen3.5 against `transformers`: functions, gradients, names, positions, documents, prediction."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch.utils.flop_counter import FlopCounterMode

from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import auxiliary_losses
from mt_core.nn.layout import parameter_layouts
from mt_models.hugging_face import load_reference, to_reference
from mt_models.qwen_next.config import flops_per_token

transformers = pytest.importorskip("transformers")

VOCAB = 103
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "intermediate_size": 44,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
EXPERTS |= {"shared_expert_intermediate_size": 20}
ATTENTION_FIRST = ["full_attention"] * 2 + ["linear_attention"] * 3
CASES = {
    "Qwen3-Next": ("Qwen3Next", "Qwen3Next", EXPERTS),
    "Qwen3-Next, dense layers, unnormalized": (
        "Qwen3Next",
        "Qwen3Next",
        {**EXPERTS, "mlp_only_layers": [1, 4], "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "Qwen3-Next, all dense": ("Qwen3Next", "Qwen3Next", {"num_experts": 0}),
    "Qwen3.5": ("Qwen3_5", "Qwen3_5Text", {"linear_num_value_heads": 3, "layer_types": ATTENTION_FIRST}),
    "Qwen3.5 of experts": ("Qwen3_5Moe", "Qwen3_5MoeText", EXPERTS),
}  # fmt: skip


def reference(case: str, **more):
    stem, config, keys = CASES[case]
    kind = getattr(transformers, f"{config}Config")
    # Without fields that the class does not have, which it would keep as unknown ones.
    fields = {key: value for key, value in {**SHAPE, **keys, **more}.items() if hasattr(kind, key) or "_impl" in key}
    return getattr(transformers, f"{stem}ForCausalLM")(kind(**fields))


@pytest.fixture
def small(randomize):
    """Smaller weights than those of other families: a norm of a head's output divides by what may be nearly 0, so that
    rounding of the weights alone (1e-7) changes gradients of larger ones by 1e-3."""
    return partial(randomize, scale=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, small, case) -> None:
    pair = ref.make_pair(host, reference(case), small)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 77))  # more than a chunk of 64
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "Qwen3.5 of experts"])
def test_tensors_and_configurations_go_both_ways(host, small, case) -> None:
    ref.assert_maps_round_trip(ref.make_pair(host, reference(case), small))


def test_packed_experts_are_written_as_files_of_qwen3_5_have_them(host, small) -> None:
    model = reference("Qwen3.5 of experts", num_hidden_layers=2)
    pair = ref.make_pair(host, model, small)  # from experts one by one
    written, state = to_reference(pair.ours, pair.family), model.state_dict()
    assert set(written) == set(state)
    assert all(torch.equal(written[name], tensor) for name, tensor in state.items())
    load_reference(pair.ours, written, pair.family)


def test_the_decoder_of_a_file_with_an_image_tower_is_read(host, small) -> None:
    model = reference("Qwen3.5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    pair = ref.make_pair(host, model, small)
    text = model.config.to_dict()
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 1]}
    external = {
        "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 5,
        "text_config": text, "vision_config": {"depth": 2}, "tie_word_embeddings": False,
    }  # fmt: skip
    keys = pair.family.read_config(external)
    assert keys == {**pair.family.read_config(model.config.to_dict()), "mrope_section": [1, 1, 1]}
    nested = {name.replace("model.", "model.language_model.", 1): x for name, x in model.state_dict().items()}
    nested["model.visual.patch_embed.proj.weight"] = torch.zeros(3)
    again = ref.build_from(host, keys)
    load_reference(again, nested, pair.family)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(pair.ours.named_parameters())[name]), name


def test_published_files_name_the_kinds_of_layers_in_two_ways(host) -> None:
    family = ref.family_of(host, "qwen3_next")
    external = family.write_config(config_of(host, "qwen3-next-80b-a3b"))
    assert external["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 12
    kinds = external.pop("layer_types")
    assert family.read_config({**external, "full_attention_interval": 4})["linear_attention_freq"] == 4
    assert family.read_config({**external, "layer_types": kinds[::-1]})["linear_attention_freq"].startswith(
        "([0]*1+[1]*3"
    )
    with pytest.raises(ConfigError, match="layer_types has 47 entries"):
        family.read_config({**external, "layer_types": kinds[1:]})
    with pytest.raises(ConfigError, match="with sliding_attention; it needs linear_attention or full_attention"):
        family.read_config({**external, "layer_types": ["sliding_attention", *kinds[1:]]})


# -- packed documents ------------------------------------------------------------------------------------

OURS = {
    "num_layers": 4,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 40,
    "vocab_size": 50,
    "rotary_percent": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_chunk_size": 8,
}


def test_packed_documents_are_computed_as_each_alone(build, randomize) -> None:
    model = build(family="qwen_next", **OURS)
    randomize(model, scale=0.1)
    tokens, lengths = dense.random_tokens(50, 29), (11, 1, 17)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1)
    places = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    packed = model(tokens, position_ids=places, segment_ids=ids)
    alone = torch.cat([model(part) for part in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)


# -- multi-token prediction --------------------------------------------------------------------------------


def predicting_pair(host, randomize, case: str):
    """Our model with a prediction, a reference without, and transformers' generic layer of prediction."""
    from transformers.modeling_layers import MtpLayer

    reference_model = reference(case, num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
    reference_model.eval()
    modules = __import__(type(reference_model).__module__, fromlist=["x"])
    kind = CASES[case][0]
    layer = MtpLayer(
        reference_model.config, getattr(modules, f"{kind}DecoderLayer"), getattr(modules, f"{kind}RMSNorm"), 3
    )
    randomize(reference_model)
    randomize(layer, seed=1)
    family = ref.family_of(host, reference_model.config.model_type)
    tensors = {**ref.published(reference_model, reference_model.state_dict()), **prediction_tensors(layer.state_dict())}
    model = ref.build_from(host, family.read_config(family.held(reference_model.config.to_dict(), tensors)))
    load_reference(model, tensors, family)
    return model, reference_model, layer, family, tensors


PREDICTION = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def prediction_tensors(state):
    """Under the names of published files, where experts are one by one."""
    found = {}
    for name, tensor in state.items():
        first, rest = name.split(".", 1)
        if first != "mtp_block":
            found[f"mtp.{PREDICTION[first]}.{rest}"] = tensor
        elif "mlp.experts." in rest:
            for number, expert in enumerate(tensor):
                parts = ("gate_proj", "up_proj") if "gate_up" in rest else ("down_proj",)
                for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                    found[f"mtp.layers.0.mlp.experts.{number}.{part}.weight"] = rows
        else:
            found[f"mtp.layers.0.{rest}"] = tensor
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["Qwen3-Next", "Qwen3.5", "Qwen3.5 of experts"])
def test_predictions_and_their_gradients_equal_the_reference(host, small, case) -> None:
    model, theirs, layer, family, tensors = predicting_pair(host, small, case)
    assert model.config.mtp_num_layers == 1
    written = to_reference(model, family)
    assert {name for name in written if name.startswith("mtp.")} == set(prediction_tensors(layer.state_dict()))
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items() if name in written)
    tokens, labels = dense.random_tokens(VOCAB, 13), dense.random_tokens(VOCAB, 14)[:, 1:]
    mask = (torch.arange(13)[None] % 5 != 3).float().expand(2, -1)
    hidden = theirs.model(tokens).last_hidden_state
    places = torch.arange(13)[None]
    rotary = theirs.model.rotary_emb(hidden, places)
    causal = torch.full((13, 13), float("-inf")).triu(1)[None, None]
    next_tokens, targets, counted = (F.pad(x[:, 1:], (0, 1)) for x in (tokens, labels, mask))
    state = layer(theirs.model.embed_tokens(next_tokens), hidden, rotary, causal, places, None)
    losses = F.cross_entropy(theirs.lm_head(state).transpose(1, 2), targets, reduction="none")
    expected = 0.1 * (losses * counted).sum() / counted.sum()
    expected.backward()
    model.train()
    found = {loss.name: loss for loss in auxiliary_losses(model)}
    for loss in found.values():
        loss.scale = 1.0 if loss.name == "mtp_1_loss" else 0.0
    (0.0 * model(tokens, labels=labels, loss_mask=mask).sum()).backward()
    assert found["mtp_1_loss"].take() == pytest.approx(expected.item(), rel=1e-5)
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in theirs.named_parameters()}
    gradients = {
        **ref.published(theirs, gradients),
        **prediction_tensors({n: p.grad for n, p in layer.named_parameters()}),
    }
    names = family.name_map(model.config).reading(gradients)
    layouts = parameter_layouts(model)
    for name, wanted in names.import_value(gradients.__getitem__):
        largest = wanted.abs().max().item()
        # The model's own LM head has a gradient by the prediction too, and every layer before.
        assert largest > 0 or name.endswith(UNUSED), name
        actual = layouts[name].to_canonical(dict(model.named_parameters())[name].grad)
        torch.testing.assert_close(actual, wanted, atol=5e-5 * largest + 1e-8, rtol=1e-3, msg=name)


UNUSED = ("experts.linear_fc1.weight", "experts.linear_fc2.weight")
"""Of experts that no token of so short a text takes."""


# -- published sizes, FLOPs, refusals ------------------------------------------------------------------


def config_of(host, preset: str):
    return dense.load(host, preset=preset).model


TOTALS = {
    "qwen3-next-80b-a3b": 79.7,
    "qwen3.5-0.8b": 0.75,
    "qwen3.5-2b": 1.88,
    "qwen3.5-4b": 4.2,
    "qwen3.5-9b": 8.95,
    "qwen3.5-27b": 26.9,
    "qwen3.5-35b-a3b": 34.7,
    "qwen3.5-122b-a10b": 122.1,
    "qwen3.5-397b-a17b": 396.3,
}
"""Thousands of millions of weights of the decoders, by their names, without prediction."""


@pytest.mark.parametrize("preset", TOTALS)
def test_presets_have_the_size_of_published_models(host, preset: str) -> None:
    model = dense.build_preset(host, preset, "model.mtp_num_layers=0")
    assert dense.parameter_count(model) / 1e9 == pytest.approx(TOTALS[preset], rel=0.02)


def test_flops_are_those_of_the_products(build) -> None:
    # A vocabulary without rows of padding, for which logits are computed.
    model = build(family="qwen_next", **{**OURS, "vocab_size": 128}, attention_backend="eager")
    length = 16
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long))
    flops = flops_per_token(model.config, length, convention="full")
    # The counter has neither the inverse of the triangular system nor the convolutions as we count them.
    counted = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "conv" not in str(op))
    assert counted / length == pytest.approx(flops.forward - flops.linear_convolution, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.linear_num_value_heads=5"], "linear_num_key_heads=2 does not divide"),
        (["model.linear_attention_freq='[1,0]'"], "has 2 entries; it needs one for each of the model.num_layers=4"),
        (["model.rotary_percent=0.01"], "leaves none to rotate"),
        (["model.mtp_loss_scaling_factor=0.3"], "would be ignored"),
        (["model.linear_attention_backend='fla'"], "needs the package flash-linear-attention and a GPU"),
        (["model.linear_attention_backend='triton'"], '="triton" cannot serve (cpu, float32'),
    ],
)
def test_what_cannot_be_is_refused(build, settings, message) -> None:
    keys = {key: value for key, value in OURS.items() if not any(f"model.{key}=" in setting for setting in settings)}
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(*settings, family="qwen_next", **keys)
