"""ModernBERT against `transformers`: hidden states, logits, loss, gradients, padding; and its sizes and rules."""

from __future__ import annotations

import pytest
import torch
from tests.models.bert_reference import (
    assert_round_trip,
    assert_same,
    assert_same_gradients,
    canonical_size,
    from_reference,
    make_reference,
    reference_size,
)
from tests.models.decoder_reference import without_kept_ids

from mt_core.config.checks import as_world
from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.loss import weighted_sum
from mt_models.bert.model import build_bert_loss
from mt_models.modernbert.config import flops_per_token
from mt_models.modernbert.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 36,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "intermediate_size": 44,
    "max_position_embeddings": 40,
    "local_attention": 7,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
BIASES = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
OTHER = {"hidden_activation": "silu", "classifier_activation": "relu", "decoder_bias": False, "local_attention": 2}
TABLES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}


def padded_batch() -> dict[str, torch.Tensor]:
    """Three rows of 29; padding is longer than the window, so that most of it has no token within reach."""
    generator = torch.Generator().manual_seed(2)
    lengths, places = torch.tensor([29, 5, 17])[:, None], torch.arange(29)[None]
    padding = (places < lengths).long()
    masked = (places % 3 == 1) & (places < lengths)
    return {
        "tokens": torch.randint(1, 97, (3, 29), generator=generator) * padding,
        "padding_mask": padding,
        "labels": torch.where(masked, torch.randint(0, 97, (3, 29), generator=generator), -100),
        "loss_mask": masked.float(),
    }


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("keys", [{}, BIASES, {**OTHER, "rope_parameters": TABLES}])
def test_states_logits_loss_and_gradients_equal_the_reference(host, keys, backend) -> None:
    reference = make_reference("ModernBertForMaskedLM", SHAPE | keys, scale=0.2)
    model = from_reference(host, HUGGING_FACE, reference, "data.seq_length=32", attention_backend=backend)
    batch = padded_batch()
    ours = model(batch["tokens"], batch["padding_mask"])
    theirs = reference(batch["tokens"], batch["padding_mask"], labels=batch["labels"], output_hidden_states=True)
    counted = batch["padding_mask"].bool()
    assert_same(ours.hidden_states[counted], reference.model(batch["tokens"], batch["padding_mask"])[0][counted])
    assert_same(ours.logits[counted], theirs.logits[counted])
    losses = build_bert_loss(None)(ours, batch)
    loss = weighted_sum(losses, batch["loss_mask"]) / batch["loss_mask"].sum()
    assert loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    loss.backward()
    theirs.loss.backward()
    assert_same_gradients(model, reference, HUGGING_FACE)
    assert_round_trip(model, reference, HUGGING_FACE)


def test_a_model_without_a_head_embeds_texts_whatever_is_behind_them(host) -> None:
    reference = make_reference("ModernBertModel", SHAPE, scale=0.2)
    model = from_reference(host, HUGGING_FACE, reference, "data.seq_length=32")
    batch = padded_batch()
    found = model.embed(batch["tokens"], batch["padding_mask"], "document")
    for row, length in enumerate((29, 5, 17)):
        alone = reference(batch["tokens"][row : row + 1, :length]).last_hidden_state.mean(1)
        torch.testing.assert_close(found[row : row + 1], alone, rtol=1e-5, atol=1e-5)
    assert model(batch["tokens"]).logits is None
    assert_round_trip(model, reference, HUGGING_FACE)


def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    shapes = {
        "modernbert-base": {},
        "modernbert-large": {
            "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 2624
        },
    }  # fmt: skip
    for preset, keys in shapes.items():
        config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
        external = transformers.ModernBertConfig(**keys)
        expected = reference_size(lambda external=external: transformers.ModernBertForMaskedLM(external))
        assert canonical_size(host, config) == expected
        same = HUGGING_FACE.read_config(HUGGING_FACE.write_config(config.model))
        assert same == without_kept_ids(HUGGING_FACE.read_config(external.to_dict()))


def test_flops_count_the_keys_within_the_window(build) -> None:
    keys = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50, "local_attention": 4}
    flops = flops_per_token(build(family="modernbert", **keys).config, 8)
    # One layer with all 8 keys; two in which position 0 sees 3 keys, 1 sees 4, 2 to 5 see 5, 6 sees 4 and 7 sees 3.
    assert flops.attention_core == 4 * 32 * (8 + 2 * (3 + 4 + 4 * 5 + 4 + 3) / 8)
    assert flops.feed_forward == 3 * 2 * 3 * 32 * 48
    assert flops.output == 2 * 32 * 50


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported"),
        ({"mlp_dropout": 0.1}, "mlp_dropout=0.1 is not supported"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 3}, "layer_types=.* is not supported"),
        (
            {"rope_parameters": {**TABLES, "full_attention": {"rope_type": "linear", "factor": 2.0}}},
            "full_attention=.*'linear'.* rope_type can be default, with rope_theta$",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling=.* is not supported; it can be null"),
        ({"rope_parameters": TABLES, "global_rope_theta": 3.0}, "contradict each other"),
        ({"architectures": ["ModernBertForTokenClassification"]}, "architectures='ModernBertForTokenClassification'"),
        ({"hidden_activation": "relu"}, "hidden_activation='relu' is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config({"model_type": "modernbert", **external, **fields})


def test_parameters_of_scaled_frequencies_do_not_count_without_a_scaling() -> None:
    """transformers writes them beside the type default, and its classes read none of them."""
    further = {"factor": 2.0, "beta_fast": 2.0, "mscale": 0.4, "partial_rotary_factor": 0.5}
    tables = {kind: {**table, **further} for kind, table in TABLES.items()}
    plain, beside = (
        HUGGING_FACE.read_config({"model_type": "modernbert", "rope_parameters": table, **scaling})
        for table, scaling in ((TABLES, {}), (tables, {"rope_scaling": {"rope_type": "default", **further}}))
    )
    assert beside == plain


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["parallel.context_parallel_size=2"], "context_parallel_size=2 divides sequences"),
        (["model.num_attention_heads=32"], "is odd; rotary positions turn pairs"),
        (["data.dataset_type=bert", 'data.data_path=["x"]'], "set data.bert_binary_head=false"),
    ],
)
def test_impossible_settings_are_refused(host, settings, words) -> None:
    shape = ["model.family=modernbert", "model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=4"]
    with as_world(2), pytest.raises(ConfigError, match=words):
        load_config(overrides=[*shape, "model.vocab_size=64", *settings, "train.train_iters=1"], host=host)
