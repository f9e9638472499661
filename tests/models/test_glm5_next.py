"""GLM-5.3-Flash against `transformers`, and its indexer against a plain loop over queries."""

from __future__ import annotations

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from tests.models.prediction_reference import assert_same_prediction, one_by_one
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionPattern
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.pooled_indexer import PooledIndexer, PooledInputs, chosen_pattern
from mt_models.glm5_next.config import Glm5NextConfig
from mt_models.glm5_next.flops import flops_per_token

transformers = pytest.importorskip("transformers")

from tests.models.glm5_next_reference import Glm5NextTextForCausalLM  # noqa: E402

VOCAB = 89
INDEXED, LINEAR = "indexed_attention", "linear_attention"
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 12,
    "v_head_dim": 9,
    "linear_num_heads": 5,
    "linear_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "layer_types": [LINEAR, INDEXED, INDEXED, LINEAR],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "swiglu_limit": 0.1,
    "index_topk": 6,
    "index_kpool": 3,
    # Many heads: a pool that none of them looks at has a score of exactly 0, as others have.
    "index_n_heads": 13,
    "index_head_dim": 8,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    # Small norms behind sums of streams would make gradients of their weights differences of large terms.
    "rms_norm_eps": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
NO_GRADIENT = ("router.expert_bias",)
INDEXER = tuple(
    f"indexer.{name}"
    for name in (
        "linear_wq_b.weight",
        "linear_wk.weight",
        "k_norm.weight",
        "k_norm.bias",
        "linear_weights_proj.weight",
        "linear_gate.weight",
        "position_bias",
    )
)


def reference_of(**keys) -> nn.Module:
    model = Glm5NextTextForCausalLM(transformers.Glm5NextTextConfig(**{**SHAPE, **keys}))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.mark.parametrize("keys", [{}, {"linear_lower_bound": None, "n_group": 3, "topk_group": 2, "index_kpool": 1}])
def test_logits_and_gradients_equal_the_reference(host, randomize, keys) -> None:
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), (*NO_GRADIENT, *INDEXER))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def test_greedy_continuations_with_a_cache_are_those_of_the_reference(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(), randomize)
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 22)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


class Prediction(nn.Module):
    """The layer of published files: one residual stream, attention over chosen keys and experts of transformers."""

    def __init__(self, decoder: nn.Module, config) -> None:
        super().__init__()
        norm = type(decoder.input_layernorm)
        self.enorm, self.hnorm, self.input_layernorm, self.post_attention_layernorm = (
            norm(config.hidden_size, config.rms_norm_eps) for _ in range(4)
        )
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.self_attn, self.mlp = type(decoder.self_attn)(config, 1), type(decoder.mlp)(config)
        self.shared_head = nn.ModuleDict({"norm": norm(config.hidden_size, config.rms_norm_eps)})

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        real = torch.ones(x.shape[:2], dtype=torch.bool)
        x = x + self.self_attn(self.input_layernorm(x), attention_mask=real)[0]
        return self.shared_head["norm"](x + self.mlp(self.post_attention_layernorm(x)))


def published_prediction(state):
    return {
        f"model.layers.4.{one}": part
        for name, tensor in state.items()
        for one, part in one_by_one(name, tensor).items()
    }


def test_prediction_has_one_residual_stream(host, randomize) -> None:
    theirs = reference_of()
    layer = Prediction(theirs.model.layers[1], theirs.config)
    randomize(theirs)
    randomize(layer, seed=1)
    untrained = (*NO_GRADIENT, *INDEXER)
    assert_same_prediction(host, theirs, layer, published_prediction, layer, untrained, num_nextn_predict_layers=1)


OURS = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_head_dim": 12,
    "v_head_dim": 8,
    "linear_attention_freq": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 6,
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 5,
    "dsa_indexer_topk": 6,
    "dsa_indexer_pool_size": 3,
    "hyper_connection_streams": 2,
    "vocab_size": 384,
}
DOCUMENTS = [[0] * 8 + [1] * 2 + [2] * 13, [3] * 23]


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_a_query_sees_chosen_pools_of_its_document_and_the_tail(documents) -> None:
    # Many heads: of two pools that none of them looks at either may be chosen.
    config = Glm5NextConfig.model_validate({"family": "glm5_next", **OURS, "dsa_indexer_n_heads": 13})
    indexer, generator = PooledIndexer(config, ParallelContext()), torch.Generator().manual_seed(3)
    with torch.no_grad():
        indexer.position_bias.copy_(torch.randn(3, 5, generator=generator))
    shapes = ((2, 23, 13, 5), (2, 23, 13), (2, 23, 5), (2, 23, 5))
    inputs = PooledInputs(*(torch.randn(shape, generator=generator) for shape in shapes))
    segments = None if documents is None else torch.tensor(documents)
    chosen = indexer.choose(inputs, segments)
    pattern = chosen_pattern(AttentionPattern(segment_ids=segments), chosen, 23, torch.float32)
    seen = ~pattern.additive_mask(23, 23, torch.float32, torch.device("cpu")).isneginf()[:, 0]
    for batch, query in ((b, q) for b in range(2) for q in range(23)):
        own = segments[batch] if segments is not None else torch.zeros(23, dtype=torch.int64)
        begin = int((own == own[query]).nonzero()[0])
        pools = [range(start, start + 3) for start in range(begin, query - 1, 3)]
        scores = [score_of(indexer, inputs, batch, query, pool) for pool in pools]
        best = sorted(range(len(pools)), key=lambda n: -scores[n])[:2]
        tail = range(begin + 3 * len(pools), query + 1)
        expected = {position for n in best for position in pools[n]} | set(tail)
        assert set(seen[batch, query].nonzero().flatten().tolist()) == expected


