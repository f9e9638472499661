"""PUT /api: the interface of Megatron-LM's text generation server, as of v0.12 and before and after.

Its fields are honoured as its legacy engine did, or refused with status 400, which its clients print.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mt_data.datasets.text_files import bare_encoder
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.errors import ApiError
from mt_infer.server.openai.answers import finite, token_texts
from mt_infer.server.openai.fields import RequestBody, TokenId
from mt_infer.server.openai.sampling import given_parameters, longest_prompt
from mt_infer.server.served_model import ServedModel
from mt_infer.server.service import Service, until_disconnect
from mt_infer.text import Completion

RENAMED = {"max_len": "tokens_to_generate", "sentences": "prompts"}
Share = Annotated[float, Field(ge=0, le=1)]


class MegatronBody(RequestBody):
    """The body of PUT /api."""

    prompts: Annotated[list[str], Field(min_length=1, max_length=128)]
    tokens_to_generate: Annotated[int, Field(ge=0, lt=2**31)] = 64
    logprobs: bool = False
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=1000)] = 0
    top_p: Share = 0.0
    top_p_decay: Share = 0.0
    top_p_bound: Share = 0.0
    add_BOS: bool = False  # noqa: N815
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    prevent_newline_after_colon: bool = False
    random_seed: Annotated[int, Field(ge=-1, lt=2**63)] = -1
    no_log: bool = False
    beam_width: Annotated[int, Field(ge=1, le=64)] | None = None
    stop_token: TokenId | None = None
    length_penalty: float = 1.0

    @model_validator(mode="before")
    @classmethod
    def _say_new_names(cls, value: Any) -> Any:
        for old, new in RENAMED.items():
            if isinstance(value, dict) and old in value:
                raise ValueError(f"{old} is no longer used; replace it with {new}")
        return value

    @model_validator(mode="after")
    def _check_pairs(self) -> MegatronBody:
        if self.tokens_to_generate == 0 and not self.logprobs:
            raise ValueError("tokens_to_generate=0 needs logprobs=true: nothing else would be answered")
        if self.top_k and self.top_p:
            raise ValueError("top_k and top_p cannot be used together")
        if "" in self.prompts and not self.add_BOS:
            raise ValueError("an empty prompt needs add_BOS=true")
        if self.beam_width is not None and len(self.prompts) > 1:
            raise ValueError("beam_width takes one prompt")
        if self.length_penalty != 1.0 and self.beam_width is None:
            raise ValueError("length_penalty is for beam_width")
        return self


async def generate(service: Service, body: MegatronBody, http: HttpRequest) -> Response:
    """`text` (prompt and continuation), `tokens`, `segments` (their texts), `logprobs` of all tokens but the first."""
    model = service.models.find(None)
    return await until_disconnect(http, _answer(service, model, body))


async def _answer(service: Service, model: ServedModel, body: MegatronBody) -> Response:
    prompts = await asyncio.to_thread(lambda: [_prompt(model, body, text) for text in body.prompts])
    sampling = _sampling(model, body, prompts)
    done = [[Completion() for _ in range(sampling.n)] for _ in prompts]
    async with aclosing(service.generate(model, prompts, sampling)) as events:
        async for place, event in events:
            done[place][event.index].add(event)
    return JSONResponse(await asyncio.to_thread(_described, model, body, prompts, done))


def _prompt(model: ServedModel, body: MegatronBody, text: str) -> list[int]:
    tokens = model.require_generator().prompt_tokens(text) if text else []
    special = model.tokenizer.special
    start = special.bos if special.bos is not None else special.eod
    # Tokenizers that write BOS themselves: one is enough.
    if not body.add_BOS or tokens[:1] == [start]:
        return tokens
    if start is None:
        raise ApiError("add_BOS: the tokenizer has no id that starts a document", param="add_BOS")
    return [start, *tokens]


def _sampling(model: ServedModel, body: MegatronBody, prompts: Sequence[Sequence[int]]) -> SamplingParameters:
    longest = longest_prompt(prompts, model) + body.tokens_to_generate
    if longest > model.max_model_len:
        raise ApiError(
            f"the longest prompt and tokens_to_generate are {longest} tokens; this model's context is "
            f"{model.max_model_len}",
            param="tokens_to_generate",
        )
    scored = 0 if body.logprobs else None
    return given_parameters(
        temperature=body.temperature,
        top_k=body.top_k,
        # 0 is "off" in Megatron's interface, and no value of SamplingParameters.
        top_p=body.top_p or None,
        top_p_decay=body.top_p_decay or None,
        top_p_bound=body.top_p_bound or None,
        num_beams=body.beam_width,
        n=body.beam_width,
        length_penalty=body.length_penalty,
        bad_words_ids=_newline_after_colon(model) if body.prevent_newline_after_colon else None,
        max_tokens=body.tokens_to_generate,
        stop=_stops(body),
        stop_token_ids=() if body.stop_token is None else (body.stop_token,),
        # Its stops at ends of lines are in place of the end of the document.
        ignore_eod=bool(_stops(body)),
        seed=None if body.random_seed == -1 else body.random_seed,
        logprobs=scored,
        prompt_logprobs=scored,
    )


def _newline_after_colon(model: ServedModel) -> tuple[tuple[int, int]]:
    """The first id of each."""
    encode = bare_encoder(model.tokenizer)
    return ((encode(":")[0], encode("\n")[0]),)


def _stops(body: MegatronBody) -> tuple[str, ...]:
    if body.stop_on_double_eol:
        return ("\n\n",)
    return ("\n",) if body.stop_on_eol else ()


def _described(
    model: ServedModel,
    body: MegatronBody,
    prompts: Sequence[Sequence[int]],
    done: Sequence[Sequence[Completion]],
) -> dict[str, Any]:
    """Beams are all of one prompt. A stop text stands in the tokens, and stays, as Megatron has it."""
    answers = [(place, completion) for place, several in enumerate(done) for completion in several]
    tokens = [[*prompts[place], *completion.tokens] for place, completion in answers]
    segments = [token_texts(model, ids) for ids in tokens]
    texts = [
        body.prompts[place] + "".join(row_texts[len(prompts[place]) :])
        for (place, _), row_texts in zip(answers, segments, strict=True)
    ]
    described: dict[str, Any] = {"text": texts, "tokens": tokens, "segments": segments}
    if body.beam_width is not None:
        described["scores"] = [completion.score for _, completion in answers]
    return {**described, "logprobs": [_logprobs(completion) for _, completion in answers] if body.logprobs else None}


def _logprobs(done: Completion) -> list[float]:
    # Without the first token, which has no probability.
    rows = [*(done.prompt_logprobs or ())[1:], *done.logprobs]
    return [finite(row.token) for row in rows if row is not None]
