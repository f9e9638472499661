"""The items of a request to /v1/responses, and the messages that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mt_infer.server.openai.fields import Body
from mt_infer.server.openai.messages import (
    CalledFunction,
    ImagePart,
    ImageUrl,
    Message,
    MessageToolCall,
    RefusalPart,
    TextPart,
)

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    """A text of a message, or of an answer; what stands beside the text has no effect."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputImage(Body):
    """image_url: as in a chat. detail: has no effect."""

    type: Literal["input_image"]
    image_url: Annotated[str, Field(min_length=1)]
    file_id: None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


Part = Annotated[InputText | InputImage | RefusalPart, Field(discriminator="type")]


class MessageItem(Body):
    """A message; `id`, `status` and `phase` are those of an answer, and have no effect."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCall(Body):
    """A call that the model has answered with."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    namespace: str | None = None
    caller: dict[str, Any] | None = None
    is_async: bool | None = Field(None, alias="async")


class FunctionOutput(Body):
    """What a called function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    name: str | None = None
    status: Status | None = None
    namespace: str | None = None
    caller: dict[str, Any] | None = None


class ReasoningItem(Body):
    """What a model of OpenAI has thought; left out of the conversation, as its server does for other models."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


def _kind(value: Any) -> str:
    """A message may leave out its type."""
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return str(kind)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=10_000)]


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Calls belong to the answer before them."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, FunctionCall):
            _add_call(messages, item)
        elif not isinstance(item, ReasoningItem):
            messages.append(_message(item))
    return messages


def _add_call(messages: list[Message], item: FunctionCall) -> None:
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant"))
    function = CalledFunction(name=item.name, arguments=item.arguments)
    call = MessageToolCall(id=item.call_id, function=function)
    messages[-1] = messages[-1].model_copy(update={"tool_calls": [*(messages[-1].tool_calls or ()), call]})


def _message(item: MessageItem | FunctionOutput) -> Message:
    if isinstance(item, FunctionOutput):
        content = item.output if isinstance(item.output, str) else list(_parts(item.output))
        return Message(role="tool", tool_call_id=item.call_id, content=content)
    return Message(role=item.role, content=item.content if isinstance(item.content, str) else _plain(item.content))


def _plain(parts: Sequence[Part]) -> str | list[TextPart | ImagePart | RefusalPart]:
    """One text as a text: templates that take texts alone are given texts."""
    if len(parts) == 1 and isinstance(parts[0], InputText):
        return parts[0].text
    return list(_parts(parts))


def _parts(parts: Iterable[Part]) -> Iterable[TextPart | ImagePart | RefusalPart]:
    for part in parts:
        if isinstance(part, InputText):
            yield TextPart(type="text", text=part.text)
        elif isinstance(part, InputImage):
            yield ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url))
        else:
            yield part
