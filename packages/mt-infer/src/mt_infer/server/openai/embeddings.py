"""POST /v1/embeddings, /score and /rerank.

The score of two texts, as vLLM, Jina and Cohere name it, is the cosine of their embeddings, as vLLM has it for models
that embed; of a model with an encoder for each, a query's and a document's. A reward model scores the second text as
the answer to the first.
"""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from operator import itemgetter, mul
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mt_infer.embedding import InputType
from mt_infer.pair_scorers import PairScorer
from mt_infer.server.openai.answers import envelope
from mt_infer.server.openai.fields import Body, Ids, IgnoredFields, Name, RequestBody
from mt_infer.server.served_model import ServedModel
from mt_infer.server.service import Service, until_disconnect
from mt_infer.text import Prompt

ValueT = TypeVar("ValueT")
MOST_INPUTS = 2048
BATCH = 32
"""Inputs that are computed at a time, and take one place of the queue."""
Inputs = (
    Annotated[list[str], Field(min_length=1, max_length=MOST_INPUTS)]
    | Annotated[list[Ids], Field(min_length=1, max_length=MOST_INPUTS)]
)


class EmbeddingBody(RequestBody):
    """The body of /v1/embeddings. input_type: which encoder, for models that have one for each (biencoder)."""

    input: str | Ids | Inputs
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    input_type: InputType | None = None
    """Default: document."""
    user: str | None = None

    @model_validator(mode="after")
    def _refuse_dimensions(self) -> EmbeddingBody:
        if self.dimensions is not None:
            raise ValueError("dimensions is for models whose embeddings may be cut, which this server has none of")
        return self

    def inputs(self) -> list[Prompt]:
        if isinstance(self.input, str):
            return [self.input]
        return [self.input] if isinstance(self.input[0], int) else list(self.input)


async def create_embeddings(service: Service, body: EmbeddingBody, http: HttpRequest) -> Response:
    return await until_disconnect(http, _embeddings(service, body))


class Embedded(NamedTuple):
    """vectors: of each text. tokens: of all texts."""

    vectors: list[list[float]]
    tokens: int


async def embedded(service: Service, model: ServedModel, sides: Mapping[InputType, Sequence[Prompt]]) -> Embedded:
    """The vectors of texts as queries and as documents, in the order of `sides`. Raises ApiError and ConfigError."""
    embedder = model.require_embedder()
    texts = await asyncio.to_thread(
        lambda: [(side, embedder.tokens(text)) for side, prompts in sides.items() for text in prompts]
    )
    # A batch is of one side.
    parts = [
        (side, [ids for _, ids in some])
        for side, of_side in groupby(texts, key=itemgetter(0))
        for some in batched(of_side, BATCH)
    ]
    vectors: list[list[float]] = []
    async with service.limited(len(parts)):
        for side, part in parts:
            # In the thread of the engines, a batch at a time: generation of other models goes on between two.
            vectors += await service.engine.call(partial(embedder.embed, part, side))
    count = sum(len(ids) for _, ids in texts)
    service.metrics.prompt_tokens.labels(model.name).inc(count)
    service.metrics.requests.labels(model.name, "finished").inc()
    return Embedded(vectors, count)


def batched(values: Iterable[ValueT], size: int) -> Iterator[list[ValueT]]:
    """Lists of so many, and the rest. itertools.batched, which Python 3.11 lacks."""
    rest = iter(values)
    while batch := list(islice(rest, size)):
        yield batch


async def _embeddings(service: Service, body: EmbeddingBody) -> Response:
    model = service.models.find(body.model)
    vectors, count = await embedded(service, model, {body.input_type or "document": body.inputs()})
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    used = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": used})


def _encoded(vector: Sequence[float], form: str | None) -> Any:
    """base64: little-endian fp32."""
    if form != "base64":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


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
    scores, tokens = await _pair_scores(service, model, *body.texts())
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return JSONResponse({**envelope("list", "score", model.name), "data": data, "usage": _usage(tokens)})


async def _ranking(service: Service, body: RerankBody) -> Response:
    model = service.models.find(body.model)
    texts = body.texts()
    scores, tokens = await _pair_scores(service, model, [body.query], texts)
    # Of equal scores the first document comes first: sorted() is stable.
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or len(texts)]
    shown = body.return_documents is not False
    results = [
        {"index": index, **({"document": {"text": texts[index]}} if shown else {}), "relevance_score": scores[index]}
        for index in order
    ]
    head = envelope("list", "rerank", model.name)
    return JSONResponse({"id": head["id"], "model": model.name, "results": results, "usage": _usage(tokens)})


async def _pair_scores(
    service: Service, model: ServedModel, queries: Sequence[str], documents: Sequence[str]
) -> tuple[list[float], int]:
    """Score of each document with the query of its place, or with the only one; and the tokens of all texts."""
    if model.scorer is not None:
        return await _model_scores(service, model, model.scorer, queries, documents)
    embeddings: Embedded = await embedded(service, model, {"query": queries, "document": documents})
    of_queries, of_documents = embeddings.vectors[: len(queries)], embeddings.vectors[len(queries) :]
    if len(of_queries) == 1:
        of_queries = of_queries * len(of_documents)
    return [cosine(query, other) for query, other in zip(of_queries, of_documents, strict=True)], embeddings.tokens


async def _model_scores(
    service: Service, model: ServedModel, scorer: PairScorer, queries: Sequence[str], documents: Sequence[str]
) -> tuple[list[float], int]:
    pairs = zip(queries if len(queries) > 1 else [*queries] * len(documents), documents, strict=True)
    texts = await asyncio.to_thread(lambda: [scorer.pair_tokens(*pair) for pair in pairs])
    parts = list(batched(texts, BATCH))
    scores: list[float] = []
    async with service.limited(len(parts)):
        for part in parts:
            # In the thread of the engines, as embeddings are.
            scores += await service.engine.call(partial(scorer.pair_scores, part))
    count = sum(map(len, texts))
    service.metrics.prompt_tokens.labels(model.name).inc(count)
    service.metrics.requests.labels(model.name, "finished").inc()
    return scores, count


def cosine(first: Sequence[float], other: Sequence[float]) -> float:
    """0 for a vector of zeros."""
    lengths = math.hypot(*first) * math.hypot(*other)
    return sum(map(mul, first, other)) / lengths if lengths else 0.0


def _usage(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
