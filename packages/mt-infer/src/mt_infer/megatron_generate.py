"""`megatron_generate`: the interface of Accelerate's Megatron-LM plugin (documented there, removed in its code)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

MULTIPLE = 4
"""Total lengths are rounded up to a multiple."""


def megatron_generate(
    generator: TextGenerator,
    inputs: Tensor,
    attention_mask: Tensor | None = None,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    num_beams: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    length_penalty: float | None = None,
    **options: Any,
) -> Tensor:
    """inputs [B, S] ids, attention_mask [B, S] (1 for the prompt, 0 for padding behind it) -> [B, longest] ids: prompts
    with their continuations, filled up with the end of the document.

    max_length (prompt included) or max_new_tokens, one of them; the longest sequence is rounded up to a multiple of 4.
    Without top_k and top_p the likeliest token is taken. num_beams: a single prompt, whose beams are returned, the best
    first. options: top_p_decay, top_p_bound, add_BOS, stop_token, random_seed. Raises ConfigError for other values.
    """
    unknown = sorted(options.keys() - OPTIONS.keys())
    if unknown:
        raise ConfigError(f"megatron_generate has no {', '.join(unknown)}; it has {', '.join(OPTIONS)}")
    options = {**OPTIONS, **options}
    top_k, top_p = top_k or 0, top_p or 0.0
    # Here and not by SamplingParameters, whose ranges are wider.
    _check(top_k, top_p, 1.0 if temperature is None else temperature, options)
    prompts = _prompts(generator, inputs, attention_mask, add_bos=options["add_BOS"])
    room = _new_tokens(max(map(len, prompts)), max_length, max_new_tokens)
    sampling = {"max_tokens": room, "seed": options["random_seed"], **_stop(generator, options["stop_token"])}
    if num_beams is not None:
        sampling |= _beams(num_beams, length_penalty, len(prompts))
    elif top_k or top_p:
        sampling |= {
            "temperature": 1.0 if temperature is None else temperature,
            "top_k": top_k,
            "top_p": top_p or 1.0,
            "top_p_decay": options["top_p_decay"],
            "top_p_bound": options["top_p_bound"],
        }
    else:
        sampling["temperature"] = 0.0
    completions = generator.generate(prompts, SamplingParameters(**sampling))
    rows = [
        [*prompt, *completion.require_complete().tokens]
        for prompt, several in zip(prompts, completions, strict=True)
        for completion in several
    ]
    return _filled(rows, generator.tokenizer.special.eod or 0)


OPTIONS: Mapping[str, Any] = {
    "top_p_decay": 0.0,
    "top_p_bound": 0.0,
    "add_BOS": False,
    "stop_token": None,
    "random_seed": 0,
}
"""Further arguments and their defaults."""


def _check(top_k: int, top_p: float, temperature: float, options: Mapping[str, Any]) -> None:
    """Megatron's and Accelerate's ranges."""
    rules = (
        ("temperature", temperature, 0.0 < temperature <= 100.0, "above 0 and at most 100"),
        ("top_k", top_k, isinstance(top_k, int) and 0 <= top_k <= 1000, "an integer from 0 (off) to 1000"),
        ("top_p", top_p, 0.0 <= top_p <= 1.0, "from 0 (off) to 1"),
        ("top_p", top_p, not (top_p and top_k), f"0 beside top_k={top_k}: one of the two chooses"),
        ("top_p_decay", options["top_p_decay"], 0.0 <= options["top_p_decay"] <= 1.0, "from 0 to 1"),
        ("top_p_bound", options["top_p_bound"], 0.0 <= options["top_p_bound"] <= 1.0, "from 0 to 1"),
        ("add_BOS", options["add_BOS"], isinstance(options["add_BOS"], bool), "True or False"),
    )
    for name, value, holds, allowed in rules:
        if not holds:
            raise ConfigError(f"{name} is {value}; it must be {allowed}")


def _prompts(generator: TextGenerator, inputs: Tensor, mask: Tensor | None, *, add_bos: bool) -> list[list[int]]:
    if inputs.ndim != 2:
        raise ConfigError(f"inputs has the shape {list(inputs.shape)}; it must be [batch, sequence]")
    lengths = [inputs.shape[1]] * len(inputs) if mask is None else mask.sum(1).tolist()
    # The padding behind a prompt is dropped: the engine has no use for it.
    rows = [row[: int(length)].tolist() for row, length in zip(inputs, lengths, strict=True)]
    special = generator.tokenizer.special
    start = special.bos if special.bos is not None else special.eod
    if add_bos and start is None:
        raise ConfigError("add_BOS=True, but the tokenizer has no id that starts a document; leave it out")
    return [[start, *row] if add_bos and start is not None else row for row in rows]


def _new_tokens(longest: int, max_length: int | None, max_new_tokens: int | None) -> int:
    if (max_length is None) == (max_new_tokens is None):
        raise ConfigError("give one of max_length (prompt included) and max_new_tokens")
    total = max_length if max_length is not None else longest + (max_new_tokens or 0)
    if total <= longest:
        raise ConfigError(f"max_length={total} leaves no room behind a prompt of {longest} tokens; give more")
    # The length of the batch is rounded up, so that up to 3 tokens more than max_new_tokens are generated.
    return -(-total // MULTIPLE) * MULTIPLE - longest


def _stop(generator: TextGenerator, token: int | None) -> dict[str, Any]:
    # stop_token replaces the end of the document.
    if token is None or token == generator.tokenizer.special.eod:
        return {}
    return {"stop_token_ids": (token,), "ignore_eod": True}


def _beams(num_beams: int, length_penalty: float | None, prompts: int) -> dict[str, Any]:
    if num_beams < 1:
        raise ConfigError(f"num_beams is {num_beams}; it must be 1 or more")
    if prompts != 1:
        raise ConfigError(
            f"num_beams={num_beams} searches for one prompt, and there are {prompts}; give them one by one"
        )
    if num_beams == 1:
        return {"temperature": 0.0}
    return {"num_beams": num_beams, "n": num_beams, "length_penalty": 1.0 if length_penalty is None else length_penalty}


def _filled(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])
