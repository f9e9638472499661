"""Running the application on a socket until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from mt_core.errors import ConfigError, TrainingError
from mt_infer.server.app import create_app
from mt_infer.server.errors import AnsweredWhenCancelled
from mt_infer.server.service import Service

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 5
"""For the errors of requests that are ended to reach their clients; what is left then is cancelled."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0: the system chooses one. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        # A server that is started again need not wait for connections in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from error
    return listener


def address_of(listening: socket.socket) -> str:
    """http://HOST:PORT"""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Calls `on_ready` when requests are answered. Of the end, `end_requests` is called in a thread when requests have
    had `drain_seconds` to end by themselves."""

    def __init__(
        self,
        app: FastAPI,
        on_ready: Callable[[], None],
        drain_seconds: float,
        end_requests: Callable[[], None] = lambda: None,
    ) -> None:
        settings = uvicorn.Config(
            AnsweredWhenCancelled(app),
            # uvicorn would install handlers and formats of its own.
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=math.ceil(drain_seconds) + GRACE_SECONDS,
            lifespan="on",
            ws="none",
        )
        super().__init__(settings)
        self._on_ready, self._drain_seconds, self._end_requests = on_ready, drain_seconds, end_requests

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn's shutdown waits for open requests, up to timeout_graceful_shutdown. Stopping the engine before that
        # gives each of them an error of its own, in place of a broken connection.
        ending = asyncio.ensure_future(self._end_after_drain())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_after_drain(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        await asyncio.to_thread(self._end_requests)


def run_app(app: FastAPI, listening: socket.socket, *, on_ready: Callable[[], None], drain_seconds: float) -> None:
    """An application without engines, until SIGTERM or SIGINT; see `serve`."""
    with _handled_signals():
        Server(app, on_ready, drain_seconds).run(sockets=[listening])


def serve(service: Service, listening: socket.socket, *, on_ready: Callable[[], None], drain_seconds: float) -> None:
    """Until SIGTERM or SIGINT: no more connections are taken then, and requests have `drain_seconds` to end; those
    that are open then get an error. A second signal ends them at once. Raises TrainingError when the engine fails."""
    server = Server(create_app(service), on_ready, drain_seconds, service.engine.stop)

    def end() -> None:
        server.should_exit = True

    # Called in the engine's thread: setting a flag that uvicorn polls is all that may be done there.
    service.engine.on_failure = end
    with _handled_signals():
        server.run(sockets=[listening])
    # After the server has ended, so that clients have their errors first.
    if service.engine.failure is not None:
        raise TrainingError(f"the engine failed: {service.engine.failure}") from service.engine.failure


@contextlib.contextmanager
def _handled_signals() -> Iterator[None]:
    """uvicorn raises the signals that it got again when it has ended; what is to be closed after it still is then."""
    # Python sets signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
