"""POST /v1/responses, and the responses that are kept for later ones."""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mt_infer.server.errors import ApiError, as_api_error
from mt_infer.server.openai.answers import Piece
from mt_infer.server.openai.chat import Choice, Job, new_job
from mt_infer.server.openai.messages import CalledFunction, Message, MessageToolCall
from mt_infer.server.openai.response_fields import ResponseBody, messages_of
from mt_infer.server.service import EventStream, Service, until_disconnect
from mt_infer.text import TextEvent

MOST_STORED = 1000
"""Responses that a server keeps; the oldest is forgotten first."""


@dataclass(frozen=True)
class Stored:
    """A response and the conversation up to its end, without instructions, which are of one response."""

    response: Piece
    messages: tuple[Message, ...]


class StoredResponses:
    """The last responses, by their ids, in memory: they end with the server."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Stored] = OrderedDict()

    def add(self, stored: Stored) -> None:
        self._by_id[stored.response["id"]] = stored
        if len(self._by_id) > MOST_STORED:
            self._by_id.popitem(last=False)

    def find(self, number: str, param: str | None = None) -> Stored:
        """Raises ApiError."""
        if number not in self._by_id:
            raise ApiError(
                f'there is no response "{number[:100]}"; this server keeps the last {MOST_STORED} that were made with '
                "store=true",
                status=404,
                param=param,
                code="not_found",
            )
        return self._by_id[number]

    def remove(self, number: str) -> Piece:
        self.find(number)
        del self._by_id[number]
        return {"id": number, "object": "response.deleted", "deleted": True}


log = logging.getLogger(__name__)
ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id", "prompt_cache_key",
    "safety_identifier", "service_tier", "temperature", "top_p", "top_logprobs", "truncation", "user",
)  # fmt: skip


@dataclass
class Conversation:
    """A request on its way: the messages before its answer, and the chat that answers."""

    body: ResponseBody
    messages: list[Message]
    job: Job
    stored: StoredResponses
    id: str = field(default_factory=lambda: new_id("resp"))
    created: int = field(default_factory=lambda: int(time.time()))


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


async def create_response(service: Service, stored: StoredResponses, body: ResponseBody, http: HttpRequest) -> Response:
    before = () if body.previous_response_id is None else _stored_messages(stored, body.previous_response_id)
    new_messages = (
        [Message(role="user", content=body.input)] if isinstance(body.input, str) else messages_of(body.input)
    )
    messages = [*before, *new_messages]
    system = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if not messages:
        raise ApiError("input has no message", param="input")
    job = await new_job(service, body.as_chat([*system, *messages]))
    conversation = Conversation(body, messages, job, stored)
    if body.stream:
        return EventStream(_events(service, conversation), named=True)
    return await until_disconnect(http, _whole(service, conversation))


def _stored_messages(stored: StoredResponses, number: str) -> tuple[Message, ...]:
    return stored.find(number, "previous_response_id").messages


@dataclass
class OpenItem:
    """A message, or reasoning, that is written."""

    kind: Literal["message", "reasoning"]
    id: str
    text: str = ""
    logprobs: list[Piece] = field(default_factory=list)

    @property
    def part_name(self) -> str:
        """The name of its part, which the stream's events have too."""
        return "output_text" if self.kind == "message" else "reasoning_text"

    def part(self) -> Piece:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def item(self, status: str, content: Sequence[Piece]) -> Piece:
        others: Piece = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return {"id": self.id, "type": self.kind, "status": status, "content": list(content), **others}


