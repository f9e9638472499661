"""BART, mBART and both Blenderbots against `transformers`: logits, loss, every gradient; decoding; names both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.infer.decoding import cached_logits, in_pieces
from tests.infer.engines import run, tokens_of
from tests.models.bert_reference import (
    assert_round_trip,
    assert_same,
    built,
    canonical_size,
    from_reference,
    make_reference,
    reference_size,
)
from torch import Tensor, nn

from mt_ckpt.hugging_face.family import identify
from mt_core.config.loading import load_config
from mt_core.config_map import model_section
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.layout import parameter_layouts
from mt_core.nn.loss import cross_entropy, weighted_sum
from mt_core.parallel.context import ParallelContext
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_infer.sampling.parameters import SamplingParameters
from mt_models.bart.config import PRESETS
from mt_models.bart.hugging_face import CLASSES, CONFIG_MAPS, HUGGING_FACE
from mt_models.hugging_face import load_reference

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 101,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 24,
    "attn_implementation": "eager",
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("bart", {}),
    "bart, scaled embeddings, one decoder layer": ("bart", {"scale_embedding": True, "decoder_layers": 1}),
    "mbart": ("mbart", {"scale_embedding": True, "activation_function": "relu"}),
    "blenderbot": ("blenderbot", {"scale_embedding": True}),
    "blenderbot-small": ("blenderbot-small", {"activation_function": "gelu_new"}),
    "blenderbot-small, scaled embeddings": ("blenderbot-small", {"scale_embedding": True}),
}


def test_dropout_between_the_matrices_of_the_feed_forward(host) -> None:
    """With every element dropped, the feed-forward adds the bias of its second matrix alone, as transformers' does."""
    reference = reference_of("mbart", activation_dropout=1.0, dropout=0.0, attention_dropout=0.0)
    model = from_reference(host, HUGGING_FACE, reference)
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = reference.train()(input_ids=tokens, decoder_input_ids=tokens).logits
        actual = model.train()(encoder_tokens=tokens, decoder_tokens=tokens)
        assert not torch.allclose(actual, model.eval()(encoder_tokens=tokens, decoder_tokens=tokens), atol=1e-3)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("encoder_layerdrop", 0.1), ("decoder_layerdrop", 0.1), ("num_attention_heads", 2), ("hidden_size", 64)],
)
def test_what_trains_or_computes_otherwise_is_refused(field: str, value: float) -> None:
    external = {**reference_of("bart").config.to_dict(), field: value}
    with pytest.raises(ConfigError, match=field):
        HUGGING_FACE.read_config(external)


def reference_of(kind: str, **more: Any) -> nn.Module:
    name, keys = KINDS[kind]
    reference = make_reference(CLASSES[name], SHAPE | keys | more, scale=0.15)
    # A buffer, which is zeros in a new model.
    reference.final_logits_bias.copy_(0.3 * torch.randn(1, 101, generator=torch.Generator().manual_seed(3)))
    return reference


def bare_config(kind: str) -> dict[str, Any]:
    """config.json of a new configuration, which has no `architectures`."""
    return {**getattr(transformers, CLASSES[kind]).config_class().to_dict(), "architectures": None}


def samples() -> dict[str, Tensor]:
    """Three rows: 15 encoder positions of which some are padding, 9 decoder positions with padding of labels."""
    generator = torch.Generator().manual_seed(4)
    lengths, places = torch.tensor([[15], [6], [11]]), torch.arange(15)[None]
    labels = torch.randint(3, 101, (3, 9), generator=generator)
    labels[1, 5:] = -1
    return {
        "encoder_tokens": torch.randint(3, 101, (3, 15), generator=generator),
        "encoder_mask": (places < lengths).long(),
        "decoder_tokens": torch.randint(3, 101, (3, 9), generator=generator),
        "labels": labels,
        "loss_mask": (labels != -1).float(),
    }


