"""Qwen3.5 with pictures drafts by its layer of multi-token prediction, which embeds images of the prompt."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.infer.engines import OPTIONS, run, tokens_of
from tests.infer.test_qwen_vl import GREEDY, requested
from tests.models.qwen_vl_reference import IMAGE, LENGTH, as_reference_inputs, image_batch, texts_with_images
from tests.models.test_qwen_next_vl import captured, predicting_pair

from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine


def drafting(model: torch.nn.Module, **options: Any) -> InferenceEngine:
    inference = InferenceConfig(**{**OPTIONS, **options})
    return InferenceEngine(model, None, ParallelContext(), inference, longest=LENGTH + 8)


def test_drafts_read_the_images_of_the_prompt() -> None:
    """Whole prompts in one pass: the first draft behind each is that of blocks of transformers."""
    model, theirs, layer, _ = predicting_pair(load_plugins())
    # Images at the ends of prompts too, so that what is embedded ahead of the last positions are features.
    prompts, inputs, (images, grids) = [row[:19] for row in texts_with_images()[:2]], requested()[:2], image_batch()
    engine = drafting(model, speculative_method="mtp", speculative_tokens=1)
    for prompt, own in zip(prompts, inputs, strict=True):
        engine.add(prompt.tolist(), GREEDY, own)
    while not all(sequence.drafts for sequence in engine.scheduler.running):
        engine.step()
    for row, sequence in enumerate(engine.scheduler.running):
        tokens = torch.tensor([sequence.tokens])
        given = as_reference_inputs(tokens[:, :-1], images[row : row + 1], grids[row : row + 1])
        arguments = captured(theirs.model.language_model)
        hidden = theirs.model(**given).last_hidden_state
        rotary = theirs.model.language_model.rotary_emb(hidden, arguments["position_ids"][-3:])
        word = theirs.get_input_embeddings()(tokens[:, -1:])
        ahead = torch.cat((arguments["inputs_embeds"][:, 1:], word), 1)
        causal = torch.full((hidden.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        state = layer(ahead, hidden, rotary, causal, arguments["position_ids"][0], None)
        assert list(sequence.drafts) == [int(theirs.lm_head(state)[0, -1].argmax())]
        without = layer(_without_images(theirs, tokens), hidden, rotary, causal, arguments["position_ids"][0], None)
        assert F.cosine_similarity(state[0, -1], without[0, -1], 0) < 0.999


def _without_images(theirs: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Embeddings of the tokens ahead, with a word in the place of features."""
    return theirs.get_input_embeddings()(tokens[:, 1:].masked_fill(tokens[:, 1:] == IMAGE, 0))


def test_tokens_with_drafts_are_those_without() -> None:
    model, *_ = predicting_pair(load_plugins())
    texts, inputs = texts_with_images().tolist(), requested()
    engine = drafting(model, speculative_method="mtp", speculative_tokens=1)
    found = [tokens_of(events) for events in run(engine, texts, GREEDY, inputs)]
    assert engine.speculation.drafted > 0
    assert found == [tokens_of(events) for events in run(drafting(model), texts, GREEDY, inputs)]
