"""MiniMax-M3 against `transformers`: logits, gradients, cached decoding, maps; and attention over chosen blocks against
one query at a time."""

from __future__ import annotations

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionPattern, sdpa_attention
from mt_models.blocks.block_sparse_attention import narrowed
from mt_models.blocks.block_sparse_flex import BlockSparseFlex, needed_tiles
from mt_models.blocks.key_blocks import Selection, choose_blocks, key_blocks
from mt_models.minimax_m3.config import MiniMaxM3Config
from mt_models.minimax_m3.flops import flops_per_token

transformers = pytest.importorskip("transformers")

VOCAB = 89
FULL, SPARSE = "full_attention", "minimax_m3_sparse"
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "rotary_dim": 6,
    "dense_intermediate_size": 40,
    "intermediate_size": 20,
    "shared_intermediate_size": 28,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "index_n_heads": 3,
    "index_head_dim": 10,
    "index_block_size": 3,
    "index_topk_blocks": 3,
    "layer_types": [FULL, SPARSE, SPARSE],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
CASES = {
    "published": {},
    "one head chooses for all, tied": {"index_n_heads": 1, "index_local_blocks": 2, "tie_word_embeddings": True},
    "more heads choose than have keys": {"index_n_heads": 6, "index_local_blocks": 0, "index_block_size": 1},
}
INDEXER = tuple(f"indexer.{name}.weight" for name in ("linear_q", "linear_k", "q_layernorm", "k_layernorm"))
NO_GRADIENT = ("router.expert_bias", *INDEXER)


def reference_of(**keys) -> nn.Module:
    model = transformers.MiniMaxM3VLForCausalLM(transformers.MiniMaxM3VLTextConfig(**{**SHAPE, **keys}))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, case) -> None:
    pair = ref.make_pair(host, reference_of(**CASES[case]), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), NO_GRADIENT)
    assert all(p.grad is None for name, p in pair.ours.named_parameters() if name.endswith(INDEXER))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 19))
    ref.assert_maps_round_trip(pair)


def test_greedy_continuations_with_a_cache_are_those_of_the_reference(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(), randomize)
    prompt = dense.random_tokens(VOCAB, 13, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [7, 13, *range(14, 26)])
    assert logits[0, 12:-1].argmax(-1).tolist() == theirs[0, 13:].tolist()


def test_names_of_published_files_are_read(host, randomize) -> None:
    """The decoder within a file with pictures, as transformers writes it: experts one by one, in block_sparse_moe."""
    vision = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    config = transformers.MiniMaxM3VLConfig(text_config=text, vision_config=vision, projector_hidden_size=20)
    whole = transformers.MiniMaxM3SparseForConditionalGeneration(config).float().eval()
    randomize(whole)
    external = whole.config.to_dict()
    family = ref.family_of(host, "minimax_m3_vl")
    ours = ref.build_from(host, family.read_config(external)).eval()
    published = ref.published(whole, whole.state_dict())
    assert "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight" in published
    ref.load_reference(ours, published, family)
    tokens = dense.random_tokens(VOCAB, 23)
    dense.assert_near(ours(tokens), whole(tokens).logits)


# -- which blocks, and attention over them ---------------------------------------------------------------

SELECTION = Selection(size=4, topk=3, local=1)


def chosen_one_by_one(q: Tensor, k: Tensor, documents: list[int], selection: Selection) -> set[int]:
    """Keys that the last of the positions q [D], k [T, D] attends to. documents: of each position."""
    last = len(k) - 1
    start = documents.index(documents[last])
    blocks = [range(i, min(i + selection.size, last + 1)) for i in range(start, last + 1, selection.size)]
    scores = [max((q @ k[i]).item() for i in block) for block in blocks]
    first_local = len(blocks) - selection.local
    order = sorted(range(len(blocks)), key=lambda n: (n < first_local, -scores[n]))
    return {i for n in order[: selection.topk] for i in blocks[n]}


