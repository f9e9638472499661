"""The application: endpoints and what is around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from mt_infer.server import megatron
from mt_infer.server.adapters import LoadAdapterBody, UnloadAdapterBody, load_adapter, unload_adapter
from mt_infer.server.errors import MEGATRON_PATH, add_error_handlers
from mt_infer.server.json_bodies import JSONRoute
from mt_infer.server.openai import tokens
from mt_infer.server.openai.batches import Answer, BatchBody, Batches, post
from mt_infer.server.openai.chat import ChatBody, create_chat_completion
from mt_infer.server.openai.completions import CompletionBody, create_completion
from mt_infer.server.openai.embeddings import (
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    create_embeddings,
    create_ranking,
    create_scores,
)
from mt_infer.server.openai.files import MOST_LISTED, StoredFiles, create_file, page_of
from mt_infer.server.openai.response_fields import ResponseBody
from mt_infer.server.openai.responses import StoredResponses, create_response
from mt_infer.server.openai.tokens import DetokenizeBody, TokenizeBody, describe, list_models
from mt_infer.server.page import page
from mt_infer.server.security import RequestChecks
from mt_infer.server.service import Service

Limit = Annotated[int, Query(ge=1, le=MOST_LISTED)]
Order = Literal["asc", "desc"]
VERSIONLESS = ("/v1", "")
"""Megatron's server has the endpoints with and without it."""


def create_app(service: Service) -> FastAPI:
    """The ASGI application. Its lifespan starts and stops the thread of the engines."""
    files = StoredFiles(service.options.max_files_bytes)

    async def ask(path: str, body: Mapping[str, Any]) -> Answer:
        return await post(app, path, body, service.options.api_key)

    batches = Batches(files, ask)
    app = FastAPI(title="mt serve", docs_url=None, redoc_url=None, lifespan=_lifespan(service, files, batches))
    # Before the routes are added: each takes the class that is set then.
    app.router.route_class = JSONRoute
    app.add_middleware(RequestChecks, options=service.options)
    add_error_handlers(app)
    _add_openai(app, service)
    _add_vllm(app, service)
    _add_adapters(app, service)
    _add_megatron(app, service)
    _add_batches(app, service, files, batches)
    _add_operations(app, service)
    return app


def _lifespan(service: Service, files: StoredFiles, batches: Batches) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        service.engine.start()
        yield
        await batches.close()
        files.close()
        # stop() joins the thread, which hands its last errors to this event loop: the loop must not be blocked.
        await asyncio.to_thread(service.engine.stop)
        for model in service.models.by_name.values():
            if model.chat is not None:
                model.chat.close()

    return lifespan


def _add_openai(app: FastAPI, service: Service) -> None:
    stored = StoredResponses()

    async def completions(body: CompletionBody, http: Request) -> Response:
        return await create_completion(service, body, http)

    async def chat_completions(body: ChatBody, http: Request) -> Response:
        return await create_chat_completion(service, body, http)

    async def embeddings(body: EmbeddingBody, http: Request) -> Response:
        return await create_embeddings(service, body, http)

    async def responses(body: ResponseBody, http: Request) -> Response:
        return await create_response(service, stored, body, http)

    async def response(number: str) -> dict[str, Any]:
        return stored.find(number).response

    async def delete_response(number: str) -> dict[str, Any]:
        return stored.remove(number)

    async def models() -> dict[str, Any]:
        return list_models(service)

    async def model(name: str) -> dict[str, Any]:
        return describe(service.models.find(name))

    for prefix in VERSIONLESS:
        app.post(f"{prefix}/completions", response_model=None)(completions)
        app.post(f"{prefix}/chat/completions", response_model=None)(chat_completions)
    app.post("/v1/embeddings", response_model=None)(embeddings)
    app.post("/v1/responses", response_model=None)(responses)
    app.get("/v1/responses/{number}", response_model=None)(response)
    app.delete("/v1/responses/{number}", response_model=None)(delete_response)
    app.get("/v1/models", response_model=None)(models)
    app.get("/v1/models/{name:path}", response_model=None)(model)


