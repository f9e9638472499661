"""DeepSeek-V3.2 and GLM-5 against `transformers`: logits, gradients, cached decoding, maps; and the indexer's loss."""

from __future__ import annotations

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import auxiliary_losses
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.indexer import index_scores
from mt_models.blocks.indexer_loss import indexer_loss
from mt_models.deepseek_v32.config import DeepseekV32Config
from mt_models.deepseek_v32.flops import flops_per_token
from mt_models.deepseek_v32.model import check_stages

transformers = pytest.importorskip("transformers")

VOCAB, TOPK = 89, 7
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "index_topk": TOPK,
    "index_head_dim": 10,
    "index_n_heads": 13,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
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
CASES = {
    "V3.2": ("DeepseekV32", {}),
    "V3.2 with YaRN": ("DeepseekV32", {"rope_parameters": YARN, "max_position_embeddings": 128}),
    "GLM-5": ("GlmMoeDsa", {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}),
    "GLM-5.2": (
        "GlmMoeDsa",
        {"num_hidden_layers": 5, "indexer_types": ["full", "full", "shared", "full", "shared"], "n_group": 1,
         "topk_group": 1},
    ),
}  # fmt: skip
NO_GRADIENT = (
    "router.expert_bias",
    *("linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias", "linear_weights_proj.weight"),
)


def reference_of(stem: str, shape=SHAPE, **keys) -> nn.Module:
    config = getattr(transformers, f"{stem}Config")(**{**shape, **keys})
    model = getattr(transformers, f"{stem}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, case, backend) -> None:
    stem, keys = CASES[case]
    pair = ref.make_pair(host, reference_of(stem, **keys), randomize, backend)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), NO_GRADIENT)
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


OURS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 3,
    "ffn_hidden_size": 40,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 9,
    "dsa_indexer_n_heads": 5,
    "dsa_indexer_head_dim": 10,
    "dsa_indexer_topk": 5,
    "vocab_size": 50,
}


@pytest.mark.parametrize("case", ["V3.2", "GLM-5.2"])
def test_greedy_continuations_with_a_cache_are_those_of_the_reference(host, randomize, case) -> None:
    """With few heads many keys have a score of exactly 0, and which of these are chosen is a matter of ties."""
    stem, keys = CASES[case]
    pair = ref.make_pair(host, reference_of(stem, index_n_heads=2, **keys), randomize, "eager")
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 22)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


# -- the indexer's loss --------------------------------------------------------------------------------


def attention_weights(attention, x: Tensor, angles) -> Tensor:
    """[B, N, S, T] of the latent attention of a layer, before any key is left out."""
    q = attention.queries(attention.query_source(x), angles)
    latents, positional = attention.latents(x, angles)
    k, _ = attention.keys_and_values(attention.linear_kv_up_proj(latents), positional)
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / q.shape[-1] ** 0.5
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))


def expected_loss(attention, x: Tensor, angles, *, sparse: bool, dense: bool) -> Tensor:
    """KL(p || softmax(I)) position by position and key by key."""
    indexer, length = attention.core_attention.indexer, x.shape[1]
    scores = indexer.scores(indexer.project(x, attention.query_source(x), angles))
    raw = attention_weights(attention, x, angles)
    total = torch.zeros(())
    for b in range(x.shape[0]):
        for t in range(length):
            order = scores[b, t, : t + 1].argsort(descending=True)
            keys = order if dense or not sparse else order[: indexer.topk]
            p = raw[b, :, t, keys].softmax(-1).mean(0).detach()
            log_q = scores[b, t, keys].log_softmax(-1)
            total = total + (p * (p.log() - log_q)).sum()
    return total / (x.shape[0] * length)


