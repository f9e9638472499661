"""Qwen4-Exp's decoder against `transformers`."""

from __future__ import annotations

import pytest
import torch
from tests.ckpt.convert_cases import MODELS
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from tests.models.prediction_reference import LENGTH, assert_same_prediction, causal, one_by_one
from tests.models.published_configs import PUBLISHED
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mt_core.errors import ConfigError
from mt_models.blocks.ngram_ids import NGramTable, primes
from mt_models.blocks.ngram_layer import ngram_rows
from mt_models.qwen4_exp.flops import flops_per_token

transformers = pytest.importorskip("transformers")

VOCAB = 89
END = 3
FULL, LINEAR = "full_attention", "linear_attention"
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "moe_intermediate_size": 14,
    "shared_expert_intermediate_size": 10,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "layer_types": [LINEAR, FULL, LINEAR, FULL],
    "hc_count": 3,
    "hc_lowrank": 10,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 24,
    "ple_conv_kernel_size": 3,
    "ngram_size": 4,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 30,
    "make_ngram_vocab_size_divisible_by": 7,
    "split_ngram_parts": 4,
    "indexer_n_heads": 11,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 6,
    "indexer_compress_ratio": 3,
    "output_gate_type": "sigmoid",
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
NO_GRADIENT = ("linear_qk.weight", "indexer.q_layernorm.weight", "indexer.k_layernorm.weight")


def reference_of(**keys) -> nn.Module:
    return transformers.Qwen4ExpForCausalLM(transformers.Qwen4ExpTextConfig(**{**SHAPE, **keys}))


def tokens_with_ends(length: int, batch: int = 2) -> torch.Tensor:
    tokens = dense.random_tokens(VOCAB, length, batch=batch)
    tokens[0, 5] = tokens[0, 11] = END
    return tokens


def test_logits_gradients_and_continuations_equal_the_reference(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(), randomize)
    ref.assert_same_function(pair, tokens_with_ends(23), NO_GRADIENT)
    ref.assert_maps_round_trip(pair)
    prompt = tokens_with_ends(14, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [5, 14, *range(15, 27)])
    assert logits[0, 13:-1].argmax(-1).tolist() == theirs[0, 14:].tolist()


def test_documents_are_computed_as_if_alone(host, randomize) -> None:
    model = ref.make_pair(host, reference_of(), randomize).ours
    tokens, segments = tokens_with_ends(25, batch=1), torch.tensor([[0] * 14 + [1] * 11])
    positions = torch.cat((torch.arange(14), torch.arange(11)))[None]
    with torch.no_grad():
        both = model(tokens, positions, segments)
        alone = [model(tokens[:, part]) for part in (slice(14), slice(14, None))]
    torch.testing.assert_close(both, torch.cat(alone, 1), atol=2e-5, rtol=1e-4)


class Prediction(nn.Module):
    """The layer of published files, of which transformers has no class: its blocks, put together as vLLM does."""

    def __init__(self, config) -> None:
        from transformers.models.qwen4_exp import modeling_qwen4_exp as blocks

        super().__init__()
        hidden, norm = config.hidden_size, blocks.Qwen4ExpTextRMSNorm
        self.streams = config.hc_count
        self.pre_fc_norm_embedding = norm(hidden, eps=config.rms_norm_eps)
        # Over all streams together, unlike the norms of connections.
        self.pre_fc_norm_hidden = norm(self.streams * hidden, eps=config.rms_norm_eps)
        self.fc_embedding, self.fc_hidden = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        # Layer 1: attention, without n-grams.
        self.layers = nn.ModuleList([blocks.Qwen4ExpTextDecoderLayer(config, 1)])
        self.hyper_connection_mixer = blocks.Qwen4ExpTextGatedResidual(config, use_combine=False)

    def forward(self, embedded, streams, rotary):
        before = self.pre_fc_norm_hidden(streams).unflatten(-1, (self.streams, -1))
        x = self.fc_embedding(self.pre_fc_norm_embedding(embedded)).unsqueeze(-2) + self.fc_hidden(before)
        mask = causal().expand(len(embedded), -1, -1, -1)
        return self.hyper_connection_mixer(self.layers[0](x.flatten(-2), rotary, mask))


def published_prediction(state):
    return {f"mtp.{key}": x for name, tensor in state.items() for key, x in one_by_one(name, tensor).items()}


UNREAD = tuple(f"decoder.final_layernorm.{part}.weight" for part in ("norm", "mix_down_proj", "mix_up_proj"))
"""Of the model's own mean of streams, before which the prediction reads them."""


def test_prediction_reads_the_streams_before_their_mean(host, randomize) -> None:
    theirs = reference_of()
    layer = Prediction(theirs.config)
    # Of larger weights, fp32 rounds gradients of gates that are nearly 0 or 1 by more than the tolerance.
    randomize(theirs, scale=0.1)
    randomize(layer, seed=1, scale=0.1)
    streams = []
    theirs.model.hyper_connection_mixer.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
    places = torch.arange(LENGTH).expand(3, 2, -1)
    rotary = theirs.model.rotary_emb(torch.zeros(1), places)
    assert_same_prediction(
        host,
        theirs,
        layer,
        published_prediction,
        lambda embedded, _: layer(embedded, streams[-1], rotary),
        (*NO_GRADIENT, *UNREAD),
        tolerance=1e-5,
        mtp_num_hidden_layers=1,
        mtp={"hybrid": True, "layer_types": [FULL], "num_hidden_layers": 1, "rope_theta": 1e5},
    )