def score_of(indexer: PooledIndexer, inputs: PooledInputs, batch: int, query: int, pool: range) -> float:
    gates = torch.stack([inputs.gates[batch, s] + indexer.position_bias[s - pool[0]] for s in pool]).softmax(0)
    key = sum(gates[s - pool[0]] * inputs.keys[batch, s] for s in pool)
    products = (inputs.queries[batch, query] @ key / 5**0.5).clamp(min=0)
    return float((inputs.weights[batch, query] * products).sum())


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    shapes = {"glm-5.3-flash": (transformers.Glm5NextTextConfig, Glm5NextTextForCausalLM, {"index_kpool": 4})}
    ref.assert_presets_match(host, "glm5_next", shapes, "model.mtp_num_layers=0")


def test_flops_of_parts(build) -> None:
    """Beside those of Kimi Linear's layers: streams, and indexers where positions are left out."""
    config = build(family="glm5_next", **OURS).config
    short, long = (flops_per_token(config, length) for length in (6, 64))
    assert short.indexer == 0
    # W_q, W_k, W_g, W_w; on average 32.5 / 3 pools, each with 3 heads of 5 products and a sum.
    assert long.indexer == pytest.approx(2 * (14 * 15 + 32 * 13 + 32.5 / 3 * 3 * 6))
    assert short.connections == 3 * 2 * 2 * (4 * 2 * 2 * 32 + 4 * 2 * 32)
    assert long.training == pytest.approx(3 * (long.forward - long.indexer) + long.indexer)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"qk_pos_emb_head_dim": 4}, "qk_pos_emb_head_dim=4 is not supported by model.family=glm5_next"),
        ({"dsa_indexer_topk": 7}, "dsa_indexer_pool_size=3 does not divide model.dsa_indexer_topk=7"),
        ({"dsa_indexer_head_dim": 1}, "dsa_indexer_head_dim=1: the norm of a key of one channel"),
        ({"rotary_base": 5.0}, "rotary_base=5.0 would be ignored"),
    ],
)
def test_impossible_shapes_are_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(family="glm5_next", **{**OURS, **keys})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        ({"indexer_types": ["full", "full", "shared", "full"]}, r"layers \[2\] are not"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail=False is not supported"),
        ({"linear_attn_config": {"kda_layers": [0, 1]}}, r"linear_attn_config.kda_layers=\[0, 1\] contradicts"),
        ({"qk_rope_head_dim": 4}, "qk_rope_head_dim=4 is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "glm5_next_text").read_config({"model_type": "glm5_next_text", **external, **fields})


def test_files_with_an_image_tower_are_read(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(), randomize)
    outer = {"model_type": "glm5_next", "vision_config": {"depth": 1}, "image_token_id": 5}
    text = {**pair.theirs.config.to_dict(), "linear_attn_config": {"kda_layers": [0, 3], "full_attn_layers": [1, 2]}}
    published = {**text, "layer_types": [LINEAR, "deepseek_sparse_attention", "deepseek_sparse_attention", LINEAR]}
    assert pair.family.read_config({**outer, "text_config": published}) == pair.family.read_config(text)
    names = {name: name.replace("model.", "model.language_model.") for name in ("model.layers.0.hc_attn_fn",)}
    assert {pair.family.spelling(pair.ours.config, theirs) for theirs in names.values()} == set(names)


def test_balance_loss_and_its_gradient_equal_the_reference(host, randomize) -> None:
    keys = {
        "num_hidden_layers": 1,
        "layer_types": [INDEXED],
        "mlp_layer_types": ["sparse"],
        "router_aux_loss_coef": 0.03,
    }
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    assert pair.ours.config.moe["moe_aux_loss_coeff"] == [0.03]
    ref.assert_same_balance(pair, dense.random_tokens(VOCAB, 21), pair.theirs.model.layers[0].mlp.gate)
    assert pair.family.write_config(pair.ours.config)["router_aux_loss_coef"] == 0.03
