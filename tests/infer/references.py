"""Models of `transformers` with random weights, engines with the same weights, and tokens chosen by the former."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.ckpt.family_cases import CASES, make_model
from tests.infer.engines import OPTIONS
from torch import Tensor, nn

from mt_core.interfaces import SpecialTokens
from mt_core.plugins import load_plugins
from mt_core.train.trained_model import TrainedModel, load_trained_model
from mt_infer.blocks import PrefixKeys
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_infer.requests import Request, RunningSequence
from mt_infer.sampling.noise import uniform
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.sampling.rows import SamplingRow

VOCAB = 101


@cache
def reference(name: str) -> nn.Module:
    """A case of tests.ckpt.family_cases."""
    return make_model(CASES[name])


@cache
def trained(name: str) -> TrainedModel:
    """Ours, read from the files that the reference writes."""
    settings = {"tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB}}
    with tempfile.TemporaryDirectory() as folder:
        reference(name).save_pretrained(folder)
        return load_trained_model(folder, load_plugins(), device="cpu", settings=settings)


def engine_like(
    name: str, *, eod: int | None = None, longest: int = 64, batch_invariant: bool = False, **options: Any
) -> InferenceEngine:
    """eod: the token that ends documents."""
    tokenizer: Any = SimpleNamespace(special=SpecialTokens(eod=eod))
    own = trained(name)
    settings = InferenceConfig(**{**OPTIONS, **options})
    return InferenceEngine(own.model, tokenizer, own.ctx, settings, longest=longest, batch_invariant=batch_invariant)


def sequence_of(sampling: SamplingParameters, prompt: Sequence[int], generated: Sequence[int] = ()) -> RunningSequence:
    """A sequence without memory in a cache."""
    request = Request(0, tuple(prompt), sampling)
    return RunningSequence(
        request,
        0,
        sampling.seed or 0,
        64,
        [],
        PrefixKeys(b"", 4),
        [*prompt, *generated],
        stop_ids=frozenset(sampling.stop_token_ids),
    )


def row_of(sampling: SamplingParameters, prompt: Sequence[int], generated: Sequence[int] = ()) -> SamplingRow:
    return SamplingRow(sequence_of(sampling, prompt, generated))


def processors(sampling: SamplingParameters, prompt_length: int) -> list[Any]:
    """Those of transformers, in its order. What transformers does not have is not here."""
    from transformers.generation import logits_process as hf

    found: list[Any] = []
    if sampling.logit_bias:
        found.append(hf.SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias.items()}))
    if sampling.repetition_penalty != 1:
        found.append(hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    words = [[token] for token in sampling.banned_token_ids] + [list(word) for word in sampling.bad_words_ids]
    if words:
        found.append(hf.NoBadWordsLogitsProcessor(words))
    if sampling.min_tokens:
        stops = list(sampling.stop_token_ids)
        found.append(hf.MinNewTokensLengthLogitsProcessor(prompt_length, sampling.min_tokens, stops, device="cpu"))
    return found


def warpers(sampling: SamplingParameters, index: int) -> list[Any]:
    """Those of transformers, in its order, for generated token number `index`."""
    from transformers.generation import logits_process as hf

    top_p = sampling.top_p
    for _ in range(index if sampling.top_p_decay else 0):  # Megatron-LM: after each token
        top_p = max(top_p * sampling.top_p_decay, sampling.top_p_bound)
    found: list[Any] = [hf.TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature != 1 else []
    found += [hf.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    found += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
    found += [hf.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    found += [hf.TypicalLogitsWarper(sampling.typical_p)] if sampling.typical_p < 1 else []
    return found


def processed(sampling: SamplingParameters, logits: Tensor, prompt_length: int, tokens: Sequence[int]) -> Tensor:
    """[vocab] -> [vocab], by transformers alone."""
    ids, scores = torch.tensor([list(tokens)]), logits[None].clone()
    index = len(tokens) - prompt_length
    later = warpers(sampling, index) if sampling.temperature > 0 else []
    for process in [*processors(sampling, prompt_length), *later]:
        scores = process(ids, scores)
    return scores[0]


@torch.no_grad()
def reference_tokens(model: nn.Module, prompt: Sequence[int], sampling: SamplingParameters) -> list[int]:
    """Token by token with the whole text, drawn in NumPy by the request's uniform numbers. Ends with a stop token."""
    tokens = list(prompt)
    for index in range(sampling.max_tokens):
        logits = model(torch.tensor([tokens])).logits[0, -1].float()
        scores = processed(sampling, logits, len(prompt), tokens)
        if sampling.temperature == 0:
            tokens.append(int(scores.argmax()))
        else:
            chances = scores.double().softmax(-1).numpy()
            tokens.append(int(np.searchsorted(np.cumsum(chances), uniform(sampling.seed or 0, index), side="right")))
        if tokens[-1] in sampling.stop_token_ids:
            return tokens[len(prompt) : -1]
    return tokens[len(prompt) :]
