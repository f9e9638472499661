"""T5 and T5 1.1 against `transformers`: both sides' hidden states, logits, loss, every gradient; decoding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.infer.decoding import cached_logits, in_pieces
from tests.infer.engines import run, tokens_of
from tests.models.bert_reference import (
    assert_round_trip,
    assert_same,
    assert_same_gradients,
    built,
    canonical_size,
    config_of,
    make_reference,
    reference_size,
)
from torch import nn

from mt_core.config.loading import load_config
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.loss import cross_entropy, weighted_sum
from mt_core.parallel.context import ParallelContext
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_infer.sampling.parameters import SamplingParameters
from mt_models.blocks.position_bias import buckets_of
from mt_models.hugging_face import load_reference
from mt_models.t5.config import PRESETS
from mt_models.t5.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 101,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "attn_implementation": "eager",
}
KINDS = {
    "T5": {},
    "T5 1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "tied without scaling, fewer decoder layers": {
        "feed_forward_proj": "gated-silu",
        "scale_decoder_outputs": False,
        "num_decoder_layers": 1,
    },
    "mT5": {},
    "UMT5": {},
    "UMT5, gated": {"feed_forward_proj": "gated-silu", "num_decoder_layers": 1},
}
STEMS = {"mT5": "MT5", "UMT5": "UMT5", "UMT5, gated": "UMT5"}
"""Whose class is not T5's."""


def reference_of(kind: str) -> nn.Module:
    keys = dict(KINDS[kind])
    scaled = keys.pop("scale_decoder_outputs", True)
    # Scores without a divisor are steep: with larger weights fp32 itself is off by more than the tolerance.
    reference = make_reference(f"{STEMS.get(kind, 'T5')}ForConditionalGeneration", SHAPE | keys, scale=0.2)
    if not scaled:
        reference.config.scale_decoder_outputs = False
    if kind in ("T5 1.1", "mT5"):
        # This release ties the output while it builds a model, published weights are not tied.
        reference.lm_head.weight = nn.Parameter(0.2 * torch.randn(101, 32, generator=torch.Generator().manual_seed(9)))
    return reference


def external_of(reference: nn.Module) -> dict:
    untied = reference.lm_head.weight is not reference.shared.weight
    return reference.config.to_dict() | ({"tie_word_embeddings": False} if untied else {})


def ours_of(host, reference: nn.Module, **keys) -> nn.Module:
    model = built(host, config_of(host, HUGGING_FACE, external_of(reference), **keys))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    load_reference(model, reference.state_dict(), HUGGING_FACE)
    return model


def samples() -> dict[str, torch.Tensor]:
    """Three rows: 15 encoder positions of which some are padding, 9 decoder positions with padding of labels."""
    generator = torch.Generator().manual_seed(4)
    lengths, places = torch.tensor([[15], [6], [11]]), torch.arange(15)[None]
    labels = torch.randint(0, 101, (3, 9), generator=generator)
    labels[1, 5:] = -1
    return {
        "encoder_tokens": torch.randint(1, 101, (3, 15), generator=generator),
        "encoder_mask": (places < lengths).long(),
        "decoder_tokens": torch.randint(1, 101, (3, 9), generator=generator),
        "labels": labels,
        "loss_mask": (labels != -1).float(),
    }


