"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mt_core.errors import MtError
from mt_infer.requests import DIVERGED, FAILED

MEGATRON_PATH = "/api"
"""Its clients print the `message` of an error's body."""
INVALID, SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """An answer that is an error. param: the field of the request that it is about."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        kind = INVALID if self.status < 500 else SERVER
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def end_of_text(error: str) -> ApiError:
    """The error of a text that cannot be continued, from the error of its last event."""
    if error == DIVERGED:
        return ApiError(error, status=500, code="not_finite")
    return ApiError(error, status=500 if error in FAILED else 400)


def as_api_error(error: Exception) -> ApiError:
    """The error object of an exception: a mistake of its own by name, a defect of ours without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MtError):
        return ApiError(str(error))
    if isinstance(error, RequestValidationError):
        return from_validation(error.errors())
    if isinstance(error, HTTPException):
        return ApiError(str(error.detail), status=error.status_code, headers=dict(error.headers or {}))
    return ApiError("the server failed on this request; its log says why", status=500)


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The error of the first field in pydantic's list, with all that the field may be."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(f"the body is no JSON: {first['ctx']['error']}", code="invalid_json")
    places = [str(part) for part in first["loc"] if part != "body"]
    if not places and first["type"] == "value_error":
        return ApiError(_reason(first))
    if not places:
        return ApiError('the body must be a JSON object, sent with "Content-Type: application/json"')
    # A union of types has an error for each member, all at the same field.
    alike = [error for error in errors if error["loc"][1:2] == first["loc"][1:2]]
    reasons = list(dict.fromkeys(_reason(error) for error in alike))
    return ApiError(f"{places[0]}: {'; or '.join(reasons[:4])}", param=places[0])


def _reason(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "this server has no such field, and ignores none"
    return str(error["msg"]).removeprefix("Value error, ")


def add_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> JSONResponse:
        api_error = as_api_error(error)
        if request.url.path == MEGATRON_PATH:
            return JSONResponse({"message": str(api_error), **api_error.body()}, api_error.status, api_error.headers)
        return api_error.response()

    for kind in (ApiError, MtError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


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