@pytest.mark.parametrize(("sparse", "warmup"), [(True, False), (False, False), (False, True)])
def test_the_loss_of_an_indexer_is_the_divergence_from_attention(build, randomize, sparse, warmup) -> None:
    keys = {"dsa_indexer_loss_coeff": 0.5, "dsa_indexer_use_sparse_loss": sparse, "dsa_dense_warmup": warmup}
    model = build("data.seq_length=16", family="deepseek_v32", **{**OURS, "num_layers": 1}, **keys).train()
    randomize(model)
    tokens = dense.random_tokens(50, 13)
    layer = model.decoder.layers[0]
    attention = layer.self_attention
    (loss,) = auxiliary_losses(model)
    (0.0 * model(tokens).sum()).backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    x = layer.input_layernorm(model.embedding(tokens, None)).detach()
    angles = model.angles(torch.arange(13)[None], None)
    expected = 0.5 * expected_loss(attention, x, angles, sparse=sparse, dense=warmup)
    assert loss.take() == pytest.approx(expected.item(), rel=1e-5)
    learned = dict(attention.core_attention.indexer.named_parameters())
    gradients = torch.autograd.grad(expected, list(learned.values()))
    for name, gradient in zip(learned, gradients, strict=True):
        own = ours[f"decoder.layers.0.self_attention.core_attention.indexer.{name}"]
        torch.testing.assert_close(own, gradient, atol=1e-6, rtol=1e-4, msg=name)
    # Nothing else learns from it.
    others = {name for name, gradient in ours.items() if gradient.abs().max() > 0}
    assert all("indexer" in name for name in others)
    assert len(others) == len(learned)


def test_a_warm_up_attends_to_all_keys(build, randomize) -> None:
    """Its logits are those of a model that may choose every key."""
    warm = build("data.seq_length=16", family="deepseek_v32", **OURS, dsa_indexer_loss_coeff=1.0, dsa_dense_warmup=True)
    every = build("data.seq_length=16", family="deepseek_v32", **{**OURS, "dsa_indexer_topk": 99})
    few = build("data.seq_length=16", family="deepseek_v32", **OURS)
    randomize(warm)
    for model in (every, few):
        model.load_state_dict(warm.state_dict())
    tokens = dense.random_tokens(50, 13)
    torch.testing.assert_close(warm(tokens), every(tokens))
    assert not torch.allclose(few(tokens), every(tokens), atol=1e-3)
    # As many keys as are chosen are seen anyway.
    torch.testing.assert_close(few(tokens[:, :5]), every(tokens[:, :5]))


