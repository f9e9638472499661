"""BERT against `transformers`, in its own form and in Megatron's: hidden states, logits, losses, gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.models.bert_reference import (
    BERT_SHAPE,
    assert_round_trip,
    assert_same,
    assert_same_gradients,
    bert_batch,
    from_reference,
    make_reference,
)

from mt_core.nn.loss import weighted_sum
from mt_models.bert.hugging_face import HUGGING_FACE
from mt_models.bert.model import build_bert_loss
from mt_models.hugging_face import load_reference

pytest.importorskip("transformers")
THEIR_INPUTS = {"tokens": "input_ids", "tokentype_ids": "token_type_ids", "padding_mask": "attention_mask"}


def inputs_of(batch) -> tuple[dict, dict]:
    """The arrays that the models take, by our names and by theirs."""
    ours = {name: batch[name] for name in THEIR_INPUTS}
    return ours, {THEIR_INPUTS[name]: value for name, value in ours.items()}


@pytest.mark.parametrize("name", ["BertForPreTraining", "MegatronBertForPreTraining"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_states_logits_losses_and_gradients_equal_the_reference(host, name, backend) -> None:
    reference = make_reference(name, BERT_SHAPE)
    model = from_reference(host, HUGGING_FACE, reference, attention_backend=backend)
    batch = bert_batch()
    ours_in, theirs_in = inputs_of(batch)
    ours, theirs = model(**ours_in), reference(**theirs_in, output_hidden_states=True)
    counted = batch["padding_mask"].bool()  # what stands at padding is nobody's concern
    assert_same(ours.hidden_states[counted], theirs.hidden_states[-1][counted])
    assert_same(ours.logits[counted], theirs.prediction_logits[counted])
    assert_same(ours.binary_logits, theirs.seq_relationship_logits)

    losses = build_bert_loss(None)(ours, batch)
    loss = weighted_sum(losses, batch["loss_mask"]) / batch["loss_mask"].sum()
    words = F.cross_entropy(theirs.prediction_logits.transpose(1, 2), batch["labels"], ignore_index=-1)
    order = F.cross_entropy(theirs.seq_relationship_logits, batch["is_random"], reduction="none")
    share = batch["loss_mask"].sum(1) / batch["loss_mask"].sum()
    expected = words + (order * share).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    assert_same_gradients(model, reference, HUGGING_FACE)


def test_with_equally_many_masked_words_the_loss_is_the_references_own(host) -> None:
    reference = make_reference("BertForPreTraining", BERT_SHAPE)
    model = from_reference(host, HUGGING_FACE, reference)
    batch = bert_batch()
    masked = torch.zeros(4, 13, dtype=torch.bool)
    masked[:, 1:3] = True
    batch |= {"labels": torch.where(masked, batch["labels"].abs(), -100), "loss_mask": masked.float()}
    ours_in, theirs_in = inputs_of(batch)
    expected = reference(**theirs_in, labels=batch["labels"], next_sentence_label=batch["is_random"]).loss
    losses = build_bert_loss(None)(model(**ours_in), batch)
    loss = weighted_sum(losses, batch["loss_mask"]) / batch["loss_mask"].sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["BertModel", "MegatronBertModel", "BertForMaskedLM", "BertForNextSentencePrediction"])
def test_other_sets_of_heads(host, name) -> None:
    reference = make_reference(name, BERT_SHAPE, hidden_act="gelu_new")
    model = from_reference(host, HUGGING_FACE, reference)
    batch = bert_batch()
    ours_in, theirs_in = inputs_of(batch)
    ours, theirs = model(**ours_in), reference(**theirs_in)
    if name.endswith("Model"):
        counted = batch["padding_mask"].bool()
        assert_same(ours.hidden_states[counted], theirs.last_hidden_state[counted])
        assert_same(ours.pooled, theirs.pooler_output)
        assert ours.logits is None
        assert ours.binary_logits is None
    elif name.endswith("MaskedLM"):
        assert_same(ours.logits[batch["padding_mask"] == 1], theirs.logits[batch["padding_mask"] == 1])
        assert ours.pooled is None
    else:
        assert_same(ours.binary_logits, theirs.logits)
    assert_round_trip(model, reference, HUGGING_FACE)


@pytest.mark.parametrize("name", ["BertForPreTraining", "MegatronBertForPreTraining"])
def test_names_and_configuration_make_the_round_trip(host, name) -> None:
    reference = make_reference(name, BERT_SHAPE)
    assert_round_trip(from_reference(host, HUGGING_FACE, reference), reference, HUGGING_FACE)


def test_defaults_are_one_text_without_padding(host) -> None:
    reference = make_reference("BertForPreTraining", BERT_SHAPE)
    model = from_reference(host, HUGGING_FACE, reference)
    tokens = bert_batch()["tokens"]
    assert_same(model(tokens).logits, reference(tokens).prediction_logits)


def test_the_first_checkpoints_names_of_norms_are_understood(host) -> None:
    reference = make_reference("BertForPreTraining", BERT_SHAPE)
    expected = dict(from_reference(host, HUGGING_FACE, reference).named_parameters())
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in reference.state_dict().items()
    }
    assert any(name.endswith("gamma") for name in old)
    model = from_reference(host, HUGGING_FACE, make_reference("BertForPreTraining", BERT_SHAPE, scale=0.1))
    load_reference(model, old, HUGGING_FACE)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())
