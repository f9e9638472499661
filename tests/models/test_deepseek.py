"""DeepSeek-V2 and V3 against `transformers`, and multi-token prediction against its layers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import auxiliary_losses
from mt_core.nn.layout import parameter_layouts
from mt_infer.cache.layout import cache_layout
from mt_models.blocks.latent_attention import LatentAttention
from mt_models.deepseek.config import flops_per_token
from mt_models.flops import inactive_parameters
from mt_models.hugging_face import load_reference

transformers = pytest.importorskip("transformers")

VOCAB = 89
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 0,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
V2_SHAPE = {key: value for key, value in SHAPE.items() if key != "num_nextn_predict_layers"}
YARN = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
GROUPS = {"n_group": 4, "topk_group": 2}
CASES = {
    "V2, queries from a latent": ("V2", {"q_lora_rank": 14}),
    "V2 Lite with YaRN": ("V2", {"q_lora_rank": None, "rope_parameters": YARN, "max_position_embeddings": 128}),
    "V2, groups and a factor": (
        "V2",
        {"q_lora_rank": 14, "topk_method": "group_limited_greedy", **GROUPS, "routed_scaling_factor": 4.0},
    ),
    "V3, groups": ("V3", {"q_lora_rank": 14, **GROUPS}),
    "V3 with YaRN": ("V3", {"q_lora_rank": 14, **GROUPS, "rope_parameters": YARN, "max_position_embeddings": 128}),
    "Kimi K2": (
        "V3",
        {
            "q_lora_rank": 14,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {**YARN, "beta_fast": 1, "beta_slow": 1},
            "max_position_embeddings": 128,
        },
    ),
    "V3 without groups, tied": (
        "V3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
    ),
}
NO_GRADIENT = ("router.expert_bias",)


def deepseek(generation: str, **keys) -> nn.Module:
    shape = {**(SHAPE if generation == "V3" else V2_SHAPE), **keys}
    model = getattr(transformers, f"Deepseek{generation}ForCausalLM")(
        getattr(transformers, f"Deepseek{generation}Config")(**shape)
    )
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, case, backend) -> None:
    generation, keys = CASES[case]
    pair = ref.make_pair(host, deepseek(generation, **keys), randomize, backend)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), NO_GRADIENT)
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def test_decoding_keeps_one_latent_and_one_key_a_position(build) -> None:
    """kv_lora_rank + qk_pos_emb_head_dim numbers of each of 2 layers, whatever the number of heads."""
    model = build(family="deepseek", **OURS)
    assert cache_layout(model).groups[0].bytes_per_position == 2 * (10 + 6) * 4


def test_absorbed_and_expanded_attention_are_the_same(build) -> None:
    """The same queries and latents, in the two forms."""
    model = build(family="deepseek", **OURS)
    attention = model.decoder.layers[0].self_attention
    assert isinstance(attention, LatentAttention)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    angles = model.angles(torch.arange(9)[None], None)
    q, (latents, positional) = attention.queries(x, angles), attention.latents(x, angles)
    pattern = model.pattern(None, x.device)
    expanded = attention.expanded(q, attention.linear_kv_up_proj(latents), positional, pattern)
    torch.testing.assert_close(attention.absorbed(q, latents, positional, pattern), expanded, atol=1e-6, rtol=1e-4)


# -- multi-token prediction ----------------------------------------------------------------------------

OURS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "kv_lora_rank": 10,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 8,
    "vocab_size": 50,
}


def shift(x: Tensor, by: int) -> Tensor:
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), 1)


def reference_loss(reference: nn.Module, layers: list[nn.Module], tokens: Tensor, labels: Tensor, mask: Tensor):
    """Masked means of the cross entropy of each depth, by transformers' layers: the h and t of the paper's 2.2."""
    base = reference.model
    positions = torch.arange(tokens.shape[1])[None]
    hidden = base(tokens).last_hidden_state
    rotary = base.rotary_emb(hidden, positions)
    causal = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)[None, None]
    found = []
    for depth, layer in enumerate(layers, start=1):
        hidden = layer(
            base.embed_tokens(shift(tokens, depth)),
            hidden,
            position_embeddings=rotary,
            attention_mask=causal,
            position_ids=positions,
            past_key_values=None,
        )
        logits = reference.lm_head(hidden)
        losses = F.cross_entropy(logits.transpose(1, 2), shift(labels, depth), reduction="none")
        weights = shift(mask, depth)
        found.append((losses * weights).sum() / weights.sum())
    return found


def predicting_pair(host, randomize, depth: int):
    """Our model with `depth` predictions, a reference without, and its further layers, all with the same weights."""
    from transformers.modeling_layers import MtpLayer
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    reference = deepseek("V3", q_lora_rank=14, **GROUPS).eval()
    randomize(reference)
    layers = nn.ModuleList(
        MtpLayer(reference.config, v3.DeepseekV3DecoderLayer, v3.DeepseekV3RMSNorm, 3 + d) for d in range(depth)
    )
    randomize(layers, seed=1)
    for layer in layers:
        layer.mtp_block.mlp.gate.e_score_correction_bias.zero_()
    family = ref.family_of(host, "deepseek_v3")
    external = {**reference.config.to_dict(), "num_nextn_predict_layers": depth}
    model = ref.build_from(host, family.read_config(external))
    load_reference(model, published_with(reference, layers), family)
    return model, reference, layers, family


def published_with(reference: nn.Module, layers: nn.ModuleList, tensors=None) -> dict[str, Tensor]:
    """The published names, those of the prediction as the checkpoint of DeepSeek-V3 has them. tensors: default: all."""
    renamed = {"post_norm": "shared_head.norm"}
    state = reference.state_dict() if tensors is None else tensors[0]
    further = layers.state_dict() if tensors is None else tensors[1]
    found = dict(state)
    for name, tensor in further.items():
        depth, rest = name.split(".", 1)
        rest = rest.removeprefix("mtp_block.")
        for theirs, saved in renamed.items():
            rest = rest.replace(theirs, saved)
        found[f"model.layers.{3 + int(depth)}.{rest}"] = tensor
    if tensors is None:
        found["model.layers.3.embed_tokens.weight"] = found["model.embed_tokens.weight"]
        found["model.layers.3.shared_head.head.weight"] = found["lm_head.weight"]
    return ref.published(reference, found)


@pytest.mark.parametrize("depth", [1, 2])
def test_predictions_and_their_gradients_equal_the_reference(host, randomize, depth) -> None:
    model, reference, layers, family = predicting_pair(host, randomize, depth)
    tokens, labels = dense.random_tokens(VOCAB, 13), dense.random_tokens(VOCAB, 14)[:, 1:]
    mask = (torch.arange(13)[None] % 5 != 3).float().expand(2, -1)
    expected = reference_loss(reference, list(layers), tokens, labels, mask)
    model.train()
    losses = {loss.name: loss for loss in auxiliary_losses(model) if loss.name.startswith("mtp")}
    balance = [loss for loss in auxiliary_losses(model) if not loss.name.startswith("mtp")]
    for loss in balance:
        loss.scale = 0.0
    logits = model(tokens, labels=labels, loss_mask=mask)
    (0.0 * logits.sum()).backward()
    weight = 0.1 / depth
    assert len(losses) == depth
    for number, loss in enumerate(expected, start=1):
        assert losses[f"mtp_{number}_loss"].take() == pytest.approx(weight * loss.item(), rel=1e-4)
    (weight * sum(expected)).backward()
    zero = {name: torch.zeros_like(tensor) for name, tensor in reference.state_dict().items()}
    main = {**zero, **{name: p.grad for name, p in reference.named_parameters() if p.grad is not None}}
    further = {name: torch.zeros_like(tensor) for name, tensor in layers.state_dict().items()}
    further |= {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}
    gradients = dict(
        family.name_map(model.config).import_value(published_with(reference, layers, (main, further)).__getitem__)
    )
    for name, parameter in model.named_parameters():
        if name.endswith(NO_GRADIENT):
            continue
        largest = gradients[name].abs().max().item()
        assert largest > 0, name
        actual = parameter_layouts(model)[name].to_canonical(parameter.grad)
        torch.testing.assert_close(actual, gradients[name], atol=5e-5 * largest + 1e-8, rtol=1e-3, msg=name)


def test_predictions_change_neither_logits_nor_evaluation(host, randomize) -> None:
    model, reference, _, _ = predicting_pair(host, randomize, 1)
    tokens = dense.random_tokens(VOCAB, 9)
    mask = torch.ones(2, 9)
    expected = reference(tokens).logits
    dense.assert_near(model.train()(tokens, labels=tokens, loss_mask=mask), expected)
    dense.assert_near(model.eval()(tokens, labels=tokens, loss_mask=mask), expected)
    dense.assert_decoding_equals_forward(model, tokens)


def test_layers_of_prediction_start_as_those_of_the_decoder(build) -> None:
    """0.02 / sqrt(2 layers) for matrices that add to the residual stream, as in Megatron."""
    model = build(family="deepseek", **OURS, mtp_num_layers=4)
    for name in ("self_attention.linear_proj", "mlp.linear_fc2"):
        drawn = torch.cat([depth.mtp_model_layer.get_submodule(name).weight.flatten() for depth in model.mtp.layers])
        assert drawn.std().item() == pytest.approx(0.02 / math.sqrt(2 * OURS["num_layers"]), rel=0.05)


def test_positions_of_other_documents_are_not_predicted(build) -> None:
    """The target of depth 1 counts only where it is of the same document."""
    model = build(family="deepseek", **OURS, mtp_num_layers=1).train()
    tokens, labels = dense.random_tokens(50, 8), dense.random_tokens(50, 9)[:, 1:]
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]]).expand(2, -1)
    (loss,) = auxiliary_losses(model)

    def value(labels: Tensor) -> float:
        logits = model(tokens, segment_ids=segments, labels=labels, loss_mask=torch.ones(2, 8))
        logits.sum().backward()
        return loss.take()

    before = value(labels)
    # Shifted by one, position 2 would have the label of 3, and 6 that of 7: both belong to the next document.
    changed = labels.clone()
    changed[:, [0, 3, 7]] = (labels[:, [0, 3, 7]] + 1) % 50
    assert value(changed) == pytest.approx(before, abs=1e-7)
    changed[:, 4] = (labels[:, 4] + 1) % 50
    assert value(changed) != pytest.approx(before, abs=1e-4)


# -- sizes ---------------------------------------------------------------------------------------------


KIMI_K2 = {
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "vocab_size": 163840,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def shape(generation, **fields):
    config = getattr(transformers, f"Deepseek{generation}Config")
    return config, getattr(transformers, f"Deepseek{generation}ForCausalLM"), fields


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    lite = {
        "num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6, "q_lora_rank": None,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    full = {
        "num_hidden_layers": 60, "hidden_size": 5120, "num_attention_heads": 128, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "n_routed_experts": 160, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    }  # fmt: skip
    published = {
        "deepseek-v2-lite": shape("V2", **lite),
        "deepseek-v2": shape("V2", **full),
        "deepseek-v3": shape("V3"),
        **dict.fromkeys(("kimi-k2", "kimi-k2-thinking"), shape("V3", **KIMI_K2)),
    }
    ref.assert_presets_match(host, "deepseek", published, "model.mtp_num_layers=0")


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        ("deepseek-v2-lite", 15.7, 2.7),
        ("deepseek-v2", 235.7, 21.4),
        ("deepseek-v3", 671.0, 37.5),
        ("kimi-k2", 1026.4, 32.9),
    ],
)
def test_total_and_active_parameters_are_the_published_ones(host, preset, total, active) -> None:
    """Billions; the published active ones (2.4, 21, 37) leave out the embedding."""
    model = dense.build_preset(host, preset, "model.mtp_num_layers=0")
    count = dense.parameter_count(model)
    assert count / 1e9 == pytest.approx(total, rel=0.002)
    assert (count - inactive_parameters(model.config)) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_flops_by_part_are_those_that_torch_counts(build, q_lora_rank) -> None:
    sizes = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96, "vocab_size": 384}
    latent = {"kv_lora_rank": 24, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}
    moe = {
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_layer_freq": "([0]*1+[1]*2)",
        "moe_shared_expert_intermediate_size": 24,
    }
    queries = {} if q_lora_rank is None else {"q_lora_rank": q_lora_rank}
    model = build(
        *ref.settings({"moe": moe}), family="deepseek", **sizes, **latent, **queries, attention_backend="eager"
    )
    flops = flops_per_token(model.config, 16, convention="full")
    projections = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj",
                   "linear_kv_up_proj", "linear_proj")  # fmt: skip
    ref.assert_active_flops(model, flops, {"feed_forward": (".mlp",), "attention_projections": projections})


def test_flops_of_prediction_are_those_that_torch_counts(build) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = build(family="deepseek", **OURS | {"vocab_size": 128}, mtp_num_layers=2, attention_backend="eager").train()
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens, loss_mask=torch.ones(2, 16))
    flops = flops_per_token(model.config, 16, convention="full")
    assert (flops.forward + flops.prediction) * 32 == pytest.approx(counter.get_total_flops(), rel=0.01)


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kv_channels": 16}, "kv_channels=16 would be ignored: this family has model.qk_head_dim and v_head_dim"),
        ({"num_query_groups": 2}, "num_query_groups=2 would be ignored: this family has model.kv_lora_rank"),
        ({"qk_pos_emb_head_dim": 5}, "it has to be even"),
        ({"mtp_loss_scaling_factor": 0.3}, "mtp_loss_scaling_factor would be ignored: set model.mtp_num_layers"),
        ({"mtp_num_layers": 16}, "mtp_num_layers=16 has to be below data.seq_length=16"),
    ],
)
def test_impossible_shapes_are_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(family="deepseek", **{**OURS, **keys})


def test_prediction_over_context_parallel_ranks_is_refused(monkeypatch, build) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="context_parallel_size=2 cannot be combined with model.mtp_num_layers=1"):
        build("parallel.context_parallel_size=2", family="deepseek", **OURS, mtp_num_layers=1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported; it can be num_attention_heads=4"),
        ({"rope_interleave": False}, "rope_interleave=False is not supported; it can be True"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported; it can be True"),
        ({"quantization_config": {}}, "fields that are not known: quantization_config"),
    ],
)
def test_a_hugging_face_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "deepseek_v3").read_config({"model_type": "deepseek_v3", **external, **fields})


def test_models_without_a_hugging_face_form_are_refused(host, build) -> None:
    family = ref.family_of(host, "deepseek_v3")
    with pytest.raises(ConfigError, match=r"model.norm_epsilon=1e-05 cannot be written"):
        family.write_config(build(family="deepseek", **{**OURS, "norm_epsilon": 1e-5}).config)
    experts = {"num_experts": 4, "moe_layer_freq": "[1,0]", "moe_router_pre_softmax": True}
    odd = ref.settings({"moe": experts})
    with pytest.raises(ConfigError, match="whose dense layers come first"):
        family.write_config(build(*odd, family="deepseek", **OURS).config)


def test_norms_of_latents_keep_their_epsilon(host, randomize) -> None:
    """transformers builds them without rms_norm_eps."""
    for reference in (deepseek("V2", rms_norm_eps=0.1), deepseek("V3", rms_norm_eps=0.1, **GROUPS)):
        pair = ref.make_pair(host, reference, randomize)
        ref.assert_maps_round_trip(pair)
        assert (pair.ours.config.norm_epsilon, pair.ours.config.latent_epsilon) == (0.1, 1e-6)
        ref.assert_same_function(pair, dense.random_tokens(VOCAB, 9), NO_GRADIENT)
