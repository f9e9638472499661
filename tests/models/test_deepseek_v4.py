"""DeepSeek-V4 against `transformers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import nn

from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import auxiliary_losses
from mt_core.nn.kernels.choice import Kernels, use_kernels
from mt_core.nn.kernels.reference.hyper_connection import mixed_streams, read_streams
from mt_core.nn.layout import initialize, parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.compressor import Compressor
from mt_models.blocks.hyper_connection import HyperConnection
from mt_models.blocks.multi_token import shifted
from mt_models.deepseek_v4.flops import flops_per_token
from mt_models.deepseek_v4.hugging_face import spelling
from mt_models.hugging_face import load_reference

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4  # noqa: E402

VOCAB = 89
WINDOW, INDEXED, COMPRESSED = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "head_dim": 14,
    "q_lora_rank": 10,
    "num_experts_per_tok": 2,
    "n_routed_experts": 5,
    "n_shared_experts": 1,
    "layer_types": [WINDOW, INDEXED, COMPRESSED, INDEXED],
    "compress_rates": {INDEXED: 3, COMPRESSED: 5},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    "sliding_window": 4,
    "o_groups": 3,
    "o_lora_rank": 7,
    "index_n_heads": 3,
    "index_head_dim": 6,
    "index_topk": 2,
    "partial_rotary_factor": 4 / 14,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 5,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
TABLES = {
    kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.4}
    for kind, base in (("main", 500.0), ("compress", 700.0))
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8, "beta_slow": 1}
NO_GRADIENT = (
    "router.expert_bias",
    "router.token_experts",
    "indexer.linear_wq_b.weight",
    "indexer.linear_weights_proj.weight",
    *(f"indexer.compressor.{name}" for name in ("linear_kv.weight", "linear_gate.weight", "position_bias")),
    "indexer.compressor.norm.weight",
)


def reference_of(**keys) -> nn.Module:
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**{**SHAPE, **keys}))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("tid2eid"):
            scores = torch.rand(VOCAB, model.config.n_routed_experts, generator=generator)
            buffer.copy_(scores.topk(buffer.shape[1]).indices)
    return model


@pytest.mark.parametrize("keys", [{}, {"rope_parameters": YARN, "index_topk": 64, "mlp_layer_types": ["moe"] * 4}])
def test_logits_and_gradients_equal_the_reference(host, randomize, keys) -> None:
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), NO_GRADIENT)
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 17))
    ref.assert_maps_round_trip(pair)


def test_greedy_continuations_with_a_cache_are_those_of_the_reference(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(), randomize)
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=14, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 24)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


# -- multi-token prediction ----------------------------------------------------------------------------


class Prediction(nn.Module):
    """What the published code has beside the layer: streams start from the token and the streams before."""

    def __init__(self, config) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.e_proj, self.h_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.enorm, self.hnorm, self.norm = (v4.DeepseekV4RMSNorm(hidden, config.rms_norm_eps) for _ in range(3))
        self.hc_head = v4.DeepseekV4HyperHead(config)

    def forward(self, streams, embedded, layer, arguments):
        started = self.e_proj(self.enorm(embedded)).unsqueeze(2) + self.h_proj(self.hnorm(streams))
        return self.norm(self.hc_head(layer(started, **arguments)))


def as_published(reference: nn.Module, tensors, further) -> dict[str, torch.Tensor]:
    """The last layer is that of the prediction."""
    last = f"layers.{len(reference.model.layers) - 1}."
    found = {spelling(None, name): tensor for name, tensor in ref.published(reference, tensors).items()}
    found = {name.replace(last, "mtp.0.", 1): tensor for name, tensor in found.items()}
    return found | {f"mtp.0.{name.replace('hc_head.hc_', 'hc_head_')}": tensor for name, tensor in further.items()}


def test_a_prediction_and_its_gradients_equal_the_reference(host, randomize) -> None:
    kinds = {"layer_types": [*SHAPE["layer_types"], WINDOW], "mlp_layer_types": [*SHAPE["mlp_layer_types"], "moe"]}
    reference = reference_of(num_hidden_layers=5, **kinds).float().eval()
    further = Prediction(reference.config)
    for part in (reference, further):
        randomize(part)
    family = ref.family_of(host, "deepseek_v4")
    external = {**reference.config.to_dict(), **{key: kinds[key][:4] for key in kinds}}
    model = ref.build_from(
        host, family.read_config({**external, "num_hidden_layers": 4, "num_nextn_predict_layers": 1})
    )
    load_reference(model, as_published(reference, reference.state_dict(), further.state_dict()), family)
    tokens, labels = dense.random_tokens(VOCAB, 13), dense.random_tokens(VOCAB, 14)[:, 1:]
    mask = (torch.arange(13)[None] % 5 != 3).float().expand(2, -1)

    seen: dict[str, object] = {}
    hook = reference.model.layers[4].register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(streams=args[0], arguments=kwargs), with_kwargs=True
    )
    reference(tokens, use_cache=False)
    hook.remove()
    embedded = reference.model.embed_tokens(shifted(tokens, 1))
    state = further(seen["streams"], embedded, reference.model.layers[4], seen["arguments"])
    losses = F.cross_entropy(reference.lm_head(state).transpose(1, 2), shifted(labels, 1), reduction="none")
    expected = (losses * shifted(mask, 1)).sum() / shifted(mask, 1).sum()
    (0.1 * expected).backward()

    model.train()
    ours = {loss.name: loss for loss in auxiliary_losses(model)}
    for name, loss in ours.items():
        loss.scale = 1.0 if name.startswith("mtp") else 0.0
    (0.0 * model(tokens, labels=labels, loss_mask=mask).sum()).backward()
    assert ours["mtp_1_loss"].take() == pytest.approx(0.1 * expected.item(), rel=1e-5)
    grads = {name: torch.zeros_like(tensor) for name, tensor in reference.state_dict().items()}
    grads |= {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    given = as_published(reference, grads, {name: p.grad for name, p in further.named_parameters()})
    compared, layouts = 0, parameter_layouts(model)
    for name, value in family.name_map(model.config).reading(given).import_value(given.__getitem__):
        actual = layouts[name].to_canonical(model.get_parameter(name).grad)
        if (largest := value.abs().max().item()) > 0 and not name.endswith(NO_GRADIENT):
            torch.testing.assert_close(
                actual, value, atol=2e-5 * largest + 1e-8, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
            )
            compared += name.startswith("mtp")
    assert compared > 25


# -- documents, sizes, bad input -----------------------------------------------------------------------

OURS = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 12,
    "qk_pos_emb_head_dim": 4,
    "q_lora_rank": 10,
    "o_groups": 2,
    "o_lora_rank": 6,
    "sliding_window": 4,
    "compress_ratios": [0, 2, 3],
    "indexed_compress_ratio": 2,
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 2,
    "hyper_connection_streams": 3,
    "moe": {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_router_hash_layers": 1},
    "vocab_size": 89,
}


def build(host, **keys) -> nn.Module:
    model = ref.build_from(host, {"family": "deepseek_v4", **OURS, **keys})
    initialize(model, 1, ParallelContext())
    return model.eval()


def test_documents_are_computed_as_if_alone(host, randomize) -> None:
    model = build(host)
    randomize(nn.ModuleList(module for module in model.modules() if isinstance(module, Compressor)))
    tokens = dense.random_tokens(89, 17)
    lengths = (7, 1, 9)
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1)
    places = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    both = model(tokens, position_ids=places, segment_ids=segments)
    alone = torch.cat([model(part) for part in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(both, alone, atol=1e-6, rtol=1e-5)


def test_a_new_table_deals_experts_evenly(host) -> None:
    model = build(host)
    experts = model.decoder.layers[0].mlp.router.token_experts + 256
    counts = experts.long().flatten().bincount()
    assert len(counts) == 4
    assert counts.max() - counts.min() <= 1
    assert (experts[:, 0] != experts[:, 1]).all()
    assert model.decoder.layers[1].mlp.router.token_experts is None


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_reference(host) -> None:
    flash = {"layer_types": [WINDOW] * 2 + [INDEXED, COMPRESSED] * 20 + [INDEXED]}
    pro = {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "n_routed_experts": 384}
    pro |= {"moe_intermediate_size": 3072, "o_groups": 16, "q_lora_rank": 1536}
    pro["layer_types"] = [COMPRESSED] * 2 + [INDEXED, COMPRESSED] * 29 + [INDEXED]
    for preset, keys in (("deepseek-v4-flash", flash), ("deepseek-v4-pro", pro)):
        kind, config = transformers.DeepseekV4ForCausalLM, transformers.DeepseekV4Config(**keys)
        reference = dense.without_values(kind, config)
        buffers = sum(b.numel() for name, b in reference.named_buffers() if name.endswith(("bias", "tid2eid")))
        model = dense.build_preset(host, preset, "model.mtp_num_layers=0")
        assert dense.parameter_count(model) == reference.num_parameters() + buffers, preset


def test_flops_of_parts(host) -> None:
    config = build(host).config
    flops = flops_per_token(config, 12)
    # q down and up, kv, groups of 24 channels to 6, output; 2 operations a multiply-add, 3 layers.
    assert flops.attention_projections == 3 * 2 * (32 * 10 + 10 * 48 + 32 * 12 + 48 * 6 + 12 * 32)
    # Keys in windows of 4: 1, 2, 3, then 4. Entries: at most 2 of those of 2 positions; all of those of 3.
    window = (1 + 2 + 3 + 9 * 4) / 12
    indexed, every = (0 + 1 + 1 + 9 * 2) / 12, (0 + 0 + 3 * 1 + 3 * 2 + 3 * 3 + 4) / 12
    assert flops.attention_core == pytest.approx(4 * 48 * (3 * window + indexed + every))
    # Values and gates to 24 overlapping channels, and to 12.
    assert flops.compression == 2 * 2 * 32 * (24 + 12)
    assert flops.indexer > 0
    assert flops_per_token(config, 5).indexer == 0  # two entries: nothing to choose


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"compress_ratios": [0, 2]}, "compress_ratios has 2 entries; it needs one for each of the model.num_layers=3"),
        ({"o_groups": 3}, "o_groups=3 does not divide"),
        ({"dsa_indexer_head_dim": 2}, "dsa_indexer_head_dim=2 is below the channels that positions rotate"),
        ({"ffn_hidden_size": 8}, "ffn_hidden_size=8 would be ignored"),
        ({"num_query_groups": 2}, "num_query_groups=2: this family has one key head"),
        ({"moe": {**OURS["moe"], "moe_layer_freq": 2}}, "moe_layer_freq=2 leaves layers without experts"),
        ({"moe": {**OURS["moe"], "moe_router_hash_layers": 4}}, "moe_router_hash_layers=4 is above"),
        ({"dsa_dense_warmup": True}, "dsa_dense_warmup=true would be ignored"),
        (
            {"rope_scaling_type": "dynamic", "rope_scaling_factor": 2.0},
            "rope_scaling_type=dynamic is not supported by model.family=deepseek_v4",
        ),
    ],
)
def test_impossible_shapes_are_refused(host, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(host, **keys)


def test_a_table_of_experts_needs_a_family_that_reads_tokens(host) -> None:
    with pytest.raises(ConfigError, match="moe_router_hash_layers=1 needs a family whose layers read the ids of tok"):
        ref.build_from(
            host,
            {
                "family": "mixtral",
                **{key: OURS[key] for key in ("num_layers", "hidden_size", "moe")},
                "num_attention_heads": 4,
                "vocab_size": 89,
            },
        )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"swiglu_limit": 7.0}, "swiglu_limit=7.0 is not supported"),
        ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "hash_moe has to come before moe"),
        ({"layer_types": ["full_attention"] * 4}, r"layer_types has \['full_attention'\]"),
        ({"compress_ratios": [0, 3, 5, 0]}, "layer_types and compress_ratios contradict each other"),
        (
            {"rope_parameters": TABLES, "rope_scaling": YARN},
            "rope_parameters=.* and rope_scaling=.* contradict each other",
        ),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "deepseek_v4").read_config({"model_type": "deepseek_v4", **external, **fields})


def test_a_scaling_of_the_default_type_beside_tables_of_both_kinds_does_not_count(host) -> None:
    """The class reads the tables alone."""
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    external |= {"model_type": "deepseek_v4", "rope_parameters": TABLES, "partial_rotary_factor": 0.4}
    family = ref.family_of(host, "deepseek_v4")
    expected = family.read_config(external)
    assert (expected["rotary_base"], expected["compress_rotary_base"]) == (500.0, 700.0)
    assert family.read_config({**external, "rope_scaling": {"type": "default", "factor": 2.0}}) == expected


def test_connections_read_and_write_by_what_is_chosen(host, monkeypatch) -> None:
    model, tokens, calls = build(host), dense.random_tokens(89, 12), Counter()
    expected = model(tokens)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            calls[function.__name__] += 1
            return function(*inputs)

        return call

    kernels = Kernels({"hyper_connection": "torch"}, "cpu", "float32")
    monkeypatch.setattr(kernels, "pick", lambda *_, **__: counted(read_streams))
    monkeypatch.setattr(kernels, "pick_fused", lambda *_, **__: counted(mixed_streams))
    connections = [module for module in model.modules() if isinstance(module, HyperConnection)]
    use_kernels(connections, kernels)
    assert torch.equal(model(tokens), expected)
    assert len(connections) == 2 * len(model.decoder.layers)
    assert calls == {"read_streams": len(connections), "mixed_streams": len(connections)}
