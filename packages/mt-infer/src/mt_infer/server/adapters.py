"""Loading and unloading adapters while a server runs: vLLM's endpoints /v1/load_lora_adapter and
/v1/unload_lora_adapter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from mt_core.errors import MtError
from mt_infer.server.errors import ApiError
from mt_infer.server.openai.fields import Name, RequestBody
from mt_infer.server.served_model import ServedModel
from mt_infer.server.service import Service


class LoadAdapterBody(RequestBody):
    lora_name: Name
    lora_path: Name
    """A folder within that of --adapter-folder."""


class UnloadAdapterBody(RequestBody):
    lora_name: Name


async def load_adapter(service: Service, body: LoadAdapterBody) -> dict[str, Any]:
    """Raises ApiError for a folder that requests may not load, and for an adapter that is not of the model."""
    folder = allowed_folder(service.options.adapter_folder, body.lora_path)
    base = only_base(service)
    if body.lora_name in service.models.by_name:
        raise ApiError(f'there is a model "{body.lora_name}" already', param="lora_name")
    try:
        # In the thread of the engines, between two steps.
        await service.engine.call(partial(base.require_generator().load_adapter, body.lora_name, folder))
    except MtError as error:
        raise ApiError(str(error), param="lora_path") from error
    service.models.add_adapter(base, body.lora_name)
    return {"message": f'the adapter "{body.lora_name}" is loaded'}


async def unload_adapter(service: Service, body: UnloadAdapterBody) -> dict[str, Any]:
    """Raises ApiError for a name that is no adapter, and while requests with it run."""
    allowed_folder(service.options.adapter_folder, ".")
    model = service.models.find(body.lora_name)
    if model.adapter is None:
        raise ApiError(f'"{body.lora_name}" is no adapter', param="lora_name")
    try:
        await service.engine.call(partial(model.require_generator().unload_adapter, model.adapter))
    except MtError as error:
        raise ApiError(str(error), param="lora_name") from error
    del service.models.by_name[body.lora_name]
    return {"message": f'the adapter "{body.lora_name}" is unloaded'}


def only_base(service: Service) -> ServedModel:
    if len(service.models.bases) > 1:
        raise ApiError("this server has several models; adapters are loaded where it has one", param="lora_name")
    return service.models.bases[0]


def allowed_folder(root: Path | None, name: str) -> Path:
    """The folder within the one of the server's operator. Raises ApiError for others."""
    if root is None:
        raise ApiError("adapters are loaded by requests where the server has --adapter-folder", status=403)
    folder = (root / name).resolve()
    if not folder.is_relative_to(root.resolve()) or not folder.is_dir():
        raise ApiError(f"{name} is no folder within that of --adapter-folder", param="lora_path")
    return folder
