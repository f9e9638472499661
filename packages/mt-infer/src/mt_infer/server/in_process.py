"""A request to the application from within its process, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message

from mt_infer.server.openai.batches import Answer


async def post(app: ASGIApp, path: str, body: Mapping[str, Any], api_key: str | None) -> Answer:
    """Checked and answered as a client's. Cancelling it ends the request."""
    content = json.dumps(body).encode()
    authorization = [] if api_key is None else [(b"authorization", b"Bearer " + api_key.encode())]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "client": None,
        "server": ("127.0.0.1", 0),
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), *authorization],
    }  # fmt: skip
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    status, parts = 500, list[bytes]()

    async def receive() -> Message:
        if messages:
            return messages.pop()
        # A client that stays: the task that asks is cancelled in place of a disconnect.
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return Answer(status, json.loads(b"".join(parts)))