def _add_vllm(app: FastAPI, service: Service) -> None:
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        return await tokens.tokenize(service, body)

    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        return await tokens.detokenize(service, body)

    async def score(body: ScoreBody, http: Request) -> Response:
        return await create_scores(service, body, http)

    async def rerank(body: RerankBody, http: Request) -> Response:
        return await create_ranking(service, body, http)

    app.post("/tokenize", response_model=None)(tokenize)
    app.post("/detokenize", response_model=None)(detokenize)
    for prefix in VERSIONLESS:
        app.post(f"{prefix}/score", response_model=None)(score)
    # Jina has it with /v1, Cohere with /v2.
    for prefix in (*VERSIONLESS, "/v2"):
        app.post(f"{prefix}/rerank", response_model=None)(rerank)


def _add_adapters(app: FastAPI, service: Service) -> None:
    async def load(body: LoadAdapterBody) -> dict[str, Any]:
        return await load_adapter(service, body)

    async def unload(body: UnloadAdapterBody) -> dict[str, Any]:
        return await unload_adapter(service, body)

    app.post("/v1/load_lora_adapter", response_model=None)(load)
    app.post("/v1/unload_lora_adapter", response_model=None)(unload)


def _add_batches(app: FastAPI, service: Service, files: StoredFiles, batches: Batches) -> None:
    async def add_file(http: Request) -> dict[str, Any]:
        return await create_file(files, http)

    async def list_files(
        after: str | None = None, limit: Limit = MOST_LISTED, order: Order = "desc", purpose: str | None = None
    ) -> dict[str, Any]:
        rows = [file.described() for file in files.all() if purpose in (None, file.purpose)]
        return page_of(rows, after, limit, order)

    async def file(number: str) -> dict[str, Any]:
        return files.find(number).described()

    async def delete_file(number: str) -> dict[str, Any]:
        return files.remove(number)

    async def content(number: str) -> Response:
        return Response(await asyncio.to_thread(files.content, number), media_type="application/octet-stream")

    async def add_batch(body: BatchBody) -> dict[str, Any]:
        return batches.add(body).described()

    async def list_batches(after: str | None = None, limit: Limit = 20) -> dict[str, Any]:
        return page_of(batches.described(), after, limit)

    async def batch(number: str) -> dict[str, Any]:
        return batches.find(number).described()

    async def cancel_batch(number: str) -> dict[str, Any]:
        return batches.cancel(number).described()

    app.post("/v1/files", response_model=None)(add_file)
    app.get("/v1/files", response_model=None)(list_files)
    app.get("/v1/files/{number}", response_model=None)(file)
    app.delete("/v1/files/{number}", response_model=None)(delete_file)
    app.get("/v1/files/{number}/content", response_model=None)(content)
    app.post("/v1/batches", response_model=None)(add_batch)
    app.get("/v1/batches", response_model=None)(list_batches)
    app.get("/v1/batches/{number}", response_model=None)(batch)
    app.post("/v1/batches/{number}/cancel", response_model=None)(cancel_batch)


def _add_megatron(app: FastAPI, service: Service) -> None:
    async def api(body: megatron.MegatronBody, http: Request) -> Response:
        return await megatron.generate(service, body, http)

    app.put(MEGATRON_PATH, response_model=None)(api)


def _add_operations(app: FastAPI, service: Service) -> None:
    html, headers = page()

    async def index() -> Response:
        return Response(html, media_type="text/html", headers=headers)

    async def health() -> Response:
        ready = service.engine.failure is None
        return JSONResponse({"status": "ok" if ready else "failed", "ready": ready}, 200 if ready else 503)

    async def number() -> dict[str, str]:
        return {"version": version("mt-infer")}

    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    app.get("/", include_in_schema=False)(index)
    app.get("/health", response_model=None)(health)
    app.get("/v1/health", include_in_schema=False)(health)
    app.api_route("/ping", methods=["GET", "POST"], response_model=None)(health)
    app.get("/version", response_model=None)(number)
    app.get("/metrics", response_model=None)(metrics)
