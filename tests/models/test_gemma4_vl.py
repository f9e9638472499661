"""Gemma 4 with pictures against `transformers`: logits, loss, every gradient, maps; decoding; bad input."""

from __future__ import annotations

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.infer.engines import OPTIONS, run, tokens_of
from tests.infer.test_qwen_vl import GREEDY, requested
from tests.models.gemma4_vl_reference import CASES, as_reference_inputs, make_reference, randomize_buffers
from tests.models.qwen_vl_reference import IMAGE, LENGTH, image_batch, texts_with_images
from tests.models.vision_reference import assert_same_training, from_reference, randomize

from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_models.gemma4_vl.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=list(CASES))
def pair(request, host):
    reference = make_reference(request.param)
    randomize(reference)
    randomize_buffers(reference)
    return from_reference(host, HUGGING_FACE, reference, {}, data={"seq_length": LENGTH}), reference


def test_logits_loss_and_gradients_equal_the_reference(pair) -> None:
    """Three texts, with an image, with two, and without one; images are longer than the window of local layers."""
    model, reference = pair
    tokens, (images, grids) = texts_with_images(), image_batch()
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    theirs = reference(**as_reference_inputs(tokens, images, grids), labels=labels)
    logits = model(tokens, images, image_grids=grids)
    assert_same_training((model, logits), (reference, theirs), labels, HUGGING_FACE)


def test_decoding_equals_the_forward_pass(pair) -> None:
    """Pieces end behind whole images, of which one is longer than the window."""
    model, _ = pair
    tokens, (images, grids) = texts_with_images(), image_batch()
    with torch.no_grad():
        whole = model(tokens, images, image_grids=grids)
    decoded = cached_logits(model, tokens, (19, 20, 21, 22, 23, LENGTH), requested())
    torch.testing.assert_close(decoded, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_prompts_with_images_are_continued_as_the_reference_does(pair) -> None:
    """Several prompts share passes of 16 positions, into which an image of 15 has to fit as a whole."""
    model, reference = pair
    tokens, (images, grids) = texts_with_images(), image_batch()
    expected = []
    for row in range(len(tokens)):
        given = as_reference_inputs(tokens[row : row + 1], images[row : row + 1], grids[row : row + 1])
        found = reference.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None)
        expected.append(found[0, LENGTH:].tolist())
    options = InferenceConfig(**OPTIONS)
    engine = InferenceEngine(model, None, ParallelContext(), options, longest=LENGTH + 8)
    assert [tokens_of(found) for found in run(engine, tokens.tolist(), GREEDY, requested())] == expected


def test_an_image_that_fits_no_pass_is_refused(host) -> None:
    reference = make_reference("images that see themselves, experts")
    model = from_reference(host, HUGGING_FACE, reference, {}, data={"seq_length": LENGTH})
    options = InferenceConfig(**{**OPTIONS, "max_tokens_per_step": 8})
    engine = InferenceEngine(model, None, ParallelContext(), options, longest=LENGTH + 8)
    with pytest.raises(ConfigError, match="max_tokens_per_step, which is 8, to at least 15"):
        engine.add(texts_with_images()[0].tolist(), GREEDY, requested()[0])
