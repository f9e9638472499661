"""Continuing a prompt, one id at a time, with or without a key-value cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.inference.sampling import SamplingOptions, sample
from mt_core.nn.model import contract
from mt_core.specs import Tokenizer


class Decoder(Protocol):
    """A causal language model that can keep what it has seen."""

    training: bool

    def __call__(self, tokens: Tensor, *, cache: Any = None) -> Tensor:
        """[B, S] -> logits [B, S, vocab]"""
        ...

    def new_cache(self, capacity: int) -> Any: ...

    @property
    def max_sequence_length(self) -> int | None: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...


def as_decoder(model: nn.Module) -> Decoder:
    """The model, if it can continue text; ConfigError if its family cannot."""
    if not contract(model).continues_text:
        raise ConfigError(f"{type(model).__name__} does not continue text: only causal language models do")
    return cast(Decoder, model)


@torch.no_grad()
def generate_ids(
    model: Decoder,
    prompt: Sequence[int],
    max_tokens: int,
    options: SamplingOptions,
    *,
    stop_ids: Sequence[int] = (),
    use_cache: bool = True,
) -> Iterator[int]:
    """Ids after the prompt, at most max_tokens; ends before an id of `stop_ids`.

    use_cache: keys and values of past positions are kept; without it every position is computed again.
    Raises ConfigError when the prompt is empty, or prompt and max_tokens do not fit the model's positions.
    """
    _require_room(model, len(prompt), max_tokens)
    device = next(model.parameters()).device
    generator = _generator(options, device)
    cache = model.new_cache(len(prompt) + max_tokens) if use_cache else None
    seen = list(prompt)
    fresh = seen
    training = model.training
    model.eval()
    try:
        for _ in range(max_tokens):
            tokens = torch.tensor([fresh if cache is not None else seen], device=device)
            logits = model(tokens, cache=cache) if cache is not None else model(tokens)
            chosen = int(sample(logits[:, -1], options, generator))
            if chosen in stop_ids:
                return
            yield chosen
            seen.append(chosen)
            fresh = [chosen]
    finally:
        model.train(training)


def generate_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int,
    options: SamplingOptions,
    *,
    use_cache: bool = True,
) -> Iterator[str]:
    """The continuation, in pieces of whole characters, up to the end of the document."""
    eod = tokenizer.special.eod
    ids: list[int] = []
    shown = 0
    stream = generate_ids(
        model,
        encode_prompt(tokenizer, prompt),
        max_tokens,
        options,
        stop_ids=() if eod is None else (eod,),
        use_cache=use_cache,
    )
    for chosen in stream:
        ids.append(chosen)
        text = tokenizer.decode(ids)
        # A character whose bytes are not all there yet decodes to U+FFFD; wait for the rest of it.
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(ids)[shown:]


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of the prompt; an empty one starts a document."""
    start = tokenizer.special.bos if tokenizer.special.bos is not None else tokenizer.special.eod
    ids = list(tokenizer.encode(prompt))
    return ids if ids or start is None else [start]


def _generator(options: SamplingOptions, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device=device)
    if options.seed is None:
        generator.seed()
    else:
        generator.manual_seed(options.seed)
    return generator


def _require_room(model: Decoder, prompt: int, max_tokens: int) -> None:
    if prompt == 0:
        raise ConfigError("the prompt is empty, and the tokenizer has no id that starts a document")
    longest = model.max_sequence_length
    if longest is not None and prompt + max_tokens > longest:
        raise ConfigError(
            f"the prompt has {prompt} ids and {max_tokens} more are asked for; the model has {longest} positions "
            f"(model.max_position_embeddings), so at most {max(longest - prompt, 0)} can be generated"
        )
