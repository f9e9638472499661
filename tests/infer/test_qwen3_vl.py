"""Qwen3-VL generates: features of images in the text and behind layers of the decoder, against `transformers`."""

from __future__ import annotations

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.infer.engines import OPTIONS, run, tokens_of
from tests.infer.test_qwen_vl import GREEDY, requested
from tests.models.qwen3_vl_reference import make_reference
from tests.models.qwen_vl_reference import GRIDS, LENGTH, as_reference_inputs, image_batch, texts_with_images
from tests.models.vision_reference import from_reference, randomize

from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_models.qwen3_vl.hugging_face import HUGGING_FACE


@pytest.fixture(scope="module")
def pair():
    reference = make_reference()
    randomize(reference)
    return from_reference(load_plugins(), HUGGING_FACE, reference, {}, data={"seq_length": LENGTH}), reference


def test_decoding_with_a_cache_equals_the_forward(pair) -> None:
    """Images are cut by the ends of pieces; a text without images is in the same passes."""
    model, _ = pair
    tokens, (images, grids) = texts_with_images(), image_batch()
    whole = model(tokens, images, image_grids=grids)
    decoded = cached_logits(model, tokens, (3, 7, 20, 21, 22, 23, LENGTH), requested())
    torch.testing.assert_close(decoded, whole, atol=1e-4, rtol=1e-4)


def test_prompts_with_images_are_continued_as_the_reference_does(pair) -> None:
    model, reference = pair
    tokens, inputs = texts_with_images(), requested()
    expected = []
    images, grids = image_batch()
    for row in range(len(GRIDS)):
        given = as_reference_inputs(tokens[row : row + 1], images[row : row + 1], grids[row : row + 1])
        found = reference.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None)
        expected.append(found[0, LENGTH:].tolist())
    engine = InferenceEngine(model, None, ParallelContext(), InferenceConfig(**OPTIONS), longest=LENGTH + 8)
    assert [tokens_of(found) for found in run(engine, tokens.tolist(), GREEDY, inputs)] == expected