def encoder_texts(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each row's tokens without padding, as requests to generate have them."""
    rows = zip(batch["encoder_tokens"], batch["encoder_mask"], strict=True)
    return [{"encoder_tokens": tokens[seen.bool()][None]} for tokens, seen in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_states_logits_loss_and_gradients_equal_the_reference(host, kind, backend) -> None:
    reference = reference_of(kind)
    model = ours_of(host, reference, attention_backend=backend)
    batch = samples()
    theirs = reference(
        input_ids=batch["encoder_tokens"],
        attention_mask=batch["encoder_mask"],
        decoder_input_ids=batch["decoder_tokens"],
        output_hidden_states=True,
    )
    memory = model.encode(batch["encoder_tokens"], batch["encoder_mask"])
    seen = batch["encoder_mask"].bool()
    assert_same(memory[seen], theirs.encoder_last_hidden_state[seen])
    states = model.decoder_states(batch["decoder_tokens"], memory, batch["encoder_mask"])
    assert_same(states, theirs.decoder_hidden_states[-1])
    logits = model(**{name: batch[name] for name in model.inputs})
    assert_same(logits, theirs.logits)

    loss = weighted_sum(cross_entropy(logits, batch), batch["loss_mask"]) / batch["loss_mask"].sum()
    expected = F.cross_entropy(theirs.logits.transpose(1, 2), batch["labels"], ignore_index=-1)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    assert_same_gradients(model, reference, HUGGING_FACE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_decoding_step_by_step_equals_the_full_forward(host, kind, backend) -> None:
    model = ours_of(host, reference_of(kind), attention_backend=backend)
    batch = samples()
    full = model(batch["encoder_tokens"], batch["decoder_tokens"], batch["encoder_mask"])
    decoded = cached_logits(model, batch["decoder_tokens"], in_pieces(9, 3), encoder_texts(batch))
    torch.testing.assert_close(decoded, full, atol=5e-5, rtol=1e-4)


def test_greedy_generation_equals_the_references(host) -> None:
    # With as many layers on both sides: this release's cache counts those of the encoder.
    reference = make_reference("T5ForConditionalGeneration", SHAPE | {"num_decoder_layers": 2})
    model = ours_of(host, reference)
    batch = samples()
    expected = reference.generate(
        batch["encoder_tokens"],
        attention_mask=batch["encoder_mask"],
        max_new_tokens=10,
        do_sample=False,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    options = InferenceConfig(cache_memory_gb=0.01, cache_block_size=4, max_requests=2)
    engine = InferenceEngine(model, None, ParallelContext(), options, longest=11)
    greedy = SamplingParameters(temperature=0.0, max_tokens=10)
    events = run(engine, [[0]] * 3, greedy, encoder_texts(batch))
    assert [[0, *tokens_of(row)] for row in events] == expected.tolist()


def test_an_untied_umt5_is_scaled(host) -> None:
    """The class takes every file for a tied one. One that is not scaled cannot be written: the class would scale it."""
    reference = reference_of("UMT5")
    reference.lm_head.weight = nn.Parameter(0.2 * torch.randn(101, 32, generator=torch.Generator().manual_seed(9)))
    batch = samples()
    theirs = reference(input_ids=batch["encoder_tokens"], decoder_input_ids=batch["decoder_tokens"]).logits
    model = ours_of(host, reference)
    assert_same(model(batch["encoder_tokens"], batch["decoder_tokens"]), theirs)
    with pytest.raises(ConfigError, match=r"scale_untied_output=False cannot be written .* it can be True"):
        HUGGING_FACE.write_config(model.config.model_copy(update={"scale_untied_output": False}))


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_configuration_make_the_round_trip(host, kind) -> None:
    reference = reference_of(kind)
    external = external_of(reference)
    reference.config.to_dict = lambda: external
    assert_round_trip(ours_of(host, reference), reference, HUGGING_FACE)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 10), (16, 64)])
def test_ranges_of_distances_are_those_of_the_reference(bidirectional, buckets, furthest) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-300, 300)[None]
    expected = T5Attention._relative_position_bucket(distance, bidirectional, buckets, furthest)
    assert torch.equal(buckets_of(distance, buckets, furthest, bidirectional=bidirectional), expected)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [name for name in PRESETS if not name.startswith("megatron")])
def test_presets_have_the_sizes_of_the_reference(host, preset) -> None:
    config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
    external = HUGGING_FACE.write_config(config.model)
    external.pop("model_type")
    (name,) = external.pop("architectures")
    kind = getattr(transformers, name)
    size = reference_size(lambda: kind(kind.config_class(**external)))
    if config.model.untie_embeddings_and_output_weights:
        size += config.model.vocab_size * config.model.hidden_size  # which this release ties while it builds a model
    assert canonical_size(host, config) == size


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        ("t5-small", 60.5),
        ("mt5-small", 300.2),
        ("umt5-base", 591.0),
        ("t5-11b", 11307.3),
        ("t5-v1.1-xxl", 11135.3),
        ("megatron-t5-220m", 223.58),
    ],
)
def test_well_known_sizes(host, preset, millions) -> None:
    config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
    assert canonical_size(host, config) / 1e6 == pytest.approx(millions, rel=2e-3)


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"feed_forward_proj": "mish", "dense_act_fn": "mish"},
            "feed_forward_proj='mish', dense_act_fn='mish' .* relu",
        ),
        ({"dense_act_fn": "sigmoid"}, "dense_act_fn='sigmoid' and is_gated_act=False are not supported together"),
        ({"is_decoder": True}, "is_decoder=True is not supported"),
        ({"prefix_layers": 1}, "not known: prefix_layers=1"),
    ],
)
def test_a_configuration_of_another_model_is_refused(change, words) -> None:
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config(reference_of("T5").config.to_dict() | change)


def test_an_output_matrix_that_is_said_to_be_tied_must_be(host) -> None:
    reference = reference_of("T5")
    model = ours_of(host, reference)
    with pytest.raises(CheckpointError, match=r"ties lm_head.weight to shared.weight, but the two differ"):
        load_reference(model, reference.state_dict() | {"lm_head.weight": torch.ones(101, 32)}, HUGGING_FACE)


@pytest.mark.parametrize(("stated", "scaled"), [({}, False), ({"scale_decoder_outputs": True}, True)])
def test_a_file_without_lm_head_is_tied_whatever_it_says(stated, scaled) -> None:
    """The class ties its LM head then, and reads tie_word_embeddings as the scale of its input."""
    external = reference_of("T5").config.to_dict() | {"tie_word_embeddings": False}
    del external["scale_decoder_outputs"]
    keys = HUGGING_FACE.read_config(HUGGING_FACE.held({**external, **stated}, ["shared.weight"]))
    assert not keys["untie_embeddings_and_output_weights"]
    assert keys["scale_output"] is scaled


def test_what_the_format_cannot_say_is_not_written(host) -> None:
    """Megatron's T5 is written as a Blenderbot, where it is one; T5's own format has no words for the rest."""
    change = ["train.train_iters=1", "model.add_output_bias=false"]
    config = load_config(preset="megatron-t5-220m", overrides=change, host=host).config
    with pytest.raises(ConfigError, match="add_output_bias=False cannot be written as a Hugging Face blenderbot"):
        HUGGING_FACE.write_config(config.model)
