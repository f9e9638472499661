"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from torch import Tensor

from mt_core.errors import ConfigError
from mt_infer.chat.answer_parser import AnswerPart
from mt_infer.chat.tool_calls.constraint import AnswerBeginning, behind_reasoning, offered_calls, required_call
from mt_infer.chat.tool_calls.form import ToolCall, any_id
from mt_infer.prompts import ImageViews, Sound, image_data
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.sampling.sampler import LogProbs
from mt_infer.server.errors import ApiError
from mt_infer.server.openai.answers import Piece, TokenTexts, chat_logprob, envelope, prompt_rows, usage
from mt_infer.server.openai.fields import Body, Count, SamplingFields
from mt_infer.server.openai.messages import (
    Message,
    Messages,
    PictureUrl,
    SoundPart,
    for_template,
    picture_urls,
    read_pictures,
    read_sounds,
    sound_parts,
)
from mt_infer.server.openai.sampling import constraint, sampling_of, tokens_to_generate
from mt_infer.server.served_model import ServedModel
from mt_infer.server.service import EventStream, Service, until_disconnect
from mt_infer.text import TextEvent


class Function(Body):
    """parameters: a JSON schema. strict: the arguments of calls match it."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def differently_named(tools: list[Tool]) -> list[Tool]:
    """The tools. Raises ValueError for two of one name: a call would be of either."""
    counts = Counter(tool.function.name for tool in tools)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f'two functions are named "{twice[0]}"; each needs a name of its own')
    return tools


Tools = Annotated[list[Tool], Field(min_length=1, max_length=1000), AfterValidator(differently_named)]


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingFields):
    """The body of /v1/chat/completions."""

    refused: ClassVar[Mapping[str, str]] = {
        "audio": "this server answers with text only; leave it out",
        "functions": "it has been replaced by tools",
        "function_call": "it has been replaced by tool_choice",
        "moderation": "this server moderates nothing; leave it out",
        "web_search_options": "this server searches nothing; leave it out",
    }

    messages: Messages
    max_tokens: Count | None = None
    """Default: all that the context has left."""
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    """false: an answer has one call at most."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further names for the chat template, such as enable_thinking."""
    reasoning_effort: Annotated[str, Field(max_length=20)] | None = None
    """For the chat template, as a name of chat_template_kwargs; other templates ignore it."""
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = None
    """This and the next one change nothing in an answer, and have no effect."""
    verbosity: Literal["low", "medium", "high"] | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs=true")
        if self.tool_choice is not None and self.tools is None:
            raise ValueError("tool_choice is for requests with tools")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens is the former name of max_completion_tokens; give one of them")
        return self

    @property
    def template_names(self) -> dict[str, Any]:
        """What the chat template gets beside messages and tools."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Tools in the form that templates write."""
        if self.tools is None or self.tool_choice == "none":
            return None
        return [tool.for_template() for tool in self.tools]

    @property
    def offered_functions(self) -> list[dict[str, Any]]:
        is_offered = self.tools is not None and self.tool_choice != "none"
        return [tool.function.model_dump(exclude_none=True) for tool in self.tools or ()] if is_offered else []

    @property
    def required_functions(self) -> list[dict[str, Any]]:
        """Those of which the answer has to be a call. Raises ApiError for a name that no tool has."""
        functions = self.offered_functions
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            named = [function for function in functions if function["name"] == name]
            if not named:
                raise ApiError(f'tool_choice: no tool is named "{name}"', param="tool_choice")
            return named
        return functions if self.tool_choice == "required" else []


@dataclass
class Job:
    """A request on its way: its prompt as tokens, and what the model takes beside them."""

    model: ServedModel
    body: ChatBody
    prompt: list[int]
    inputs: Mapping[str, Tensor]
    sampling: SamplingParameters
    kind: str
    head: Piece = field(init=False)

    def __post_init__(self) -> None:
        self.head = envelope(self.kind, "chatcmpl", self.model.name)

    def new_choices(self) -> list[Choice]:
        return [Choice(self, index) for index in range(self.sampling.n)]


async def create_chat_completion(service: Service, body: ChatBody, http: HttpRequest) -> Response:
    job = await new_job(service, body)
    if body.stream:
        return EventStream(_pieces(service, job))
    return await until_disconnect(http, _whole(service, job))


async def new_job(service: Service, body: ChatBody) -> Job:
    """Raises ApiError for what the model cannot answer."""
    model = service.models.find(body.model)
    # Order: cheap refusals first, then images (memory), the template (another process), and the tokens.
    urls = picture_urls(body.messages)
    if urls and not model.require_generator().prompts.takes_images:
        raise ApiError(f'the model "{model.name}" takes no images', param="messages")
    if any(picture.is_video for picture in urls) and not model.require_generator().prompts.takes_videos:
        raise ApiError(f'a part is a video_url, and the model "{model.name}" takes no videos', param="messages")
    parts = sound_parts(body.messages)
    if parts and not model.require_generator().prompts.takes_sounds:
        raise ApiError(f'the model "{model.name}" takes no sounds', param="messages")
    images = await _images(service, model, urls) if urls else []
    sounds = await _sounds(service, model, parts) if parts else []
    prompt = await asyncio.to_thread(_prompt, model, body, images, sounds)
    sampling = _sampling(service, model, body, prompt)
    inputs: Mapping[str, Tensor] = {}
    if images or sounds:
        prompts = model.require_generator().prompts
        inputs = {**prompts.image_inputs(images), **prompts.sound_inputs(sounds)}
    return Job(model, body, prompt, inputs, sampling, "chat.completion.chunk" if body.stream else "chat.completion")


