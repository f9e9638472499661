"""Greedy continuations of the same prompts by a model of mt, from its cache, and by one of `transformers`."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from tests.ckpt.config_sweep import as_ours
from tests.ckpt.family_cases import AUDIO, IMAGE, Case
from tests.infer.decoding import cached_logits
from torch import Tensor, nn
from transformers import GenerationConfig

NEW_TOKENS = 12


@torch.no_grad()
def continued(model: nn.Module, case: Case, inputs: dict[str, Tensor]) -> Tensor:
    """Each step from the cache: the prompt in pieces of four, then token by token."""
    named = as_ours(case, inputs)
    tokens = named.pop("decoder_tokens" if "decoder_tokens" in named else "tokens")
    rows = [{name: of_request(name, value[row]) for name, value in named.items()} for row in range(len(tokens))]
    length = tokens.shape[1]
    for new in range(NEW_TOKENS):
        ends = [*range(4, length, 4), *range(length, length + new + 1)]
        logits = cached_logits(model, tokens, ends, rows)[:, -1]
        logits[:, unspoken(inputs)] = float("-inf")
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    return tokens


def unspoken(inputs: dict[str, Tensor]) -> list[int]:
    """Ids that stand for an image or a sound, which a continuation has none of."""
    return [IMAGE, AUDIO] if {"pixel_values", "input_features"} & inputs.keys() else []


def of_request(name: str, value: Tensor) -> Tensor:
    """A row of a batch as a request has it: texts of encoders and single images have a dimension more."""
    return value[None] if name == "encoder_tokens" or (name == "images" and value.ndim == 3) else value


@torch.no_grad()
def continued_there(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    # The special ids of a small model's configuration are those of a large vocabulary.
    model.generation_config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    model.generation_config.suppress_tokens = unspoken(inputs) or None
    if "decoder_input_ids" in inputs:
        model.generation_config.decoder_start_token_id = inputs["decoder_input_ids"][0, 0].item()
        # T5's cache has as many layers as the encoder.
        model.generation_config.use_cache = False
    known = signature(model.forward).parameters
    read = {name: value for name, value in inputs.items() if name in known}
    given = {"attention_mask": torch.ones_like(inputs["input_ids"]), **read}
    sequences: Tensor = model.generate(**given)
    return sequences
