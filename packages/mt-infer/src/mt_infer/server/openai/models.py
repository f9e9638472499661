"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from mt_infer.server.served_model import ServedModel
from mt_infer.server.service import Service


def list_models(service: Service) -> dict[str, Any]:
    return {"object": "list", "data": [describe(model) for model in service.models.by_name.values()]}


def describe(model: ServedModel) -> dict[str, Any]:
    """OpenAI's fields; max_model_len is vLLM's, and the rest says which endpoints the model has."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "mt",
        "max_model_len": model.longest,
        "generates": model.generator is not None,
        "has_chat_template": model.chat is not None,
        "takes_images": model.generator is not None and model.generator.prompts.takes_images,
    }