def _prompt(model: ServedModel, body: ChatBody, images: Sequence[ImageViews], sounds: Sequence[Sound]) -> list[int]:
    return chat_prompt(model, body.messages, body.offered_tools, body.template_names, images, sounds)


def chat_prompt(
    model: ServedModel,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    names: Mapping[str, Any],
    images: Sequence[ImageViews] = (),
    sounds: Sequence[Sound] = (),
) -> list[int]:
    """The ids of a conversation. names: further ones of the template. images: of its images and videos, in order."""
    chat = model.require_chat()
    text = chat.text(for_template(messages), tools, names)
    if not (images or sounds):
        return chat.encode(text)
    return model.require_generator().prompts.with_pictures(text, images, chat.encode, sounds)


async def _sounds(service: Service, model: ServedModel, parts: Sequence[SoundPart]) -> list[Sound]:
    """The samples of each sound, one request's at a time, as images are."""
    rule = model.require_generator().prompts.sound_tokens.rule
    async with service.decoding:
        return await asyncio.to_thread(read_sounds, parts, service.options.media_folders, rule)


async def _images(service: Service, model: ServedModel, urls: Sequence[PictureUrl]) -> list[ImageViews]:
    """The views of each image. One request's at a time: an image takes much memory while it is decoded.

    Raises ApiError for more images than the context has room for, before any is decoded.
    """
    data = image_data(model.require_generator().config)
    # A lower bound: a tiled image takes several times as many.
    if (tokens := len(urls) * data.image_seq_length) > model.max_model_len:
        raise ApiError(
            f"this model's context is {model.max_model_len} tokens; {len(urls)} images take {tokens} and more; "
            "send fewer",
            param="messages",
            code="context_length_exceeded",
        )

    def read() -> list[ImageViews]:
        return list(read_pictures(urls, service.options.media_folders, data))

    async with service.decoding:
        return await asyncio.to_thread(read)


def _sampling(service: Service, model: ServedModel, body: ChatBody, prompt: Sequence[int]) -> SamplingParameters:
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    chat = model.require_chat()
    return sampling_of(
        body,
        model,
        max_tokens=tokens_to_generate(asked, None, [prompt], model, service.options),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        # The template's end marks are added to the request's own.
        stop=chat.stop,
        stop_token_ids=() if body.ignore_eos else chat.stop_token_ids,
        **_answer_constraint(model, body, prompt),
    )


def _answer_constraint(model: ServedModel, body: ChatBody, prompt: Sequence[int]) -> dict[str, Any]:
    """What the answer has to match behind the reasoning, in the form of the model."""
    beginning = model.require_chat().beginning(prompt)
    calls = _call_constraint(model, body, beginning)
    return calls or behind_reasoning(constraint(body), beginning)


def _call_constraint(model: ServedModel, body: ChatBody, beginning: AnswerBeginning) -> dict[str, Any]:
    functions = body.required_functions
    if not functions:
        return _strict_calls(model, body, beginning)
    form = model.require_chat().calls
    if form is None:
        raise ApiError(
            f'tool_choice: the chat template of "{model.name}" has no tool calls in a form that is known',
            param="tool_choice",
        )
    if constraint(body):
        raise ApiError("tool_choice says what the answer is; leave out response_format", param="tool_choice")
    try:
        return required_call(form, functions, beginning)
    except ConfigError as error:
        raise ApiError(f"tools: {error}", param="tools") from error


def _strict_calls(model: ServedModel, body: ChatBody, beginning: AnswerBeginning) -> dict[str, Any]:
    """Where the answer may be a call, and some function is strict."""
    functions, form = body.offered_functions, model.require_chat().calls
    if form is None or not any(function.get("strict") for function in functions):
        return {}
    if constraint(body):
        raise ApiError("tools with strict=true constrain the answer; leave out response_format", param="tools")
    try:
        return offered_calls(form, functions, beginning)
    except ConfigError as error:
        raise ApiError(f"tools: {error}", param="tools") from error