def test_rows_of_ngrams_worked_out_by_hand() -> None:
    table = NGramTable((7, 11), (3, 5))
    # Heads of length 2 alone: 2 * 3 xor 4 * 5 = 18 behind token 4, and 4 * 3 xor 1 * 5 = 9 behind the end of a text, 1.
    rows = ngram_rows(torch.tensor([[1, 4, 2]]), table, end_of_text=1)
    assert rows.tolist() == [[[9 % 7, 7 + 9 % 11], [18 % 7, 7 + 18 % 11]]]
    assert primes(20, 1, 3) == (29, 31, 37)


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_decoder(host) -> None:
    published = ref.family_of(host, "qwen4_exp").read_config(PUBLISHED["qwen4-exp"][1])
    config = transformers.Qwen4ExpTextConfig(**PUBLISHED["qwen4-exp"][1]["text_config"])
    model = dense.without_values(transformers.Qwen4ExpForCausalLM, config)
    decoder = dense.build_preset(host, "qwen4-exp", "model.mtp_num_layers=0")
    assert dense.parameter_count(decoder) == model.num_parameters()
    preset = dense.build_preset(host, "qwen4-exp")
    # Balance losses and how files divide the tables are choices of a run.
    assert {key: getattr(preset.config, key) for key in published if key not in ("moe", "ngram_file_parts")} == {
        key: value for key, value in published.items() if key not in ("moe", "ngram_file_parts")
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"indexer_n_heads": None}, "indexer_n_heads is not set"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads=2 is not supported"),
        ({"output_gate_type": "tanh"}, "output_gate_type='tanh' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mtp_num_hidden_layers": 1, "mtp": {"rope_theta": 10.0}}, r"mtp.rope_theta=10.0 is not supported"),
        ({"mtp_num_hidden_layers": 1, "mtp": {"layer_types": [LINEAR]}}, "it can be .'indexed_attention'.$"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "qwen4_exp_text").read_config({"model_type": "qwen4_exp_text", **external, **fields})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"ngram_layers": [2]}, "model.ngram_layers has 2; it can have the numbers of layers from 1 to 4"),
        ({"ngram_embed_dim": 25}, "model.ngram_embed_dim=25 is not divisible by the 6 hash tables"),
        ({"ngram_end_of_text_id": None}, "model.ngram_end_of_text_id=None has to be a token id"),
        ({"qsa_budget": 5}, "model.qsa_budget=5 is not a multiple of model.qsa_compress_ratio=2"),
        ({"qsa_indexer_head_dim": 6}, "model.qsa_indexer_head_dim=6 is below the channels that positions rotate"),
    ],
)
def test_impossible_shapes_are_refused(host, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ref.build_from(host, {**MODELS["qwen4_exp"], **keys})


def test_flops_of_parts_are_those_that_torch_counts(host, randomize) -> None:
    model = ref.build_from(host, MODELS["qwen4_exp"])
    randomize(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(dense.random_tokens(101, 16))
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    flops = flops_per_token(model.config, 16, convention="full")
    streams = ("mix_down_proj", "mix_up_proj", "inject_proj")
    for part, endings in (("connections", streams), ("ngrams", (".ngrams",))):
        counted = sum(count for name, count in counts.items() if name.endswith(endings))
        assert getattr(flops, part) * 2 * 16 == pytest.approx(counted, rel=0.01), part
    # A layer's attention without what it is made of: the core, and the indexer's scores of runs.
    whole, projections = (
        sum(n for name, n in counts.items() if name.endswith(ends))
        for ends in (
            ("layers.1.self_attention", "layers.3.self_attention"),
            ("linear_qkv", "linear_proj"),
        )
    )
    expected = flops.attention_projections + flops.attention_core + flops.indexer
    assert expected * 2 * 16 == pytest.approx(whole, rel=0.01)
    assert flops.attention_projections * 2 * 16 == pytest.approx(projections, rel=0.01)


def test_flops_of_the_prediction_are_those_that_torch_counts(host, randomize) -> None:
    keys = {**MODELS["qwen4_exp"], "vocab_size": 128}
    tokens = dense.random_tokens(128, 16)
    batch = {"labels": tokens, "loss_mask": torch.ones(2, 16)}
    counts = []
    for depths in (0, 1):
        model = ref.build_from(host, {**keys, "mtp_num_layers": depths})
        randomize(model)
        with FlopCounterMode(display=False) as counter:
            model.train()(tokens, **batch if depths else {})
        counts.append(counter.get_total_flops())
    flops = flops_per_token(model.config, 16, convention="full")
    counted = counts[1] - counts[0]
    assert (flops.prediction + flops.indexer_of_prediction) * 2 * 16 == pytest.approx(counted, rel=0.01)