def encoder_texts(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Each row's tokens without padding, as requests to generate have them."""
    rows = zip(batch["encoder_tokens"], batch["encoder_mask"], strict=True)
    return [{"encoder_tokens": tokens[seen.bool()][None]} for tokens, seen in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_logits_loss_and_gradients_equal_the_reference(host, kind: str, backend: str) -> None:
    reference = reference_of(kind)
    model = from_reference(host, HUGGING_FACE, reference, attention_backend=backend)
    batch = samples()
    theirs = reference(
        input_ids=batch["encoder_tokens"],
        attention_mask=batch["encoder_mask"],
        decoder_input_ids=batch["decoder_tokens"],
    )
    memory, seen = model.encode(batch["encoder_tokens"], batch["encoder_mask"]), batch["encoder_mask"].bool()
    assert_same(memory[seen], theirs.encoder_last_hidden_state[seen])
    logits = model(**{name: batch[name] for name in model.inputs})
    assert_same(logits, theirs.logits)
    loss = weighted_sum(cross_entropy(logits, batch), batch["loss_mask"]) / batch["loss_mask"].sum()
    expected = F.cross_entropy(theirs.logits.transpose(1, 2), batch["labels"], ignore_index=-1)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    assert_same_trained_gradients(model, reference)


def assert_same_trained_gradients(model: nn.Module, reference: nn.Module) -> None:
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    # The bias of the logits is no parameter there, and is not trained here.
    theirs["final_logits_bias"] = torch.zeros(1, 101)
    layouts, parameters = parameter_layouts(model), dict(model.named_parameters())
    for name, gradient in HUGGING_FACE.name_map(model.config).import_value(theirs.__getitem__):
        if name == "output_layer.bias":
            assert parameters[name].grad is None
            continue
        assert gradient.abs().max() > 0, name
        close = {"atol": 1e-5 * gradient.abs().max().item() + 1e-7, "rtol": 1e-3}
        ours = layouts[name].to_canonical(parameters[name].grad)
        torch.testing.assert_close(ours, gradient, **close, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_step_by_step_equals_the_full_forward(host, kind: str) -> None:
    model = from_reference(host, HUGGING_FACE, reference_of(kind))
    batch = samples()
    full = model(batch["encoder_tokens"], batch["decoder_tokens"], batch["encoder_mask"])
    decoded = cached_logits(model, batch["decoder_tokens"], in_pieces(9, 3), encoder_texts(batch))
    torch.testing.assert_close(decoded, full, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bart", "mbart", "blenderbot", "blenderbot-small"])
def test_greedy_generation_equals_the_references(host, kind: str) -> None:
    # With as many layers on both sides: this release's cache counts those of the encoder.
    reference = reference_of(kind, decoder_layers=2)
    reference.generation_config = transformers.GenerationConfig(decoder_start_token_id=2, pad_token_id=1)
    model = from_reference(host, HUGGING_FACE, reference)
    batch = samples()
    expected = reference.generate(
        batch["encoder_tokens"], attention_mask=batch["encoder_mask"], max_new_tokens=10, do_sample=False
    )
    options = InferenceConfig(cache_memory_gb=0.01, cache_block_size=4, max_requests=2)
    engine = InferenceEngine(model, None, ParallelContext(), options, longest=11)
    greedy = SamplingParameters(temperature=0.0, max_tokens=10)
    events = run(engine, [[2]] * 3, greedy, encoder_texts(batch))
    assert [[2, *tokens_of(row)] for row in events] == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_configuration_make_the_round_trip(host, kind: str) -> None:
    reference = reference_of(kind)
    assert_round_trip(from_reference(host, HUGGING_FACE, reference), reference, HUGGING_FACE)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_sizes_of_the_reference(host, preset: str) -> None:
    config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
    external = HUGGING_FACE.write_config(config.model)
    (architecture,) = external.pop("architectures")
    external.pop("model_type")
    kind = getattr(transformers, architecture)
    size = reference_size(lambda: kind(kind.config_class(**external))) + config.model.vocab_size  # a buffer there
    assert canonical_size(host, config) == size


def test_a_class_has_its_own_defaults(host) -> None:
    for kind, name in CLASSES.items():
        defaults = getattr(transformers, name).config_class()
        read, bare = (HUGGING_FACE.read_config(one) for one in (defaults.to_dict(), {"model_type": kind}))
        assert read == bare
        assert set(CONFIG_MAPS) == set(CLASSES)


@pytest.mark.parametrize("kind", ["blenderbot", "blenderbot-small"])
def test_a_model_in_memory_without_the_name_of_its_class_is_read(kind: str, host) -> None:
    """A T5 with learned positions has the same model_type: its reasons must not hide the family that fits."""
    external = {**bare_config(kind), "scale_embedding": True}
    section = model_section(external, host)
    assert (section["family"], section["scale_embedding"]) == ("bart", True)


def test_where_no_family_fits_the_reasons_of_all_are_named(host) -> None:
    external = {**bare_config("blenderbot"), "scale_embedding": True, "decoder_attention_heads": 2}
    both = (
        "shared_position_embeddings is not true.*bart: encoder_attention_heads=32 and decoder_attention_heads=2 differ"
    )
    for read in (lambda: model_section(external, host), lambda: identify(external, [], host)):
        with pytest.raises(ConfigError, match=both):
            read()


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder_attention_heads": 2}, "encoder_attention_heads=4 and decoder_attention_heads=2 differ"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported"),
        ({"normalize_before": True}, "normalize_before=True is not supported"),
        ({"extra_pos_embeddings": 3}, "extra_pos_embeddings=3 is not supported; it can be 2"),
        ({"shared_position_embeddings": True}, "shared_position_embeddings=True is not supported"),
        ({"adapter_size": 4}, "not known: adapter_size=4"),
        ({"activation_function": "tanh"}, "activation_function='tanh' is not supported"),
    ],
)
def test_a_configuration_of_another_model_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config(reference_of("bart").config.to_dict() | change)


def test_what_the_format_cannot_say_is_not_written(host) -> None:
    change = ["train.train_iters=1", "model.position_offset=1"]
    config = load_config(preset="bart-base", overrides=change, host=host).config
    with pytest.raises(ConfigError, match="model.position_offset=1 cannot be written in Hugging Face's format"):
        HUGGING_FACE.write_config(config.model)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_attention_heads": 5}, "hidden_size=768 is not divisible by model.num_attention_heads=5"),
        ({"max_position_embeddings": 100}, "data.seq_length=1024 is longer than model.max_position_embeddings=100"),
        ({"normalize_embedding": "false", "norm_before_positions": "true"}, "norm_before_positions=true places"),
    ],
)
def test_a_model_that_cannot_be_is_refused(host, keys: dict[str, Any], words: str) -> None:
    overrides = ["train.train_iters=1", *(f"model.{key}={value}" for key, value in keys.items())]
    with pytest.raises(ConfigError, match=words):
        load_config(preset="bart-base", overrides=overrides, host=host)


def test_an_output_matrix_that_is_said_to_be_tied_must_be(host) -> None:
    reference = reference_of("bart")
    model = from_reference(host, HUGGING_FACE, reference)
    with pytest.raises(CheckpointError, match=r"ties lm_head.weight to model.shared.weight, but the two differ"):
        load_reference(model, reference.state_dict() | {"lm_head.weight": torch.ones(101, 32)}, HUGGING_FACE)


def test_the_bias_of_the_logits_is_not_trained(host) -> None:
    config = load_config(preset="bart-base", overrides=["train.train_iters=1", "model.num_layers=1"], host=host).config
    frozen = {name for name, value in built(host, config, "meta").named_parameters() if not value.requires_grad}
    assert frozen == {"output_layer.bias"}
