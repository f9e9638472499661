"""Server-sent events: an answer in pieces."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mt_infer.server.errors import as_api_error
from mt_infer.server.service import disconnected

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