@pytest.mark.parametrize("documents", [[0] * 23, [0] * 6 + [1] * 17, [3] * 1 + [0] * 21 + [1] * 1])
def test_blocks_are_chosen_as_by_one_query_at_a_time(monkeypatch, documents) -> None:
    monkeypatch.setattr("mt_models.blocks.key_blocks.PRODUCTS_AT_ONCE", 2 * 23 * 5)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 23, 2, 6, generator=generator), torch.randn(1, 23, 6, generator=generator)
    segments = None if len(set(documents)) == 1 else torch.tensor([documents])
    blocks = key_blocks(23, SELECTION.size, segments, k.device)
    chosen = choose_blocks(q, k, torch.arange(23)[None], blocks, SELECTION)
    for t in range(23):
        for head in range(2):
            numbers = [n for n in chosen[0, t, head].tolist() if n >= 0]
            found = {i for i in range(t + 1) if blocks.of_key[0, i] in numbers}
            assert found == chosen_one_by_one(q[0, t, head], k[0, : t + 1], documents[: t + 1], SELECTION)


@pytest.mark.parametrize("packed", [False, True])
def test_tiles_compute_what_masks_do(packed) -> None:
    """FlexAttention without its compiler, over 300 positions, whose tiles of 128 are not all needed."""
    generator = torch.Generator().manual_seed(0)
    selection = Selection(size=16, topk=3, local=1)
    q, k, v = (torch.randn(2, 300, heads, 16, generator=generator) for heads in (4, 2, 2))
    index_q, index_k = torch.randn(2, 300, 2, 8, generator=generator), torch.randn(2, 300, 8, generator=generator)
    # Every query likes the first keys of its document best, so that tiles between these and its own are left out.
    index_k = index_k - 0.1 * torch.arange(300)[:, None]
    index_q = index_q.abs()
    segments = torch.tensor([[0] * 20 + [1] * 280, [0] * 300]) if packed else None
    blocks = key_blocks(300, selection.size, segments, q.device)
    chosen = choose_blocks(index_q, index_k, torch.arange(300)[None], blocks, selection)
    pattern = narrowed(AttentionPattern(segment_ids=segments), blocks, chosen, heads=4)
    from torch.nn.attention.flex_attention import flex_attention

    flex = BlockSparseFlex(flex_attention, sdpa_attention)
    torch.testing.assert_close(flex(q, k, v, pattern, 0.0), sdpa_attention(q, k, v, pattern, 0.0))
    tiles = needed_tiles(chosen.transpose(1, 2).flatten(0, 1), blocks, 2)
    assert 0 < tiles.float().mean() < 1


OURS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 40,
    "sparse_index_dim": 8,
    "sparse_block_size": 2,
    "sparse_topk_blocks": 2,
    "moe": '{num_experts = 4, moe_router_score_function = "sigmoid"}',
    "vocab_size": 50,
}


def test_a_query_in_a_document_chooses_among_its_keys(build, randomize) -> None:
    """Two documents in one sequence: each has the logits that it has by itself, though it begins within a block."""
    model = build("data.seq_length=16", "data.reset_attention_mask=true", family="minimax_m3", **OURS)
    randomize(model)
    tokens = dense.random_tokens(50, 14, batch=1)
    segments = torch.tensor([[0] * 5 + [1] * 9])
    positions = torch.cat([torch.arange(5), torch.arange(9)])[None]
    both = model(tokens, positions, segments)
    alone = torch.cat([model(tokens[:, :5]), model(tokens[:, 5:])], 1)
    torch.testing.assert_close(both, alone, atol=1e-5, rtol=1e-4)


def test_short_sequences_attend_to_all_keys(build, randomize) -> None:
    few, every = (
        build("data.seq_length=16", family="minimax_m3", **{**OURS, "sparse_topk_blocks": topk}) for topk in (2, 9)
    )
    randomize(few)
    every.load_state_dict(few.state_dict())
    tokens = dense.random_tokens(50, 13)
    assert torch.equal(few(tokens[:, :4]), every(tokens[:, :4]))
    assert not torch.allclose(few(tokens), every(tokens), atol=1e-3)


# -- sizes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    lists = {
        "layer_types": [FULL] * 3 + [SPARSE] * 57,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
    }
    shapes = {"minimax-m3": (transformers.MiniMaxM3VLTextConfig, transformers.MiniMaxM3VLForCausalLM, lists)}
    ref.assert_presets_match(host, "minimax_m3", shapes)


