"""The fields of the installed `openai` client beside those that the server takes: a new one fails here."""

from __future__ import annotations

import importlib
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.infer.server.served import Live

from mt_infer.server.openai.chat import ChatBody, NamedTool, Tool
from mt_infer.server.openai.completions import CompletionBody
from mt_infer.server.openai.embeddings import EmbeddingBody
from mt_infer.server.openai.fields import IgnoredFields, JsonSchema, StreamOptions
from mt_infer.server.openai.messages import ImagePart, ImageUrl, Message, MessageToolCall, RefusalPart, TextPart
from mt_infer.server.openai.response_fields import (
    FunctionCall,
    FunctionOutput,
    FunctionTool,
    InputImage,
    InputText,
    MessageItem,
    Reasoning,
    ResponseBody,
    TextFormat,
    TextOptions,
)

PAGE = Path(__file__).parents[3] / "docs/commands/serve.md"
BODIES: list[tuple[type[BaseModel], str, str]] = [
    (ChatBody, "chat.completion_create_params", "CompletionCreateParamsBase"),
    (CompletionBody, "completion_create_params", "CompletionCreateParamsBase"),
    (EmbeddingBody, "embedding_create_params", "EmbeddingCreateParams"),
    (ResponseBody, "responses.response_create_params", "ResponseCreateParamsBase"),
    (StreamOptions, "chat", "ChatCompletionStreamOptionsParam"),
    (StreamOptions, "responses.response_create_params", "StreamOptions"),
    (TextPart, "chat", "ChatCompletionContentPartTextParam"),
    (ImagePart, "chat", "ChatCompletionContentPartImageParam"),
    (RefusalPart, "chat", "ChatCompletionContentPartRefusalParam"),
    (ImageUrl, "chat.chat_completion_content_part_image_param", "ImageURL"),
    (Message, "chat", "ChatCompletionSystemMessageParam"),
    (Message, "chat", "ChatCompletionDeveloperMessageParam"),
    (Message, "chat", "ChatCompletionUserMessageParam"),
    (Message, "chat", "ChatCompletionAssistantMessageParam"),
    (Message, "chat", "ChatCompletionToolMessageParam"),
    (MessageToolCall, "chat", "ChatCompletionMessageFunctionToolCallParam"),
    (Tool, "chat", "ChatCompletionFunctionToolParam"),
    (NamedTool, "chat", "ChatCompletionNamedToolChoiceParam"),
    (JsonSchema, "shared_params.response_format_json_schema", "JSONSchema"),
    (FunctionTool, "responses", "FunctionToolParam"),
    (Reasoning, "shared_params.reasoning", "Reasoning"),
    (TextOptions, "responses", "ResponseTextConfigParam"),
    (TextFormat, "responses", "ResponseFormatTextJSONSchemaConfigParam"),
    (InputText, "responses", "ResponseInputTextParam"),
    (InputText, "responses", "ResponseOutputTextParam"),
    (InputImage, "responses", "ResponseInputImageParam"),
    (MessageItem, "responses", "EasyInputMessageParam"),
    (MessageItem, "responses", "ResponseOutputMessageParam"),
    (FunctionCall, "responses", "ResponseFunctionToolCallParam"),
    (FunctionOutput, "responses.response_input_param", "FunctionCallOutput"),
]


def fields_of(model: type[BaseModel]) -> set[str]:
    """As they stand in JSON."""
    return {field.alias or name for name, field in model.model_fields.items()}


def clients(module: str, name: str) -> set[str]:
    return set(typing.get_type_hints(getattr(importlib.import_module(f"openai.types.{module}"), name)))


@pytest.mark.parametrize(("model", "module", "name"), BODIES, ids=lambda value: getattr(value, "__name__", value))
def test_every_field_of_the_client_is_taken_ignored_or_refused_by_name(model, module: str, name: str) -> None:
    unknown = clients(module, name) - fields_of(model) - set(getattr(model, "refused", ()))
    assert unknown == set(), f"fields of openai's {name} that nobody decided on"


def test_the_page_lists_what_is_ignored_and_what_is_refused() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    ignored = set(IgnoredFields.model_fields) | {"prediction", "verbosity", "include_obfuscation"}
    refused = {name for model, _, _ in BODIES for name in getattr(model, "refused", ())}
    assert (ignored | refused) - named == set()


CHAT = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
HARMLESS: dict[str, Any] = {
    "reasoning_effort": "low",
    "verbosity": "low",
    "safety_identifier": "me",
    "prompt_cache_key": "here",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "yes"},
    "service_tier": "flex",
    "store": True,
    "user": "me",
    "metadata": {"a": "b"},
    "stream_options": {"include_obfuscation": False},
}


def test_harmless_fields_change_nothing(served: Live) -> None:
    _, plain = served.call("/v1/chat/completions", CHAT)
    one_by_one = {name: value for name, value in HARMLESS.items() if name != "stream_options"}
    status, found = served.call("/v1/chat/completions", {**CHAT, **one_by_one})
    assert (status, found["choices"]) == (200, plain["choices"])
    status, _ = served.call("/v1/chat/completions", {**CHAT, **HARMLESS, "stream": True})
    assert status == 200


def test_what_cannot_be_honoured_is_refused_by_its_name(served: Live) -> None:
    for name in ChatBody.refused:
        status, answer = served.call("/v1/chat/completions", {**CHAT, name: {}})
        assert (status, answer["error"]["message"].startswith(f"{name}: ")) == (400, True)
        assert served.call("/v1/chat/completions", {**CHAT, name: None})[0] == 200
    for changed in ({"modalities": ["text", "audio"]}, {"verbosity": "loud"}, {"reasoning_efort": "low"}):
        assert served.call("/v1/chat/completions", {**CHAT, **changed})[0] == 400


def test_a_template_reads_the_reasoning_effort() -> None:
    body = ChatBody.model_validate({**CHAT, "reasoning_effort": "high", "chat_template_kwargs": {"a": 1}})
    assert body.template_names == {"reasoning_effort": "high", "a": 1}
