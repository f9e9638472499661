"""POST /tokenize and /detokenize, with vLLM's fields, and GET /v1/models."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field, model_validator

from mt_data.datasets.text_files import bare_encoder
from mt_infer.server.errors import ApiError
from mt_infer.server.openai.answers import token_texts
from mt_infer.server.openai.chat import Tools, chat_prompt
from mt_infer.server.openai.fields import Name, RequestBody, TokenId
from mt_infer.server.openai.messages import Messages, picture_urls, sound_parts
from mt_infer.server.served_model import ServedModel
from mt_infer.server.service import Service


class TokenizeBody(RequestBody):
    """The body of /tokenize: a prompt, or messages, which the chat template makes one of."""

    model: Name | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Whether a prompt gets what the tokenizer puts around a text, such as BOS. Default: true."""
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    """Default: true: up to where the answer begins."""
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of them")
        if self.messages is None and (self.tools, self.add_generation_prompt, self.chat_template_kwargs) != (None,) * 3:
            raise ValueError("tools, add_generation_prompt and chat_template_kwargs are for messages")
        if self.prompt is None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens is for a prompt; a chat template writes its own")
        return self


class DetokenizeBody(RequestBody):
    """The body of /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=10_000_000)]


async def tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    model = service.models.find(body.model)
    return await asyncio.to_thread(_tokenized, model, body)


async def detokenize(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    model = service.models.find(body.model)
    size = model.tokenizer.vocab_size
    wrong = [token for token in body.tokens if token >= size]
    if wrong:
        raise ApiError(f"tokens has the id {wrong[0]}; ids go from 0 to {size - 1}", param="tokens")
    return {"prompt": await asyncio.to_thread(model.tokenizer.decode, body.tokens)}


def _tokenized(model: ServedModel, body: TokenizeBody) -> dict[str, Any]:
    tokens = _ids(model, body)
    texts = token_texts(model, tokens) if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens, "token_strs": texts}


def _ids(model: ServedModel, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        if picture_urls(body.messages) or sound_parts(body.messages):
            raise ApiError("messages: an image or a sound has no tokens of its own; leave it out", param="messages")
        tools = [tool.for_template() for tool in body.tools or ()] or None
        begins = {} if body.add_generation_prompt is None else {"add_generation_prompt": body.add_generation_prompt}
        return chat_prompt(model, body.messages, tools, {**begins, **(body.chat_template_kwargs or {})})
    assert body.prompt is not None
    if body.add_special_tokens is False:
        return list(bare_encoder(model.tokenizer)(body.prompt))
    if model.generator is None:
        return model.require_embedder().tokens(body.prompt)
    return model.generator.prompt_tokens(body.prompt)


def list_models(service: Service) -> dict[str, Any]:
    return {"object": "list", "data": [describe(model) for model in service.models.by_name.values()]}


def describe(model: ServedModel) -> dict[str, Any]:
    """OpenAI's fields; max_model_len is vLLM's, and the rest says which endpoints the model has."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "mt",
        "parent": model.parent,
        "max_model_len": model.max_model_len,
        "generates": model.generator is not None,
        "has_chat_template": model.chat is not None,
        "takes_images": model.generator is not None and model.generator.prompts.takes_images,
    }