def test_scores_in_blocks_are_those_of_one(monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, w, k = (torch.randn(2, 11, *rest, generator=generator, requires_grad=True) for rest in ((3, 8), (3,), (8,)))
    found = []
    for limit in (2**26, 2 * 3 * 11 * 4):
        monkeypatch.setattr("mt_models.blocks.indexer.PRODUCTS_AT_ONCE", limit)
        scores = index_scores(q, w, k)
        found.append((scores, *torch.autograd.grad((scores * scores.detach()).sum(), (q, w, k))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_query_in_a_document_chooses_among_its_keys(build, randomize) -> None:
    """Two documents in one sequence: each has the logits that it has by itself."""
    model = build("data.seq_length=16", "data.reset_attention_mask=true", family="deepseek_v32", **OURS)
    randomize(model)
    tokens = dense.random_tokens(50, 14, batch=1)
    segments = torch.tensor([[0] * 6 + [1] * 8])
    positions = torch.cat([torch.arange(6), torch.arange(8)])[None]
    both = model(tokens, positions, segments)
    alone = torch.cat([model(tokens[:, :6]), model(tokens[:, 6:])], 1)
    torch.testing.assert_close(both, alone, atol=1e-5, rtol=1e-4)


# -- sizes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    glm = transformers.GlmMoeDsaConfig, transformers.GlmMoeDsaForCausalLM
    shared = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    shapes = {
        "deepseek-v3.2": (transformers.DeepseekV32Config, transformers.DeepseekV32ForCausalLM, {}),
        "glm-5": (*glm, {}),
        "glm-5.2": (*glm, shared),
    }
    ref.assert_presets_match(host, "deepseek_v32", shapes, "model.mtp_num_layers=0")


def test_flops_are_those_that_torch_counts(build) -> None:
    sizes = {**OURS, "vocab_size": 384, "dsa_indexer_topk_freq": 2, "num_layers": 3}
    model = build("data.seq_length=16", family="deepseek_v32", **sizes, attention_backend="eager")
    flops = flops_per_token(model.config, 16, convention="full")
    projections = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
    ref.assert_active_flops(model, flops, {"attention_projections": projections})


def test_flops_of_chosen_keys() -> None:
    """Of 16 keys at most 5 are attended to: 1 + 2 + 3 + 4 + 12 x 5 of 1 + ... + 16."""
    sparse, dense = (
        flops_per_token(DeepseekV32Config(family="deepseek_v32", **{**OURS, "dsa_indexer_topk": topk}), 16)
        for topk in (5, 16)
    )
    assert sparse.attention_core / dense.attention_core == pytest.approx((10 + 12 * 5) / 136)
    assert (sparse.indexer > 0, dense.indexer) == (True, 0.0)
    assert sparse.training == pytest.approx(3 * (sparse.forward - sparse.indexer) + sparse.indexer)


# -- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"dsa_indexer_head_dim": 4}, "dsa_indexer_head_dim=4 is below the channels that positions rotate"),
        ({"dsa_dense_warmup": True}, "dsa_dense_warmup=true would be ignored: set model.dsa_indexer_loss_coeff"),
        ({"attention_backend": "flex"}, "attention_backend=flex cannot serve data.seq_length=16"),
        ({"dsa_indexer_use_sparse_loss": True}, "dsa_indexer_use_sparse_loss=true would be ignored"),
    ],
)
def test_impossible_shapes_are_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(family="deepseek_v32", **{**OURS, **keys})


def test_layouts_that_divide_what_an_indexer_needs_are_refused(monkeypatch, build) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="chooses among the keys of the whole sequence, which other ranks hold"):
        build("parallel.context_parallel_size=2", family="deepseek_v32", **OURS)
    config = DeepseekV32Config(family="deepseek_v32", **{**OURS, "num_layers": 4}, dsa_indexer_topk_freq=4)
    with pytest.raises(ConfigError, match="layer 2 attends to the keys that the indexer of layer 0 chooses"):
        check_stages(config, [Stage(range(2), last=False), Stage(range(2, 4), first=False)])


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"]}, None),
        ("glm_moe_dsa", {"index_topk_pattern": "FSS"}, None),
        ("glm_moe_dsa", {"index_topk_pattern": "SFF"}, "indexer_types=.* is not supported"),
        ("glm_moe_dsa", {"index_topk_freq": 2, "index_skip_topk_offset": 0}, "indexer_types=.* is not supported"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave=False is not supported"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank=None is not supported"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 3}, "every layer can be indexed_attention alone"),
        ("deepseek_v32", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("deepseek_v32", {"indexer_types": ["full"] * 3}, "fields that are not known: indexer_types"),
    ],
)
def test_fields_of_a_configuration(host, kind, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    family = ref.family_of(host, kind)
    given = {"model_type": kind, **external, **fields}
    if words is None:
        section = family.read_config(given)
        assert [section["dsa_indexer_topk_freq"], section["dsa_indexer_skip_topk_offset"]] in ([2, 1], [3, 1])
        return
    with pytest.raises(ConfigError, match=words):
        family.read_config(given)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_head_dim_is_what_positions_rotate_whatever_a_file_says(host, kind) -> None:
    """The classes overwrite it."""
    external = {"model_type": kind, **{key: value for key, value in SHAPE.items() if "implementation" not in key}}
    family = ref.family_of(host, kind)
    assert family.read_config({**external, "head_dim": 18}) == family.read_config(external)


def test_the_divergence_is_exact_near_and_far() -> None:
    """Of nearly equal distributions, and of keys with a weight of 0 or of almost none."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 4, 6, generator=generator)
    close = (scores[:, :2] + 1e-2 * torch.randn(1, 2, 6, generator=generator)).softmax(-1)
    far = torch.tensor([[[0.5, 0.5, 0.0, 0.0, 0.0, 0.0], [1e-30, 1 - 1e-3, 1e-3, 0.0, 0.0, 0.0]]])
    target = torch.cat((close, far), 1)
    scores[0, 3, 1] = -200.0
    allowed = torch.ones(1, 4, 6).tril(5).bool()
    allowed[..., 5] = False
    target = target.masked_fill(~allowed, 0.0)
    target = target / target.sum(-1, keepdim=True)
    scores.requires_grad_()
    found = indexer_loss(scores, target, allowed, ParallelContext())
    exact = scores.detach().double().masked_fill(~allowed, float("-inf")).requires_grad_()
    log_q = exact.log_softmax(-1).masked_fill(~allowed, 0.0)
    expected = (torch.special.xlogy(target.double(), target.double()) - target * log_q).sum() / 4
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    rows = [indexer_loss(scores[:, :2], target[:, :2], allowed[:, :2], ParallelContext()).item()]
    # The weights in fp32 do not add up to 1 exactly, of which -p + q is the correction.
    kept = (torch.special.xlogy(target.double(), target.double()) - target * log_q - target + log_q.exp())[:, :2]
    assert rows[0] == pytest.approx(kept.masked_fill(~allowed[:, :2], 0.0).sum().item() / 2, rel=1e-4)
    (gradient,) = torch.autograd.grad(found, scores)
    (true,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(gradient.double(), true, atol=1e-7, rtol=1e-5)
