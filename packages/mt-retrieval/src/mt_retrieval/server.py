"""POST /search: questions in, passages out."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.middleware import Middleware

from mt_infer.server.errors import add_error_handlers
from mt_infer.server.options import ServerOptions
from mt_infer.server.security import RequestChecks
from mt_retrieval.retriever import Retriever

MOST_QUESTIONS, MOST_PASSAGES = 256, 1000
"""Limits of a request."""


class SearchBody(BaseModel):
    """{"questions": ["..."], "top_k": 5}"""

    model_config = ConfigDict(extra="forbid")

    questions: Annotated[list[str], Field(min_length=1, max_length=MOST_QUESTIONS)]
    top_k: Annotated[int, Field(ge=1, le=MOST_PASSAGES)] = 5


def create_app(retriever: Retriever, options: ServerOptions) -> FastAPI:
    """The ASGI application. Searches run one after the other, beside the loop that takes requests."""
    app = FastAPI(
        title="mt retrieve serve",
        docs_url=None,
        redoc_url=None,
        middleware=[Middleware(RequestChecks, options=options)],
    )
    add_error_handlers(app)
    one_at_a_time = asyncio.Lock()

    async def search(body: SearchBody) -> dict[str, Any]:
        # The encoder and the index are not made for several threads; the lock also bounds the memory of a search.
        async with one_at_a_time:
            results = await asyncio.to_thread(retriever.search, body.questions, body.top_k)
        return {"results": [[passage.as_record() for passage in passages] for passages in results]}

    async def health() -> dict[str, Any]:
        return {"status": "ok", "passages": len(retriever.index), "index": retriever.index.kind}

    app.post("/search", response_model=None)(search)
    app.get("/health", response_model=None)(health)
    return app
