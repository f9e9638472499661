"""Bodies of requests that are JSON."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mt_core.json_objects import DuplicateKeyError, parse_json


class JSONRequest(Request):
    """A request whose JSON may name a key once in an object."""

    async def json(self) -> Any:
        """The value of the body, read once. Raises HTTPException, status 400, for a key that stands twice."""
        if not hasattr(self, "_json"):
            try:
                self._json = parse_json(await self.body())
            except DuplicateKeyError as error:
                # Of other exceptions FastAPI makes an answer without a reason.
                raise HTTPException(400, str(error)) from error
        return self._json


class JSONRoute(APIRoute):
    """A route whose endpoint gets a JSONRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JSONRequest(request.scope, request.receive))

        return handle
