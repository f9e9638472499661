"""Qwen3-VL against `transformers`: logits, loss, every gradient, maps, resampled positions, decoding, bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.models.qwen3_vl_reference import make_reference
from tests.models.qwen_vl_reference import IMAGE, LENGTH, as_reference_inputs, image_batch, texts_with_images
from tests.models.vision_reference import (
    assert_near,
    assert_round_trip,
    assert_same_gradients,
    from_reference,
    randomize,
)

from mt_models.qwen3_vl.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")


def make_pair(host, **keys):
    reference = make_reference(**keys)
    randomize(reference)
    return from_reference(host, HUGGING_FACE, reference, {}, data={"seq_length": LENGTH}), reference


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e6}


@pytest.mark.parametrize(
    "keys",
    [{}, {"tied": True}, {"sparse": True}, {"rope_parameters": {**YARN, "mrope_section": [3, 1, 1]}}],
    ids=["dense", "tied", "experts", "yarn"],
)
def test_logits_loss_and_gradients_equal_the_reference(host, keys) -> None:
    """Three texts, with an image, with two, and without one; features of two layers are added to the decoder."""
    model, reference = make_pair(host, **keys)
    tokens, (images, grids) = texts_with_images(), image_batch()
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    theirs = reference(**as_reference_inputs(tokens, images, grids), labels=labels)
    logits = model(tokens, images, image_grids=grids)
    assert_near(logits, theirs.logits)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    loss.backward()
    theirs.loss.backward()
    assert_same_gradients(model, reference, HUGGING_FACE)
    # Files have experts the other way round than modules of transformers: tests/ckpt/test_convert_families.py reads and
    # writes them.
    if not keys.get("sparse"):
        assert_round_trip(model, reference, HUGGING_FACE)


def test_a_text_alone_is_the_decoder_alone(host) -> None:
    model, reference = make_pair(host)
    tokens = texts_with_images()[2:]
    assert torch.equal(model(tokens), model.language_model(tokens))
    assert_near(model(tokens), reference(tokens).logits)
