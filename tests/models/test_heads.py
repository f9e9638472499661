"""Heads that choose against `transformers`: logits, losses, every gradient, padding on either side, bad input."""

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

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.loss import weighted_sum
from mt_core.nn.model import as_generator
from mt_models.heads import hugging_face as maps
from mt_models.heads.model import classification_loss

pytest.importorskip("transformers")

GPT2_SHAPE = {
    "vocab_size": 101,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 24,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
LLAMA_SHAPE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
MODERNBERT_SHAPE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "local_attention": 6,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
    "attn_implementation": "eager",
}
CASES = {
    "BertForSequenceClassification": (maps.BERT_CLASSIFICATION, BERT_SHAPE | {"classifier_dropout": 0.3}),
    "MegatronBertForSequenceClassification": (maps.BERT_CLASSIFICATION, BERT_SHAPE),
    "ModernBertForSequenceClassification": (maps.MODERNBERT_CLASSIFICATION, MODERNBERT_SHAPE),
    "ModernBertForSequenceClassification of means": (
        maps.MODERNBERT_CLASSIFICATION,
        MODERNBERT_SHAPE | {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
    ),
    "GPT2ForSequenceClassification": (maps.GPT_CLASSIFICATION, GPT2_SHAPE),
    "LlamaForSequenceClassification": (maps.LLAMA_CLASSIFICATION, LLAMA_SHAPE),
}


def labelled() -> dict[str, torch.Tensor]:
    """Four padded rows, of which one has no label."""
    return bert_batch() | {"labels": torch.tensor([2, 0, -1, 1]), "loss_mask": torch.tensor([1.0, 1.0, 0.0, 1.0])}


@pytest.mark.parametrize("name", CASES)
def test_classes_losses_and_gradients_equal_the_reference(host, name) -> None:
    family, shape = CASES[name]
    reference = make_reference(name.partition(" ")[0], shape, num_labels=3)
    model = from_reference(host, family, reference, "train.loss=classification")
    batch = labelled()
    types = {"token_type_ids": batch["tokentype_ids"]} if family is maps.BERT_CLASSIFICATION else {}
    theirs = reference(batch["tokens"], attention_mask=batch["padding_mask"], **types).logits
    ours = model(**{key: batch[key] for key in model.inputs})
    assert_same(ours, theirs)
    loss = weighted_sum(classification_loss(ours, batch), batch["loss_mask"]) / batch["loss_mask"].sum()
    expected = F.cross_entropy(theirs, batch["labels"], ignore_index=-1)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    assert_same_gradients(model, reference, family)
    assert_round_trip(model, reference, family)


def test_scores_of_several_texts_equal_the_reference(host) -> None:
    reference = make_reference("BertForMultipleChoice", BERT_SHAPE)
    model = from_reference(host, maps.BERT_MULTIPLE_CHOICE, reference, "train.loss=classification")
    batch = {key: value.view(2, 2, 13) for key, value in bert_batch().items() if value.ndim == 2}
    labels = torch.tensor([1, 0])
    theirs = reference(
        batch["tokens"], attention_mask=batch["padding_mask"], token_type_ids=batch["tokentype_ids"], labels=labels
    )
    ours = model(**{key: batch[key] for key in model.inputs})
    assert_same(ours, theirs.logits)
    loss = classification_loss(ours, {"labels": labels}).mean()
    assert loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    loss.backward()
    theirs.loss.backward()
    # A bias that is added to every score alike has a gradient of 0 up to rounding: the choice does not depend on it.
    assert model.multichoice_head.bias.grad.abs() < 1e-6
    model.multichoice_head.bias.grad.fill_(1.0)
    reference.classifier.bias.grad.fill_(1.0)
    assert_same_gradients(model, reference, maps.BERT_MULTIPLE_CHOICE)
    assert_round_trip(model, reference, maps.BERT_MULTIPLE_CHOICE)


@pytest.mark.parametrize("family", ["gpt_classification", "llama_classification"])
def test_padding_on_either_side_changes_no_class(build, randomize, family) -> None:
    keys = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}
    keys |= {"max_position_embeddings": 16} if family.startswith("gpt") else {}
    model = build("train.loss=classification", **keys, family=family)
    randomize(model)
    tokens = torch.randint(0, 50, (1, 7), generator=torch.Generator().manual_seed(3))
    alone = model(tokens)
    for left, right in ((0, 4), (4, 0), (2, 3)):
        mask = F.pad(torch.ones(1, 7, dtype=torch.long), (left, right))
        assert_same(model(F.pad(tokens, (left, right), value=9), padding_mask=mask), alone)


@pytest.mark.parametrize("family", ["gpt_multiple_choice", "llama_multiple_choice"])
def test_each_text_has_the_score_that_it_has_alone(build, randomize, family) -> None:
    keys = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}
    keys |= {"max_position_embeddings": 16} if family.startswith("gpt") else {}
    model = build("train.loss=classification", **keys, family=family)
    randomize(model)
    tokens = torch.randint(0, 50, (2, 3, 7), generator=torch.Generator().manual_seed(3))
    scores = model(tokens)
    assert scores.shape == (2, 3)
    assert_same(scores[1, 2], model(tokens[1:, 2:])[0, 0])
    with pytest.raises(ConfigError, match="does not generate text"):
        as_generator(model)


def test_a_preset_of_the_base_serves_the_head(host) -> None:
    options = ["model.family=bert_classification", "model.num_classes=3", "train.loss=classification"]
    config = load_config(preset="bert-base-cased", overrides=[*options, "train.train_iters=1"], host=host).config
    assert config.model.hidden_size == 768
    assert config.model.num_classes == 3
    assert not config.model.add_lm_head


SMALL = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50, "max_position_embeddings": 16}
MNLI = ["data.dataset_type=mnli", 'data.data_path=["x.tsv"]', "train.loss=classification"]


@pytest.mark.parametrize(
    ("family", "keys", "options", "words"),
    [
        ("bert_classification", {}, ["train.loss=cross_entropy"], r"is for predicted words.*use train.loss="),
        ("bert_classification", {}, MNLI, r"num_classes=2 does not fit data.dataset_type=mnli, which has 3"),
        ("gpt_multiple_choice", {}, MNLI, r"takes several texts; use model.family=gpt_classification"),
        (
            "bert_classification",
            {},
            ["data.dataset_type=race", 'data.data_path=["x"]', "train.loss=classification"],
            r"use model.family=bert_multiple_choice",
        ),
        ("bert_classification", {"add_lm_head": True}, [], r"add_lm_head"),
        ("gpt_classification", {"num_attention_heads": 5}, [], r"not divisible by model.num_attention_heads=5"),
    ],
)
def test_what_does_not_fit_the_task_is_refused(build, family, keys, options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(*options, **SMALL | keys, family=family)
