"""What the endpoints share: models, limits, generating for one HTTP request, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from torch import Tensor

from mt_core.errors import MtError
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.engine_thread import EngineThread, Event, Request
from mt_infer.server.errors import ApiError, as_api_error
from mt_infer.server.metrics import RequestClock, ServerMetrics
from mt_infer.server.options import ServerOptions
from mt_infer.server.served_model import ServedModel, ServedModels
from mt_infer.text import TextEvent, TextGenerator

TIMEOUT = "timeout"
CLIENT_CLOSED = 499
"""nginx's status for a client that has gone; nobody reads it."""


class Service:
    """One server's state, which the endpoints get."""

    def __init__(self, models: Sequence[ServedModel], options: ServerOptions) -> None:
        self.models, self.options = ServedModels(models), options
        self.metrics = ServerMetrics(self.models)
        self.engine = EngineThread(self.models.generators)
        self.decoding = asyncio.Lock()
        """Held while images are decoded."""
        self._open = 0
        """Sequences of requests that have not ended, those among which the best are chosen included."""

    async def generate(
        self,
        model: ServedModel,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParameters,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> AsyncGenerator[tuple[int, TextEvent], None]:
        """(number of the prompt, event), as they come. inputs: what the model takes beside tokens, with each prompt.
        Closing the iterator cancels what runs.

        Raises ApiError for too many sequences, for what the engine refuses, and when time is up.
        """
        generator = model.require_generator()
        # Everything that takes memory in the engine counts: all n, all best_of, all beams.
        with self._queued(len(prompts) * max(sampling.sequences, sampling.num_beams)):
            if sampling.constraint is not None:
                # Not in the thread of the engines, where all streams would wait for it.
                await asyncio.to_thread(generator.compile_constraint, sampling)
            async with aclosing(self._events(model, generator, prompts, sampling, inputs or {})) as events:
                async for event in events:
                    yield event

    async def _events(
        self,
        model: ServedModel,
        generator: TextGenerator,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParameters,
        inputs: Mapping[str, Tensor],
    ) -> AsyncGenerator[tuple[int, TextEvent], None]:
        """The engine's events, timed for the metrics."""
        count = len(prompts) * sampling.n
        events: asyncio.Queue[Event] = asyncio.Queue()
        # What it is if the generator is closed: a client that went away.
        outcome, loop = "cancelled", asyncio.get_running_loop()
        requests = [
            Request(generator, ids, sampling, inputs, place, model.adapter, events, loop)
            for place, ids in enumerate(prompts)
        ]
        clock = RequestClock(self.metrics, model.name, sum(map(len, prompts)))
        with self._submitted(requests):
            try:
                async for place, event in self._until_finished(events, count):
                    if event.token is not None:
                        # A number for each sequence of the HTTP request.
                        clock.token(place * sampling.n + event.index)
                    yield place, event
                outcome = "finished"
            except (ApiError, MtError) as error:
                outcome = "timeout" if isinstance(error, ApiError) and error.code == TIMEOUT else "failed"
                raise
            finally:
                clock.end(outcome)

    @contextmanager
    def _submitted(self, requests: Sequence[Request]) -> Iterator[None]:
        """While it is open the engine has the requests; then those that still run are cancelled."""
        for request in requests:
            self.engine.submit(request)
        try:
            yield
        finally:
            for request in requests:
                self.engine.cancel(request)

    @contextmanager
    def _queued(self, places: int) -> Iterator[None]:
        """Takes so many places of the queue while it is open. Raises ApiError where they are not free."""
        self._check_room(places)
        # Without a lock: only the event loop's thread comes here, and there is no await between check and count.
        self._open += places
        try:
            yield
        finally:
            self._open -= places

    @asynccontextmanager
    async def limited(self, places: int) -> AsyncGenerator[None, None]:
        """For what is no generation: so many places of the queue while it is open, for as long as a request may take.

        Raises ApiError where they are not free, and when time is up.
        """
        with self._queued(places):
            try:
                async with asyncio.timeout(self.options.request_seconds):
                    yield
            except TimeoutError:
                raise self._late() from None

    async def _until_finished(
        self, events: asyncio.Queue[Event], count: int
    ) -> AsyncGenerator[tuple[int, TextEvent], None]:
        """The events of `count` sequences. Raises what is against one of them, and ApiError when time is up."""
        # For the whole request, waiting in the queue included.
        deadline = asyncio.get_running_loop().time() + self.options.request_seconds
        while count:
            try:
                async with asyncio.timeout_at(deadline):
                    place, event = await events.get()
            except TimeoutError:
                raise self._late() from None
            if isinstance(event, Exception):
                raise event
            count -= event.finish is not None
            yield place, event

    def _check_room(self, count: int) -> None:
        limit = self.options.max_queue
        if count > limit:
            raise ApiError(f"the request has {count} sequences (prompts times n); this server takes {limit}")
        if self._open + count > limit:
            raise ApiError(
                f"the server has {self._open} sequences that run or wait, of at most {limit}; try again later",
                status=503,
                code="overloaded",
                headers={"Retry-After": "1"},
            )

    def _late(self) -> ApiError:
        return ApiError(
            f"the request took longer than the {self.options.request_seconds:g} s that this server allows",
            status=504,
            code=TIMEOUT,
        )


async def until_disconnect(http: HttpRequest, answer: Awaitable[Response]) -> Response:
    """The answer; computing it ends when the client goes away. The request's body has been read."""
    # Cancelled when the client goes away, which closes the generator and frees the engine's memory.
    working = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(disconnected(http.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=CLIENT_CLOSED)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


log = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx sends on what it gets
]


def event_lines(value: Any) -> bytes:
    """With its type as the name of the event, as streams of /v1/responses have it."""
    return f"event: {value.get('type', 'error')}\n".encode() + data_line(value)


def data_line(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends each object of `pieces` as an event, then [DONE]. named: events have names, and the last one is the end.

    An error before the first piece is an answer with its status; later ones are events. A client that goes away ends
    the pieces.
    """

    def __init__(self, pieces: AsyncGenerator[dict[str, Any], None], *, named: bool = False) -> None:
        super().__init__()
        self.pieces = pieces
        self._lines, self._end = (event_lines, b"") if named else (data_line, DONE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A stream has nothing to read, so that a client that goes away is seen only by waiting for its disconnect.
        sending = asyncio.ensure_future(self._send(scope, receive, send))
        watching = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, watching):
                task.cancel()
            # Both have ended before the pieces are closed, which cancels the requests in the engine.
            await asyncio.gather(sending, watching, return_exceptions=True)
            await self.pieces.aclose()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async for piece in self.pieces:
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                    started = True
                await _send_part(send, self._lines(piece))
        except Exception as error:
            answer = as_api_error(error)
            # Unexpected exceptions only: an ApiError is an answer that was meant, for instance that the queue is full.
            if answer.status >= 500 and answer is not error:
                log.exception("a stream failed")
            # No header has been sent yet: a proper status can be.
            if not started:
                await answer.response()(scope, receive, send)
                return
            await _send_part(send, self._lines(answer.body()))
        await send({"type": "http.response.body", "body": self._end, "more_body": False})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
