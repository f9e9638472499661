"""Kimi K3 against its formulas in plain torch: transformers has no class for it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.infer.decoding import cached_logits
from tests.models import kimi_k3_reference as ref
from tests.models.bert_reference import canonical_size
from tests.models.moe_reference import build_from

from mt_core.config.loading import load_config
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.activations import activate
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.pipeline.stage import Stage
from mt_models.hugging_face import load_reference, to_reference
from mt_models.kimi_k3.flops import flops_per_token
from mt_models.kimi_k3.hugging_face import HUGGING_FACE
from mt_models.kimi_linear.flops import flops_per_token as ungated_flops_per_token


def made(host):
    return build_from(host, {**HUGGING_FACE.read_config(ref.EXTERNAL), "linear_chunk_size": 4}).eval()


@pytest.fixture
def model(host):
    found = made(host)
    load_reference(found, ref.random_state(), HUGGING_FACE)
    return found


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, ref.VOCAB, (batch, length), generator=torch.Generator().manual_seed(3))


WITHOUT_GRADIENT = ("router.expert_bias", "layers.0.attention_residual.weight")
"""The bias chooses experts alone; layer 0 reads one source."""


def test_logits_loss_and_gradients_equal_the_formulas(model) -> None:
    state = {name: value.requires_grad_() for name, value in ref.precise_state().items()}
    ids = tokens(14)
    ours, theirs = model(ids), torch.stack([ref.logits(state, row) for row in ids])
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=3e-5 * theirs.abs().max().item())
    losses = [F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for x in (ours, theirs)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in state.items()}
    layouts = parameter_layouts(model)
    for name, expected in HUGGING_FACE.name_map(model.config).import_value(gradients.__getitem__):
        parameter = model.get_parameter(name)
        if name.endswith(WITHOUT_GRADIENT):
            assert expected.abs().max() == 0, name
            assert parameter.grad is None or parameter.grad.abs().max() == 0, name
            continue
        assert expected.abs().max() > 0, name
        found = layouts[name].to_canonical(parameter.grad)
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max(), name


def test_names_make_the_round_trip(host, model) -> None:
    state = ref.random_state()
    written = to_reference(model, HUGGING_FACE)
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], state[name]) for name in state)
    # A file of the decoder alone, and one with an image tower.
    tower = {"vision_tower.patch_embed.proj.weight": torch.ones(1), "mm_projector.proj.0.weight": torch.ones(1)}
    for others in ({}, tower):
        again = made(host)
        named = {(name if others else name.removeprefix("language_model.")): x for name, x in state.items()}
        load_reference(again, {**named, **others}, HUGGING_FACE)
        assert all(torch.equal(again.get_parameter(name), value) for name, value in model.named_parameters())
    state[f"{ref.P}layers.0.self_attn.A_log"][ref.HEADS] = 1.0
    with pytest.raises(CheckpointError, match="numbers behind those of its 3 heads"):
        load_reference(made(host), state, HUGGING_FACE)


def test_the_configuration_makes_the_round_trip(model) -> None:
    external = HUGGING_FACE.write_config(model.config)
    assert external["architectures"] == ["KimiK3ForConditionalGeneration"]
    assert {key: external["text_config"][key] for key in ref.TEXT} == ref.TEXT
    read = HUGGING_FACE.read_config(ref.EXTERNAL)
    assert HUGGING_FACE.read_config(external).items() >= read.items()
    assert read["latent_norm_epsilon"] == 1e-6


def test_greedy_continuations_with_a_cache_are_those_of_the_formulas(model) -> None:
    text, state = tokens(6, batch=1)[0], ref.precise_state()
    for _ in range(8):
        text = torch.cat((text, ref.logits(state, text)[-1:].argmax(-1)))
    logits = cached_logits(model, text[None], [6, *range(7, 15)])
    assert logits[0, 5:-1].argmax(-1).tolist() == text[6:].tolist()
    torch.testing.assert_close(logits[0].double(), ref.logits(state, text), rtol=0, atol=3e-4)


def test_packed_documents_are_computed_as_if_alone(model) -> None:
    ids = tokens(11, batch=1)
    segments = torch.tensor([[0] * 4 + [1] * 7])
    alone = torch.cat([model(ids[:, :4]), model(ids[:, 4:])], 1)
    torch.testing.assert_close(model(ids, segment_ids=segments), alone, rtol=0, atol=3e-4)


@pytest.mark.parametrize("end", [1, 3, 4])
def test_stages_send_all_sources_that_later_layers_read(model, end) -> None:
    ids = tokens(5)
    hidden = model.run_stage(Stage(range(end), first=True, last=False), None, ids)
    assert hidden.shape[-1] == ref.H * model.config.sources_before(end)
    logits = model.run_stage(Stage(range(end, ref.LAYERS), first=False, last=True), hidden, ids)
    assert torch.equal(logits, model(ids))


def test_both_halves_of_the_activation_are_bounded() -> None:
    x = torch.tensor([[1e4, 1e4], [-3.0, 2.0], [0.5, -1e4]], dtype=torch.bfloat16)
    found = activate("situ:4.0,25.0", x)
    gate, up = x.double().unbind(-1)
    expected = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.squeeze(-1).double(), expected, rtol=4e-3, atol=0)
    assert found[0].item() == 100.0


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    config = load_config(preset="kimi-k3", overrides=["train.train_iters=1"], host=host).config
    hidden, width, latent, expert = 7168, 96 * 128, 3584, 3072
    residuals = 2 * 2 * hidden
    delta = 5 * hidden * width + 96 * hidden + 128 * (hidden + width) + 3 * 4 * width + 96 + width + 128
    attention = hidden * 1536 + 1536 + 1536 * 96 * 192 + hidden * 576 + 512 + 512 * 96 * 256 + 2 * hidden * width
    sparse = 896 * 3 * latent * expert + 2 * hidden * latent + latent + 896 * hidden + 896 + 3 * hidden * 2 * expert
    layers = 69 * delta + 24 * attention + 92 * sparse + 3 * hidden * 33792 + 93 * (2 * hidden + residuals)
    total = layers + 2 * 163840 * hidden + 3 * hidden
    assert canonical_size(host, config) == total
    # The bytes that the index of the published file states: experts in MXFP4, other parameters in 16 bits, some in 32,
    # A_log filled up to 128 numbers, and an image tower of 447,358,976 parameters.
    experts, fp32 = 92 * 896 * 3 * latent * expert, 69 * (3 * 4 * width + 96 + width + 128) + 92 * 896
    stored = experts * 17 // 32 + 2 * (total - experts) + 2 * fp32 + 69 * 32 * 4 + 2 * 447_358_976
    assert stored == 1_560_860_324_864


def test_flops_of_parts(model) -> None:
    """What Kimi Linear of the same sizes has, a wider gate of the delta nets, one of attention, and the residuals."""
    flops, without = flops_per_token(model.config, 16), ungated_flops_per_token(model.config, 16)
    width, linear = ref.HEADS * ref.SIZE, ref.LAYERS - len(ref.FULL)
    wider = ref.H * width - ref.SIZE * (ref.H + width)
    assert flops.linear_projections - without.linear_projections == linear * 2 * wider
    gate = 2 * ref.H * ref.ATTENTION["heads"] * ref.ATTENTION["value"]
    assert flops.attention_projections - without.attention_projections == len(ref.FULL) * gate
    # Layers 0 to 6, of runs of 3: attention, feed-forward; the LM head.
    sources = (1 + 2) + (2 + 2) + (2 + 2) + (2 + 3) + (3 + 3) + (3 + 3) + (3 + 4) + 4
    assert flops.residuals == 4 * ref.H * sources


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mla_use_output_gate": False}, "mla_use_output_gate=False is not supported"),
        ({"hidden_act": "silu"}, "hidden_act='silu' is not supported"),
        ({"model_type": "deepseek_v3"}, "text_config.model_type='deepseek_v3' is not supported"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config has no full_attn_layers, use_full_rank_gate"),
        (
            {"linear_attn_config": {**ref.TEXT["linear_attn_config"], "use_full_rank_gate": False}},
            "use_full_rank_gate=False is not supported",
        ),
        (
            {"linear_attn_config": {**ref.TEXT["linear_attn_config"], "window": 4}},
            "linear_attn_config has keys that are not known: window",
        ),
    ],
)
def test_a_configuration_that_cannot_be_read(fields, words) -> None:
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config({**ref.EXTERNAL, "text_config": {**ref.TEXT, **fields}})