def test_flops_are_those_that_torch_counts(build) -> None:
    sizes = {**OURS, "vocab_size": 384, "num_layers": 3, "sparse_attention_freq": 2}
    model = build("data.seq_length=16", family="minimax_m3", **sizes, attention_backend="eager")
    flops = flops_per_token(model.config, 16, convention="full")
    ref.assert_active_flops(model, flops, {"attention_projections": ("linear_qkv", "linear_proj")})


@pytest.mark.parametrize("length", [4, 5, 16, 17])
def test_flops_of_chosen_keys(length) -> None:
    """Blocks of 2, of which 2: a query in block n attends to one whole block at most and to its own up to itself."""
    config = MiniMaxM3Config(family="minimax_m3", **{**OURS, "moe": {"num_experts": 4}})
    keys = sum(min(t // 2, 1) * 2 + t % 2 + 1 for t in range(length)) / length
    flops = flops_per_token(config, length)
    assert flops.attention_core == pytest.approx(2 * 4 * 4 * 8 * keys)
    assert (flops.indexer > 0) == (length > 4)
    assert flops.training == pytest.approx(3 * flops.forward - 2 * flops.indexer)


# -- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"sparse_num_index_heads": 3}, "sparse_num_index_heads=3 has to divide model.num_attention_heads=4"),
        ({"sparse_local_blocks": 3}, "sparse_local_blocks=3 is above model.sparse_topk_blocks=2"),
        ({"sparse_index_dim": 2}, "sparse_index_dim=2 is below the channels that positions rotate"),
        ({"sparse_attention_freq": "[1]*3"}, "sparse_attention_freq=.* has 3 entries"),
    ],
)
def test_impossible_shapes_are_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(family="minimax_m3", **{**OURS, **keys})


def test_layouts_that_divide_what_an_indexer_needs_are_refused(monkeypatch, build) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="parallel.context_parallel_size=2 divides sequences"):
        build("parallel.context_parallel_size=2", family="minimax_m3", **OURS)


BLOCKS = {"sparse_attention_freq": [0, 1, 1], "sparse_num_index_heads": 3, "sparse_topk_blocks": 3}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": None, "sparse_attention_config": BLOCKS}, None),
        ({"sparse_attention_config": {"sparse_block_size": 4}}, "index_block_size=3 and .*contradict each other"),
        ({"sparse_attention_config": {"sparse_init_block": 1}}, "sparse_init_block=1 is not supported"),
        ({"sparse_attention_config": {"sparse_score_type": "mean"}}, "sparse_score_type='mean' is not supported"),
        ({"sparse_attention_config": {"sparse_window": 1}}, "keys that are not known: sparse_window"),
        (
            {"sparse_attention_config": {**BLOCKS, "sparse_disable_index_value": [0, 0, 1]}},
            "sparse_disable_index_value=.* is not supported",
        ),
        ({"layer_types": [FULL, SPARSE]}, "layer_types has 2 entries, and num_hidden_layers=3"),
        ({"layer_types": [FULL, "sliding_attention", FULL]}, "layer_types has sliding_attention"),
        ({"rotary_dim": 12}, "rotary_dim=12 and partial_rotary_factor=0.5 .* of head_dim=12 contradict"),
        ({"swiglu_limit": 8.0}, "swiglu_limit=8.0 is not supported"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported"),
    ],
)
def test_fields_of_a_configuration(host, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    family = ref.family_of(host, "minimax_m3_vl_text")
    given = {"model_type": "minimax_m3_vl_text", **external, **fields}
    if words is None:
        assert family.read_config(given) == family.read_config({**given, "layer_types": SHAPE["layer_types"]})
        return
    with pytest.raises(ConfigError, match=words):
        family.read_config(given)


def test_balance_loss_and_its_gradient_equal_the_reference(host, randomize) -> None:
    keys = {"num_hidden_layers": 1, "layer_types": [FULL], "mlp_layer_types": ["sparse"], "router_aux_loss_coef": 0.03}
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    assert pair.ours.config.moe["moe_aux_loss_coeff"] == [0.03]
    ref.assert_same_balance(pair, dense.random_tokens(VOCAB, 21), pair.theirs.model.layers[0].mlp.gate)
    assert pair.family.write_config(pair.ours.config)["router_aux_loss_coef"] == 0.03
