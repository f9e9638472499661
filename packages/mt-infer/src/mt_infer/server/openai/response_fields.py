"""The body of /v1/responses: its items, and the chat that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, field_validator, model_validator
from pydantic_core import to_jsonable_python

from mt_infer.server.errors import from_validation
from mt_infer.server.openai.chat import ChatBody, Function, NamedFunction, NamedTool, Tool
from mt_infer.server.openai.fields import Body, Count, IgnoredFields, JsonSchema, Name, ResponseFormat, StreamOptions
from mt_infer.server.openai.messages import (
    CalledFunction,
    ContentPart,
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


class ReasoningPart(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What an answer has thought; its texts are given to templates that write reasoning. Summaries, and what a model of
    OpenAI has encrypted, are left out."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[ReasoningPart] | None = None
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
    """Calls belong to the answer before them, reasoning to the one behind it."""
    messages: list[Message] = []
    reasoning = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            reasoning += "".join(part.text for part in item.content or ())
        elif isinstance(item, FunctionCall):
            # Another answer has begun where it has thought again.
            _add_call(messages, item, reasoning)
            reasoning = ""
        else:
            messages.append(_with_reasoning(_message(item), reasoning))
            reasoning = ""
    return messages


def _with_reasoning(message: Message, reasoning: str) -> Message:
    is_answer = reasoning and message.role == "assistant"
    return message.model_copy(update={"reasoning_content": reasoning}) if is_answer else message


def _add_call(messages: list[Message], item: FunctionCall, reasoning: str) -> None:
    if not messages or messages[-1].role != "assistant" or reasoning:
        messages.append(_with_reasoning(Message(role="assistant"), reasoning))
    function = CalledFunction(name=item.name, arguments=item.arguments)
    call = MessageToolCall(id=item.call_id, function=function)
    messages[-1] = messages[-1].model_copy(update={"tool_calls": [*(messages[-1].tool_calls or ()), call]})


def _message(item: MessageItem | FunctionOutput) -> Message:
    if isinstance(item, FunctionOutput):
        content = item.output if isinstance(item.output, str) else list(_parts(item.output))
        return Message(role="tool", tool_call_id=item.call_id, content=content)
    return Message(role=item.role, content=item.content if isinstance(item.content, str) else _plain(item.content))


def _plain(parts: Sequence[Part]) -> str | list[ContentPart]:
    """One text as a text: templates that take texts alone are given texts."""
    if len(parts) == 1 and isinstance(parts[0], InputText):
        return parts[0].text
    return list(_parts(parts))


def _parts(parts: Iterable[Part]) -> Iterable[ContentPart]:
    for part in parts:
        if isinstance(part, InputText):
            yield TextPart(type="text", text=part.text)
        elif isinstance(part, InputImage):
            yield ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url))
        else:
            yield part


LOGPROBS = "message.output_text.logprobs"


class FunctionTool(Function):
    """A function that the model may call. `async`, `allowed_callers`, `defer_loading` and `output_schema` are of
    OpenAI's own tools, and have no effect."""

    type: Literal["function"]
    is_async: bool | None = Field(None, alias="async")
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None

    def as_tool(self) -> Tool:
        function = Function(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return Tool(type="function", function=function)


class NamedFunctionTool(NamedFunction):
    type: Literal["function"]


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]

    def as_response_format(self) -> ResponseFormat:
        schema = None
        if self.type == "json_schema":
            schema = JsonSchema.model_validate(self.model_dump(by_alias=True, exclude={"type"}))
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(Body):
    """verbosity: has no effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Body):
    """effort: for the chat template, as reasoning_effort of a chat. The others have no effect: no summary is made."""

    effort: Annotated[str, Field(max_length=20)] | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseBody(IgnoredFields):
    """The body of /v1/responses."""

    refused: ClassVar[Mapping[str, str]] = {
        "access_programs": "this server has no programs; leave it out",
        "context_management": "this server shortens no conversation; leave it out",
        "conversation": "this server keeps no conversations; give previous_response_id, or all items as input",
        "image": "this server makes no images; leave it out",
        "moderation": "this server moderates nothing; leave it out",
        "prompt": "this server keeps no prompts; give instructions and input",
    }

    model: Name | None = None
    input: str | Items
    instructions: str | None = None
    """A system message before all others; of this response alone."""
    previous_response_id: str | None = None
    """The conversation goes on after that response, which this server has to have stored."""
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=1000)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    """"message.output_text.logprobs"; others name what this server never has."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: Literal[False] | None = None
    max_tool_calls: Count | None = None
    """Limit for OpenAI's own tools; has no effect on functions."""
    truncation: Literal["disabled"] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    @field_validator("background", mode="before")
    @classmethod
    def _answers_at_once(cls, value: object) -> object:
        if value is True:
            raise ValueError("this server computes an answer while its request is open; leave it out, or use stream")
        return value

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """This server's, as is the next one."""
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> ResponseBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream=true")
        return self

    @property
    def reports_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or self.top_logprobs is not None

    def as_chat(self, messages: Sequence[Message]) -> ChatBody:
        """Raises ApiError for what no chat can be."""
        text = self.text or TextOptions()
        values = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "priority": self.priority,
            "logprobs": self.reports_logprobs or None,
            "top_logprobs": self.top_logprobs,
            "response_format": None if text.format is None else text.format.as_response_format(),
            "tools": [tool.as_tool() for tool in self.tools or ()] or None,
            "tool_choice": self._chats_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
            "stream": self.stream,
        }
        try:
            # As JSON: a chat is checked as if it had come so.
            return ChatBody.model_validate(to_jsonable_python(values, by_alias=True, exclude_none=True))
        except ValidationError as error:
            raise from_validation(error.errors()) from error

    def _chats_choice(self) -> Any:
        if isinstance(self.tool_choice, NamedFunctionTool):
            return NamedTool(type="function", function=NamedFunction(name=self.tool_choice.name))
        # Clients send "auto" without tools too.
        return self.tool_choice if self.tools or self.tool_choice == "required" else None
