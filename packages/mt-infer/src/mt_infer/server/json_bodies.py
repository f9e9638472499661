"""Bodies of requests that are JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mt_core.json_objects import DuplicateKeyError, parse_json


class JSONRequest(Request):
    """A request whose JSON may name a key once in an object, and whose errors are named."""

    async def json(self) -> Any:
        """The value of the body, read once. Raises HTTPException, status 400, for what cannot be read, and
        json.JSONDecodeError, of which FastAPI says the place."""
        if not hasattr(self, "_json"):
            try:
                self._json = parse_json(await self.body())
            except json.JSONDecodeError:
                raise
            except (ValueError, RecursionError) as error:
                # FastAPI would answer without a reason.
                raise HTTPException(400, _reason(error)) from error
        return self._json


def _reason(error: ValueError | RecursionError) -> str:
    """error: of `parse_json`."""
    if isinstance(error, DuplicateKeyError):
        return str(error)
    if isinstance(error, RecursionError):
        return "the body is nested too deeply"
    # Bytes that are no UTF-8, or a whole number of thousands of digits.
    return f"the body is no JSON: {error}"


class JSONRoute(APIRoute):
    """A route whose endpoint gets a JSONRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JSONRequest(request.scope, request.receive))

        return handle
