"""What is checked of every request before an endpoint sees it."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from ipaddress import ip_address

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mt_infer.server.errors import ApiError
from mt_infer.server.options import ServerOptions

OPEN_PATHS = ("/", "/health", "/ping")
"""Without an API key: the page, which has a field for it, and what a load balancer reads."""
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""The usual names of this machine."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address or name."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def bearer_token(header: str) -> str:
    """The token of an Authorization header; empty for a header of another scheme, and for a key without one."""
    scheme, _, token = header.strip().partition(" ")
    # RFC 9110, 11.1: the name of a scheme has no case.
    return token.strip() if scheme.lower() == "bearer" else ""


class RequestChecks:
    """ASGI middleware: the Host, the API key, and the size of the body."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self.app, self.options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            # HTTP headers are bytes; latin-1 decodes any.
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            # A client that sends its body byte by byte cannot hold a connection forever.
            async with asyncio.timeout(self.options.request_seconds):
                body = await self._body(headers, receive)
        except TimeoutError:
            late = ApiError(f"the body did not arrive within {self.options.request_seconds:g} s", status=408)
            return await late.response()(scope, receive, send)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        return await self.app(scope, replay(body, receive), send)

    def _check_host(self, headers: Mapping[str, str]) -> None:
        """A web page can give a name of its own this machine's address, and would reach a server on loopback."""
        host = headers.get("host", "")
        # Without the port; an IPv6 address is in brackets, [::1]:8000.
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if not self.options.any_host and not is_loopback(name):
            raise ApiError(
                f"the request is for the host {host[:100]!r}; this server answers to {', '.join(LOOPBACK)} only, "
                "unless it is started with the --host of a network",
                status=403,
                code="wrong_host",
            )

    def _check_key(self, path: str, headers: Mapping[str, str]) -> None:
        key = self.options.api_key
        if key is None or path in OPEN_PATHS:
            return
        sent_key = bearer_token(headers.get("authorization", ""))
        # In constant time: the time of a plain comparison depends on how many leading characters match.
        if not hmac.compare_digest(sent_key.encode("latin-1", "replace"), key.encode()):
            raise ApiError(
                "the API key is missing or wrong; send it as the header Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        limit = self.options.max_body_bytes
        too_long = ApiError(f"the body has more than the {limit} bytes that this server takes", status=413)
        # Refused before it is read. A body without this header (chunked) is counted below.
        declared = headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > limit:
            raise too_long
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b""
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise too_long
            if not message.get("more_body"):
                return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body, which has been read, and then what comes."""
    # An ASGI body can be received once, and was consumed by the check.
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again
