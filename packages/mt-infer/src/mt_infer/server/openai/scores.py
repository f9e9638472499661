"""POST /score and /rerank: how similar texts are, as vLLM, Jina and Cohere name it.

The score is the cosine of the embeddings of two texts, as vLLM has it for models that embed; of a model with an encoder
for each, a query's and a document's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mt_infer.server.openai.answers import envelope
from mt_infer.server.openai.embeddings import MOST_INPUTS, Embedded, embedded
from mt_infer.server.openai.fields import Body, IgnoredFields, Name
from mt_infer.server.served_model import ServedModel
from mt_infer.server.service import Service, until_disconnect

Text = Annotated[str, Field(min_length=1)]
Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_INPUTS)]


class ScoreBody(IgnoredFields):
    """The body of /score: each of text_1 with the text_2 of the same place; one text_1 goes with all of them."""

    model: Name | None = None
    text_1: Texts
    text_2: Texts

    @model_validator(mode="after")
    def _check_counts(self) -> ScoreBody:
        queries, documents = self.texts()
        if len(queries) not in (1, len(documents)):
            raise ValueError(
                f"text_1 has {len(queries)} texts and text_2 has {len(documents)}; they are as many, or text_1 is one"
            )
        return self

    def texts(self) -> tuple[list[str], list[str]]:
        return _listed(self.text_1), _listed(self.text_2)


class Document(Body):
    text: Text


class RerankBody(IgnoredFields):
    """The body of /rerank. top_n: of the results; default: all."""

    model: Name | None = None
    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MOST_INPUTS)]
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """0: all, as vLLM has it."""
    return_documents: bool | None = None
    """Default: true."""

    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


async def create_scores(service: Service, body: ScoreBody, http: HttpRequest) -> Response:
    return await until_disconnect(http, _scores(service, body))


async def create_ranking(service: Service, body: RerankBody, http: HttpRequest) -> Response:
    return await until_disconnect(http, _ranking(service, body))


async def _scores(service: Service, body: ScoreBody) -> Response:
    model = service.models.find(body.model)
    scores, tokens = await _cosines(service, model, *body.texts())
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return JSONResponse({**envelope("list", "score", model.name), "data": data, "usage": _usage(tokens)})


async def _ranking(service: Service, body: RerankBody) -> Response:
    model = service.models.find(body.model)
    texts = body.texts()
    scores, tokens = await _cosines(service, model, [body.query], texts)
    # Of equal scores the first document comes first: sorted() is stable.
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or len(texts)]
    shown = body.return_documents is not False
    results = [
        {"index": index, **({"document": {"text": texts[index]}} if shown else {}), "relevance_score": scores[index]}
        for index in order
    ]
    head = envelope("list", "rerank", model.name)
    return JSONResponse({"id": head["id"], "model": model.name, "results": results, "usage": _usage(tokens)})


async def _cosines(
    service: Service, model: ServedModel, queries: Sequence[str], documents: Sequence[str]
) -> tuple[list[float], int]:
    """Score of each document with the query of its place, or with the only one; and the tokens of all texts."""
    found: Embedded = await embedded(service, model, {"query": queries, "document": documents})
    of_queries, of_documents = found.vectors[: len(queries)], found.vectors[len(queries) :]
    if len(of_queries) == 1:
        of_queries = of_queries * len(of_documents)
    return [cosine(one, other) for one, other in zip(of_queries, of_documents, strict=True)], found.tokens


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """0 for a vector of zeros."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(map(mul, one, other)) / lengths if lengths else 0.0


def _usage(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
