"""The answer of requests that the end of the server cancels."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mt_infer.server.errors import ApiError

STOPPED = "the server has stopped"


class AnsweredWhenCancelled:
    """ASGI middleware around all others: uvicorn, which cancels what does not end, would log a traceback for each."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def sending(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except asyncio.CancelledError:
            # An answer that has begun cannot become an error any more: its connection ends.
            if scope["type"] == "http" and not has_started:
                await ApiError(STOPPED, status=503).response()(scope, receive, send)