class Output:
    """The items of one answer as they come, each with the events of a stream."""

    def __init__(self, job: Job) -> None:
        self._choice = Choice(job, 0)
        self._open: OpenItem | None = None
        self.finish = ""
        self.items: list[Piece] = []

    def add(self, event: TextEvent) -> Iterator[Piece]:
        """The stream's events that an event of the engine brings."""
        part, calls, entries, finish = self._choice.add(event)
        if part.reasoning:
            yield from self._write("reasoning", part.reasoning, [])
        if part.content or (entries and not part.reasoning):
            yield from self._write("message", part.content, entries)
        for call in calls:
            yield from self._end("completed")
            yield from self._call(call)
        if finish is not None:
            self.finish = finish
            # An answer without a call has a message, if an empty one.
            if not self._choice.calls and not any(item["type"] == "message" for item in self.items):
                yield from self._begin("message")
            yield from self._end("incomplete" if self.is_cut else "completed")

    @property
    def is_cut(self) -> bool:
        return self.finish == "length"

    @property
    def reasoning_tokens(self) -> int:
        return self._choice.thought_tokens

    def as_message(self) -> Message:
        """For the next turn of the conversation."""
        calls = [
            MessageToolCall(id=call["call_id"], function=CalledFunction(name=call["name"], arguments=call["arguments"]))
            for call in self.items
            if call["type"] == "function_call"
        ]
        reasoning = self._text_of("reasoning") or None
        content = self._text_of("message")
        return Message(role="assistant", content=content, tool_calls=calls or None, reasoning_content=reasoning)

    def _text_of(self, kind: str) -> str:
        return "".join(part["text"] for item in self.items if item["type"] == kind for part in item["content"])

    def _write(self, kind: Literal["message", "reasoning"], text: str, entries: Sequence[Piece]) -> Iterator[Piece]:
        yield from self._begin(kind)
        assert self._open is not None
        self._open.text += text
        self._open.logprobs += entries
        logprobs = {"logprobs": list(entries)} if kind == "message" else {}
        yield self._of_text(f"response.{self._open.part_name}.delta", delta=text, **logprobs)

    def _begin(self, kind: Literal["message", "reasoning"]) -> Iterator[Piece]:
        if self._open is not None and self._open.kind == kind:
            return
        yield from self._end("completed")
        self._open = OpenItem(kind, new_id("msg" if kind == "message" else "rs"))
        yield self._of_item("response.output_item.added", self._open.item("in_progress", []))
        yield self._of_text("response.content_part.added", part=self._open.part())

    def _end(self, status: str) -> Iterator[Piece]:
        if self._open is None:
            return
        part = self._open.part()
        logprobs = {"logprobs": self._open.logprobs} if self._open.kind == "message" else {}
        yield self._of_text(f"response.{self._open.part_name}.done", text=self._open.text, **logprobs)
        yield self._of_text("response.content_part.done", part=part)
        item = self._open.item(status, [part])
        yield self._of_item("response.output_item.done", item)
        self.items.append(item)
        self._open = None

    def _call(self, call: Piece) -> Iterator[Piece]:
        function, number = call["function"], new_id("fc")
        item = {"id": number, "type": "function_call", "call_id": call["id"], "name": function["name"]}
        arguments = function["arguments"]
        yield self._of_item("response.output_item.added", {**item, "arguments": "", "status": "in_progress"})
        place = {"item_id": number, "output_index": len(self.items)}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        yield {
            "type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": arguments
        }  # fmt: skip
        done = {**item, "arguments": arguments, "status": "completed"}
        yield self._of_item("response.output_item.done", done)
        self.items.append(done)

    def _of_item(self, kind: str, item: Piece) -> Piece:
        return {"type": kind, "output_index": len(self.items), "item": item}

    def _of_text(self, kind: str, **values: Any) -> Piece:
        assert self._open is not None
        return {"type": kind, "item_id": self._open.id, "output_index": len(self.items), "content_index": 0, **values}


def described(conversation: Conversation, status: str, output: Sequence[Piece] = (), **others: Any) -> Piece:
    """The response object."""
    body = conversation.body
    text = {} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
    choice: Any = body.tool_choice or "auto"
    return {
        "id": conversation.id,
        "object": "response",
        "created_at": conversation.created,
        "model": conversation.job.model.name,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "output": list(output),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump(by_alias=True, exclude_none=True) for tool in body.tools or ()],
        "text": {"format": {"type": "text"}, **text},
        "background": False,
        "store": body.store is not False,
        **{name: getattr(body, name) for name in ECHOED},
        "usage": None,
        **others,
    }


def _ended(conversation: Conversation, output: Output, generated: int) -> Piece:
    """The response at its end, which is kept unless store=false."""
    prompt = len(conversation.job.prompt)
    used = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
        "total_tokens": prompt + generated,
    }
    reason = {"incomplete_details": {"reason": "max_output_tokens"}}
    end = reason if output.is_cut else {"completed_at": int(time.time())}
    status = "incomplete" if output.is_cut else "completed"
    response = described(conversation, status, output.items, usage=used, **end)
    if conversation.body.store is not False:
        conversation.stored.add(Stored(response, (*conversation.messages, output.as_message())))
    return response


async def _whole(service: Service, conversation: Conversation) -> Response:
    job = conversation.job
    output, generated = Output(job), 0
    async with aclosing(service.generate(job.model, [job.prompt], job.sampling, job.inputs)) as events:
        async for _, event in events:
            generated += event.token is not None
            for _ in output.add(event):
                pass
    return JSONResponse(_ended(conversation, output, generated))


async def _events(service: Service, conversation: Conversation) -> AsyncGenerator[Piece, None]:
    """Events of the stream, each with its number."""
    number = 0
    async with aclosing(_unnumbered(service, conversation)) as events:
        async for event in events:
            yield {**event, "sequence_number": number}
            number += 1


async def _unnumbered(service: Service, conversation: Conversation) -> AsyncGenerator[Piece, None]:
    job = conversation.job
    output, generated, begun = Output(job), 0, False
    try:
        async with aclosing(service.generate(job.model, [job.prompt], job.sampling, job.inputs)) as events:
            async for _, event in events:
                if not begun:
                    # Not before the engine has taken the request: what it refuses has a status of its own.
                    for kind in ("created", "in_progress"):
                        yield {"type": f"response.{kind}", "response": described(conversation, "in_progress")}
                    begun = True
                generated += event.token is not None
                for piece in output.add(event):
                    yield piece
    except Exception as error:
        if not begun:
            raise
        api_error = as_api_error(error)
        if api_error.status >= 500 and api_error is not error:
            log.exception("a response failed")
        failed = described(conversation, "failed", error={"code": "server_error", "message": str(api_error)})
        yield {"type": "response.failed", "response": failed}
        return
    response = _ended(conversation, output, generated)
    yield {"type": f"response.{response['status']}", "response": response}
