"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mt_infer.embedding import InputType
from mt_infer.server.openai.fields import Ids, Name, RequestBody
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
        lambda: [(side, embedder.tokens(text)) for side, own in sides.items() for text in own]
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
