"""RWKV-7 against its formulas in plain torch, and the two forms of its recurrence against one another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.infer.decoding import cached_logits
from tests.models import rwkv7_reference as ref
from tests.models.bert_reference import built, canonical_size, config_of

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.layout import parameter_layouts
from mt_models.blocks.rwkv7_rule import LOWEST_DECAY, Rwkv7Inputs, chunked_rwkv7_rule, recurrent_rwkv7_rule
from mt_models.hugging_face import load_reference, to_reference
from mt_models.rwkv7.config import flops_per_token
from mt_models.rwkv7.hugging_face import HUGGING_FACE


@pytest.fixture
def model(host):
    found = built(host, config_of(host, HUGGING_FACE, ref.EXTERNAL, chunk_size=4))
    load_reference(found, ref.random_state(), HUGGING_FACE)
    return found


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, ref.SIZES["vocab"], (2, length), generator=torch.Generator().manual_seed(3))


def test_logits_loss_and_gradients_equal_the_formulas(model) -> None:
    state = {name: value.requires_grad_() for name, value in ref.random_state().items()}
    ids = tokens(18)
    ours, theirs = model(ids), torch.stack([ref.logits(state, row) for row in ids])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
    losses = [F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for x in (ours, theirs)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    gradients = {name: value.grad for name, value in state.items()}
    layouts = parameter_layouts(model)
    for name, expected in HUGGING_FACE.name_map(model.config).import_value(gradients.__getitem__):
        found = layouts[name].to_canonical(model.get_parameter(name).grad)
        assert expected.abs().max() > 0, name
        assert (found - expected).abs().max() < 2e-5 * expected.abs().max(), name


def test_names_make_the_round_trip_and_first_files_are_read(host, model) -> None:
    state = ref.random_state()
    written = to_reference(model, HUGGING_FACE)
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], state[name]) for name in state)
    for i in range(ref.SIZES["layers"]):
        rows = [state.pop(f"model.layers.{i}.attn.x_{name}") for name in "rwkvag"]
        state[f"model.layers.{i}.attn.x_x"] = torch.cat(rows).squeeze(1)
    again = built(host, config_of(host, HUGGING_FACE, ref.EXTERNAL))
    load_reference(again, state, HUGGING_FACE)
    assert all(torch.equal(again.get_parameter(name), value) for name, value in model.named_parameters())
    external = HUGGING_FACE.write_config(model.config)
    assert external["architectures"] == ["RWKV7ForCausalLM"]
    assert HUGGING_FACE.read_config(external).items() >= HUGGING_FACE.read_config(ref.EXTERNAL).items()


def test_decoding_from_a_state_computes_what_whole_sequences_do(model) -> None:
    ids = tokens(15)[:1]
    found = cached_logits(model, ids, [3, 4, 9, 10, 11, 15])
    torch.testing.assert_close(found, model(ids), rtol=1e-5, atol=2e-5)


def test_packed_documents_are_computed_as_if_alone(model) -> None:
    ids = tokens(14)[:1]
    segments = torch.tensor([[0] * 5 + [1] * 9])
    alone = torch.cat([model(ids[:, :5]), model(ids[:, 5:])], 1)
    torch.testing.assert_close(model(ids, segment_ids=segments), alone, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("chunk", [4, 64])
def test_chunks_compute_what_the_recurrence_does(chunk, with_documents) -> None:
    generator = torch.Generator().manual_seed(0)
    r, w, k, z, a = (torch.randn(2, 75, 3, 5, generator=generator, dtype=torch.float64) for _ in range(5))
    v = torch.randn(2, 75, 3, 4, generator=generator, dtype=torch.float64)
    # Some decays are the fastest that there are, over whole chunks.
    w = LOWEST_DECAY * (3 * w + 3).sigmoid()
    leaves = [x.requires_grad_() for x in (r, w, k, v, F.normalize(z, dim=-1), a.sigmoid())]
    segments = torch.tensor([[0] * 30 + [1] * 2 + [2] * 43, [0] * 5 + [4] * 70]) if with_documents else None
    state = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)
    found = []
    for rule, options in ((recurrent_rwkv7_rule, {}), (chunked_rwkv7_rule, {"chunk_size": chunk})):
        o, last = rule(Rwkv7Inputs(*leaves), state=state, segment_ids=segments, **options)
        found.append((o, last, *torch.autograd.grad(o.square().sum() + last.sum(), leaves)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


def test_fast_decays_in_fp32_lose_no_precision() -> None:
    """All decays at the bound: the factors of a chunk of 64 reach 3e8 and 1 / 3e8."""
    generator = torch.Generator().manual_seed(0)
    r, k, z, v = (torch.randn(1, 64, 2, 8, generator=generator) for _ in range(4))
    w, a = torch.full_like(r, LOWEST_DECAY), torch.rand(r.shape, generator=generator)
    inputs = Rwkv7Inputs(r, w, k, v, F.normalize(z, dim=-1), a)
    expected = recurrent_rwkv7_rule(Rwkv7Inputs(*(x.double() for x in inputs)))[0].float()
    torch.testing.assert_close(chunked_rwkv7_rule(inputs, chunk_size=64)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("preset", "millions"), [("rwkv7-0.1b", 191), ("rwkv7-0.4b", 451), ("rwkv7-1.5b", 1527), ("rwkv7-2.9b", 2948)]
)
def test_presets_have_the_sizes_of_the_published_models(host, preset, millions) -> None:
    config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
    assert round(canonical_size(host, config) / 1e6) == millions


def test_flops_of_parts(model) -> None:
    flops = flops_per_token(model.config, 16)
    assert flops.projections == 3 * 4 * 2 * 24 * 24
    assert flops.low_rank == 2 * 2 * 24 * (3 * (5 + 7 + 6) + 2 * 3)
    assert flops.feed_forward == 3 * 2 * 2 * 24 * 40


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"value_dim": 48}, "value_dim=48 is not supported"),
        ({"num_heads": 5}, "num_heads=5 is not hidden_size=24 / head_dim=8"),
        ({"norm_bias": False}, "norm_bias=False is not supported"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
        ({"attn": {"layers": [1]}}, "attn=.* is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(fields, words) -> None:
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config({**ref.EXTERNAL, **fields})
