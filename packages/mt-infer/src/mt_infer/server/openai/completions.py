"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.sampling.sampler import LogProbs
from mt_infer.server.openai.answers import (
    CompletionLogProbs,
    Piece,
    TokenTexts,
    envelope,
    prompt_rows,
    token_texts,
    usage,
)
from mt_infer.server.openai.fields import Count, Ids, SamplingFields
from mt_infer.server.openai.sampling import refuse_encoder, sampling_of, tokens_to_generate
from mt_infer.server.served_model import ServedModel
from mt_infer.server.service import EventStream, Service, until_disconnect
from mt_infer.text import Completion, Prompt, TextEvent

DEFAULT_TOKENS = 16
Prompts = Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]


class CompletionBody(SamplingFields):
    """The body of /v1/completions."""

    prompt: str | Ids | Prompts
    max_tokens: Count | None = None
    """Default: 16."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Likeliest tokens to report beside each token."""
    echo: bool | None = None
    """The text, and the log-probabilities, begin with the prompt's."""
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None

    @model_validator(mode="after")
    def _refuse_suffix(self) -> CompletionBody:
        if self.suffix:
            raise ValueError("suffix is for models that fill in the middle, which this server has none of")
        return self

    def prompts(self) -> list[Prompt]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)

    @property
    def scores_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None


@dataclass
class Job:
    """A request on its way: its prompts as tokens."""

    model: ServedModel
    body: CompletionBody
    prompts: list[list[int]]
    sampling: SamplingParameters
    head: Piece = field(init=False)

    def __post_init__(self) -> None:
        self.head = envelope("text_completion", "cmpl", self.model.name)

    def usage(self, generated: int) -> dict[str, int]:
        return usage(sum(map(len, self.prompts)), generated)

    def echoed(self, place: int) -> str:
        """The prompt as it was given; of ids, their text."""
        if not self.body.echo:
            return ""
        prompt = self.body.prompts()[place]
        return prompt if isinstance(prompt, str) else self._text(place)

    def new_logprobs(self, place: int) -> CompletionLogProbs | None:
        if self.body.logprobs is None:
            return None
        # Tokens that the tokenizer puts before a text, such as BOS, are not in the text that is echoed.
        added = len(self._text(place)) - len(self.echoed(place)) if self.body.echo else 0
        return CompletionLogProbs(TokenTexts(self.model), self.body.logprobs, -added)

    def _text(self, place: int) -> str:
        return "".join(token_texts(self.model, self.prompts[place]))


async def create_completion(service: Service, body: CompletionBody, http: HttpRequest) -> Response:
    model = service.models.find(body.model)
    generator = model.require_generator()
    prompts = await asyncio.to_thread(lambda: [generator.prompt_tokens(prompt) for prompt in body.prompts()])
    job = Job(model, body, prompts, _sampling(service, model, body, prompts))
    if body.stream:
        return EventStream(_pieces(service, job))
    return await until_disconnect(http, _whole(service, job))


def _sampling(
    service: Service, model: ServedModel, body: CompletionBody, prompts: Sequence[Sequence[int]]
) -> SamplingParameters:
    if body.scores_prompt:
        refuse_encoder(model, "echo")
    max_tokens = tokens_to_generate(body.max_tokens, DEFAULT_TOKENS, prompts, model, service.options)
    # Programs that score a text request one token more, and read the rows before it: it has to be there.
    ignore_eod = bool(body.ignore_eos) or (body.scores_prompt and max_tokens == 1)
    return sampling_of(
        body,
        model,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        ignore_eod=ignore_eod,
        best_of=body.best_of,
    )


def _prompt_logprobs(body: CompletionBody) -> int | None:
    """The most that is reported in either form."""
    wanted = [body.prompt_logprobs, body.logprobs if body.scores_prompt else None]
    return max((count for count in wanted if count is not None), default=None)


# -- in one piece -------------------------------------------------------------------------------------


async def _whole(service: Service, job: Job) -> Response:
    n = job.sampling.n
    done = [Completion() for _ in range(len(job.prompts) * n)]
    async with aclosing(service.generate(job.model, job.prompts, job.sampling)) as events:
        async for place, event in events:
            done[place * n + event.index].add(event)
    choices = await asyncio.to_thread(
        lambda: [_choice(job, number, completion) for number, completion in enumerate(done)]
    )
    return JSONResponse(
        {**job.head, "choices": choices, "usage": job.usage(sum(len(completion.tokens) for completion in done))}
    )


def _choice(job: Job, number: int, done: Completion) -> Piece:
    place = number // job.sampling.n
    logprobs, rows = job.new_logprobs(place), None
    if logprobs is not None:
        tokens: list[int] = [*done.tokens]
        entries: list[LogProbs | None] = [*done.logprobs]
        if job.body.scores_prompt:
            tokens, entries = [*job.prompts[place], *tokens], [*(done.prompt_logprobs or ()), *entries]
        rows = logprobs.rows(tokens, entries)
    piece = choice_piece(number, job.echoed(place) + done.text, rows, done.finish)
    count = job.body.prompt_logprobs
    if count is not None:
        piece["prompt_logprobs"] = prompt_rows(TokenTexts(job.model), job.prompts[place], done.prompt_logprobs, count)
    return piece


def choice_piece(index: int, text: str, logprobs: Any, finish: str | None) -> Piece:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


# -- as a stream --------------------------------------------------------------------------------------


async def _pieces(service: Service, job: Job) -> AsyncGenerator[Piece, None]:
    n, generated = job.sampling.n, 0
    choices = [_StreamedChoice(job, number) for number in range(len(job.prompts) * n)]
    # OpenAI's streams have the field in every piece where it is requested, with null in all but the last.
    more = {"usage": None} if job.body.includes_usage else {}
    async with aclosing(service.generate(job.model, job.prompts, job.sampling)) as events:
        async for place, event in events:
            generated += event.token is not None
            for piece in choices[place * n + event.index].pieces(event):
                yield {**job.head, "choices": [piece], **more}
    if job.body.includes_usage:
        yield {**job.head, "choices": [], "usage": job.usage(generated)}


class _StreamedChoice:
    """One sequence: its events as pieces. The prompt comes before the first, if it is echoed."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number, self.place = job, number, number // job.sampling.n
        self._logprobs = job.new_logprobs(self.place)
        self._begun = False

    def pieces(self, event: TextEvent) -> list[Piece]:
        pieces = [] if self._begun else self._begin(event)
        self._begun = True
        rows = None
        if self._logprobs is not None and event.token is not None and event.logprobs is not None:
            rows = self._logprobs.rows([event.token], [event.logprobs])
        # An event may bring nothing to show: half of a character, or text that is held back.
        if event.text or rows is not None or event.finish is not None:
            pieces.append(choice_piece(self.number, event.text, rows, event.finish))
        return pieces

    def _begin(self, event: TextEvent) -> list[Piece]:
        if not self.job.body.echo:
            return []
        rows = None
        if self._logprobs is not None:
            rows = self._logprobs.rows(self.job.prompts[self.place], event.prompt_logprobs or ())
        return [choice_piece(self.number, self.job.echoed(self.place), rows, None)]