class Choice:
    """One answer as it comes: what it thinks, its content, tool calls and log-probabilities."""

    def __init__(self, job: Job, index: int) -> None:
        self.index = index
        chat = job.model.require_chat()
        self._form = chat.calls
        self._parser = chat.parser(job.prompt, job.body.offered_functions or None)
        self._most_calls = 1 if job.body.parallel_tool_calls is False else None
        self._calls_before = sum(len(message.tool_calls or ()) for message in job.body.messages)
        self._texts = TokenTexts(job.model) if job.body.logprobs else None
        self.calls: list[Piece] = []
        self.reasoning_tokens = 0
        self._has_answered, self._has_thought = False, False

    def add(self, event: TextEvent) -> tuple[AnswerPart, list[Piece], list[Piece], str | None]:
        """What the event brings: text, described calls, entries of logprobs, and why the answer ends."""
        part = self._parser.add(event.text)
        if event.finish is not None:
            part += self._parser.finish()
        calls = [self._described(call) for call in part.calls]
        if self._most_calls is not None:
            calls = calls[: max(self._most_calls - len(self.calls), 0)]
        self.calls += calls
        self._count(part, event)
        finish = "tool_calls" if event.finish is not None and self.calls else event.finish
        return part, calls, self._logprobs(event), finish

    def _count(self, part: AnswerPart, event: TextEvent) -> None:
        """Tokens before the first content or call are those of the reasoning, if there is one."""
        self._has_thought = self._has_thought or bool(part.reasoning)
        self._has_answered = self._has_answered or bool(part.content or part.calls)
        self.reasoning_tokens += event.token is not None and not self._has_answered

    @property
    def thought_tokens(self) -> int:
        return self.reasoning_tokens if self._has_thought else 0

    def _logprobs(self, event: TextEvent) -> list[Piece]:
        if self._texts is None or event.token is None or event.logprobs is None:
            return []
        return [chat_logprob(self._texts, event.token, event.logprobs)]

    def _described(self, call: ToolCall) -> Piece:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self._call_id(call), "type": "function", "function": function}

    def _call_id(self, call: ToolCall) -> str:
        make = any_id if self._form is None else self._form.call_id
        return call.id or make(call.name, self._calls_before + len(self.calls), None)


# -- in one piece -------------------------------------------------------------------------------------


async def _whole(service: Service, job: Job) -> Response:
    choices = job.new_choices()
    parts = [AnswerPart() for _ in choices]
    logprobs: list[list[Piece]] = [[] for _ in choices]
    finishes: list[str | None] = [None] * len(choices)
    generated = 0
    prompt_logprobs: Sequence[LogProbs | None] | None = None
    async with aclosing(service.generate(job.model, [job.prompt], job.sampling, job.inputs)) as events:
        async for _, event in events:
            part, _, entries, finish = choices[event.index].add(event)
            parts[event.index] += part
            logprobs[event.index] += entries
            finishes[event.index] = finish
            prompt_logprobs = event.prompt_logprobs or prompt_logprobs
            generated += event.token is not None
    described = [
        {
            "index": choice.index,
            "message": _message(choice, part),
            "logprobs": {"content": entries, "refusal": None} if job.body.logprobs else None,
            "finish_reason": finish,
        }
        for choice, part, entries, finish in zip(choices, parts, logprobs, finishes, strict=True)
    ]
    more: Piece = {}
    if (count := job.body.prompt_logprobs) is not None:
        more["prompt_logprobs"] = prompt_rows(TokenTexts(job.model), job.prompt, prompt_logprobs, count)
    return JSONResponse({**job.head, "choices": described, "usage": usage(len(job.prompt), generated), **more})


def _message(choice: Choice, part: AnswerPart) -> Piece:
    content = part.content or None if choice.calls or part.reasoning else part.content
    message: Piece = {"role": "assistant", "content": content, "refusal": None}
    if part.reasoning:
        message["reasoning_content"] = part.reasoning
    return {**message, "tool_calls": choice.calls} if choice.calls else message


# -- as a stream --------------------------------------------------------------------------------------


async def _pieces(service: Service, job: Job) -> AsyncGenerator[Piece, None]:
    choices, begun, generated = job.new_choices(), set[int](), 0
    more = {"usage": None} if job.body.includes_usage else {}
    async with aclosing(service.generate(job.model, [job.prompt], job.sampling, job.inputs)) as events:
        async for _, event in events:
            generated += event.token is not None
            choice = choices[event.index]
            first = choice.index not in begun
            begun.add(choice.index)
            for piece in _choice_pieces(job, choice, event, first=first):
                yield {**job.head, "choices": [piece], **more}
    if job.body.includes_usage:
        yield {**job.head, "choices": [], "usage": usage(len(job.prompt), generated)}


def _choice_pieces(job: Job, choice: Choice, event: TextEvent, *, first: bool) -> list[Piece]:
    known = len(choice.calls)
    part, new_calls, entries, finish = choice.add(event)
    pieces = [_delta(choice, {"role": "assistant", "content": ""})] if first else []
    logprobs = {"content": entries, "refusal": None} if job.body.logprobs else None
    if part.reasoning:
        # The entries of an event are sent once.
        with_content = bool(part.content)
        pieces.append(_delta(choice, {"reasoning_content": part.reasoning}, None if with_content else logprobs))
    if part.content or (entries and not part.reasoning):
        pieces.append(_delta(choice, {"content": part.content}, logprobs))
    if new_calls:
        calls = [{"index": number, **call} for number, call in enumerate(new_calls, known)]
        pieces.append(_delta(choice, {"tool_calls": calls}))
    if finish is not None:
        pieces.append({**_delta(choice, {}), "finish_reason": finish})
    return pieces


def _delta(choice: Choice, delta: Piece, logprobs: Any = None) -> Piece:
    return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
