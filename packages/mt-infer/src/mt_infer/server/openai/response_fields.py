"""The body of /v1/responses, as the body of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import to_jsonable_python

from mt_infer.server.errors import from_validation
from mt_infer.server.openai.chat import ChatBody, Function, NamedFunction, NamedTool, Tool
from mt_infer.server.openai.fields import Body, Count, IgnoredFields, JsonSchema, Name, ResponseFormat, StreamOptions
from mt_infer.server.openai.messages import Message
from mt_infer.server.openai.response_items import Items

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
    """Of OpenAI's own tools; has no effect on functions."""
    truncation: Literal["disabled"] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Of this server, as the next one."""
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
