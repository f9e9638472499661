"""From the fields of a request to the engine's parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mt_data.datasets.text_files import bare_encoder
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.errors import ApiError
from mt_infer.server.openai.fields import SamplingFields
from mt_infer.server.options import ServerOptions
from mt_infer.server.served_model import ServedModel

ANY_OBJECT = {"type": "object"}
SAME_NAMES = frozenset(SamplingFields.model_fields) & {field.name for field in dataclasses.fields(SamplingParameters)}
"""Fields of a request that are sampling parameters under the same name. Those of the endpoints, some of which have
another meaning (`logprobs` of a chat), are not among them."""


def sampling_of(fields: SamplingFields, model: ServedModel, *, max_tokens: int, **others: Any) -> SamplingParameters:
    """others: further SamplingParameters, which the endpoints name differently. Raises ApiError, ConfigError."""
    if fields.prompt_logprobs is not None:
        refuse_encoder(model, "prompt_logprobs")
    # The request's and those of the chat template.
    others["stop"] = (*fields.stops, *others.get("stop", ()))
    others["stop_token_ids"] = (*(fields.stop_token_ids or ()), *others.get("stop_token_ids", ()))
    values = {name: getattr(fields, name) for name in SAME_NAMES} | {
        "max_tokens": max_tokens,
        "top_k": None if fields.top_k is None else max(fields.top_k, 0),
        "logit_bias": logit_bias(fields, model),
        "bad_words_ids": bad_words_ids(fields.bad_words or (), model),
        "num_beams": fields.n if fields.use_beam_search else None,
        "ignore_eod": fields.ignore_eos,
    }
    return given_parameters(**values | constraint(fields) | others)


def refuse_encoder(model: ServedModel, field: str) -> None:
    """For a field that is about probabilities of the prompt."""
    if model.require_generator().prompts.has_encoder:
        raise ApiError(
            f"{field}: this model reads the prompt with an encoder, which gives it no probability", param=field
        )


def given_parameters(**values: Any) -> SamplingParameters:
    """The defaults for what is None. Raises ConfigError."""
    return SamplingParameters(**{name: value for name, value in values.items() if value is not None})


def constraint(fields: SamplingFields) -> dict[str, Any]:
    """response_format, and what other servers name it, as what the text has to match. Raises ApiError for two."""
    form = fields.response_format
    asked = constraints_of(fields.guided_json, fields.guided_regex, fields.guided_grammar, fields.guided_choice)
    if (current := fields.structured_outputs) is not None:
        if asked:
            raise ApiError(
                "structured_outputs and guided_* each say what the text is; give one", param="structured_outputs"
            )
        asked = constraints_of(current.json_schema, current.regex, current.grammar, current.choice)
    if form is not None and form.type != "text":
        if asked:
            other = "guided_*" if current is None else "structured_outputs"
            raise ApiError(f"response_format and {other} each say what the text is; give one", param="response_format")
        schema = form.json_schema.json_schema if form.json_schema is not None else None
        # {} is a schema too: of any JSON.
        return {"json_schema": ANY_OBJECT if schema is None else schema}
    return asked


def constraints_of(
    schema: dict[str, Any] | None, regex: str | None, grammar: str | None, choice: Sequence[str] | None
) -> dict[str, Any]:
    """Sampling parameters of those that are not None."""
    choices = None if choice is None else tuple(choice)
    values = {"json_schema": schema, "regex": regex, "grammar": grammar, "choices": choices}
    return {name: value for name, value in values.items() if value is not None}


def bad_words_ids(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """The ids of each word at the beginning of a text, and within one."""
    encode = bare_encoder(model.tokenizer)
    # Byte-pair tokenizers have other tokens for a word at the start of a text and behind a space.
    encoded = [tuple(encode(text)) for word in words for text in (word, f" {word.lstrip()}")]
    return tuple(dict.fromkeys(ids for ids in encoded if ids))


def logit_bias(fields: SamplingFields, model: ServedModel) -> dict[int, float]:
    size = model.tokenizer.vocab_size
    biases = {}
    for token, bias in (fields.logit_bias or {}).items():
        if not token.isdecimal() or not token.isascii() or int(token[:20]) >= size:
            raise ApiError(
                f"logit_bias: {token[:50]!r} is no token id; they go from 0 to {size - 1}", param="logit_bias"
            )
        biases[int(token)] = bias
    return biases


def tokens_to_generate(
    asked: int | None, default: int | None, prompts: Sequence[Sequence[int]], model: ServedModel, options: ServerOptions
) -> int:
    """max_tokens of a request, within the context and the server's limit. default: where it is not given; None: all
    that fits. Raises ApiError for more than fits."""
    longest = longest_prompt(prompts, model)
    room = model.max_model_len - longest
    # Without max_tokens one token at least must fit.
    wanted = 1 if asked is None else asked
    if wanted > room:
        raise ApiError(
            f"this model's context is {model.max_model_len} tokens; the request has {longest} in the prompt and "
            f"{wanted} more to generate; shorten either",
            param="messages" if default is None else "prompt",
            code="context_length_exceeded",
        )
    limit = options.max_tokens
    if asked is not None and limit is not None and asked > limit:
        raise ApiError(f"max_tokens: {asked} is more than the {limit} that this server generates", param="max_tokens")
    if asked is not None:
        return asked
    return min(bound for bound in (default, room, limit) if bound is not None)


def longest_prompt(prompts: Sequence[Sequence[int]], model: ServedModel) -> int:
    """Positions of the decoder that the longest prompt takes; a model with an encoder reads the prompt there."""
    # The decoder's start token.
    return 1 if model.require_generator().prompts.has_encoder else max(map(len, prompts))
