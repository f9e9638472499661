"""The thread that steps the engines, and hands events to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from torch import Tensor

from mt_core.errors import MtError
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.errors import STOPPED, ApiError, end_of_text
from mt_infer.text import Prompt, TextEvent, TextGenerator

log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 30.0
"""How often idle ranks step at least: they wait in a collective operation, which has a time-out."""


Event = tuple[int, TextEvent | Exception]
"""Number of the prompt among those of an HTTP request, and what is new in one of its sequences."""


@dataclass(eq=False)
class Request:
    """One prompt with what the model takes beside it, and the queue that its events go to."""

    generator: TextGenerator
    prompt: Prompt
    sampling: SamplingParameters
    inputs: Mapping[str, Tensor]
    place: int
    adapter: str | None
    events: asyncio.Queue[Event]
    loop: asyncio.AbstractEventLoop
    number: int | None = None
    """The engine's."""
    unfinished: int = 0


# Threads: the event loop creates requests and reads their queues; this thread alone calls the engines, which are not
# thread-safe. Commands go in through a SimpleQueue, events go out by call_soon_threadsafe. While it runs, `_open` and
# `failure` are written in it alone.
class EngineThread:
    """Steps all generators in turn while they have requests, and sleeps while they have none.

    When a step fails the engines are of no use any more: every open request gets an error, and `on_failure` is called
    once, in this thread.
    """

    def __init__(self, generators: Sequence[TextGenerator]) -> None:
        self.generators = tuple(generators)
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open: dict[tuple[int, int], Request] = {}
        """(which generator, number) -> request"""
        self._stopping = self._has_ended = False
        self._has_ranks = any(generator.engine.ctx.world.size > 1 for generator in self.generators)
        self._thread = threading.Thread(target=self._run, name="mt-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended. What is still open is cancelled."""
        # Behind all commands that were given before.
        self._commands.put(self._stop)
        self._thread.join()

    def submit(self, request: Request) -> None:
        """An error of the request comes as its first event."""
        self._command(partial(self._submit, request))

    def cancel(self, request: Request) -> None:
        """Ends a request and frees its memory; one that has ended stays as it is."""
        self._command(partial(self._cancel, request))

    async def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function in the thread of the engines, between two steps. Raises ApiError when they have stopped."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                self._require_running()
                outcome, error = function(), None
            except Exception as raised:
                outcome, error = None, raised
            # A future belongs to the loop, and is settled there.
            loop.call_soon_threadsafe(_settle, done, outcome, error)

        self._command(run)
        return await done

    def _command(self, command: Callable[[], None]) -> None:
        """For the thread; refused here where that has ended, and nobody else takes commands."""
        # Put first, then the flag: either the thread still takes the command in its last _take_rest, or the flag is
        # seen here. A command runs once, since get_nowait removes it.
        self._commands.put(command)
        if self._has_ended:
            self._take_rest()

    def _take_rest(self) -> None:
        with suppress(Empty):
            while True:
                self._commands.get_nowait()()

    @property
    def is_idle(self) -> bool:
        return all(generator.is_idle for generator in self.generators)

    # -- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        # A failed engine is not stepped again, but commands are taken, which answer with the error.
        while not self._stopping:
            try:
                self._take_commands()
                if self.failure is None:
                    self._step()
            except Exception as error:
                log.exception("the engine failed")
                self._fail(error)
        for request in self._open.values():
            self._deliver(request, ApiError(STOPPED, status=503))
        self._open.clear()
        self._has_ended = True
        self._take_rest()

    def _take_commands(self) -> None:
        """Waits for one if there is nothing to compute."""
        # Blocks without work: an idle server takes no processor time.
        has_work = self.failure is None and not self.is_idle
        wait = HEARTBEAT_SECONDS if self._has_ranks else None
        try:
            # With ranks, a wait is cut off by a step without work: the other ranks wait in a broadcast, whose time-out
            # would end them.
            self._commands.get(block=not has_work, timeout=wait)()
        except Empty:
            return
        self._take_rest()

    def _step(self) -> None:
        for place, generator in enumerate(self.generators):
            # Other ranks step all engines in turn: none may be left out.
            if self._has_ranks or not generator.is_idle:
                answers = [self._answer(place, event) for event in generator.step()]
                # One call for all events of a step: each wakes the event loop.
                self._deliver_all([answer for answer in answers if answer is not None])

    def _answer(self, place: int, event: TextEvent) -> tuple[Request, TextEvent | Exception] | None:
        """The event with its request; an error ends all sequences of the request. None: it has ended so."""
        request = self._open.get((place, event.request))
        if request is None:
            return None
        if event.error is not None:
            self._cancel(request)
            return request, end_of_text(event.error)
        request.unfinished -= event.finish is not None
        if not request.unfinished:
            del self._open[place, event.request]
        return request, event

    def _deliver(self, request: Request, event: TextEvent | Exception) -> None:
        self._deliver_all([(request, event)])

    def _deliver_all(self, events: Sequence[tuple[Request, TextEvent | Exception]]) -> None:
        if events:
            # All requests of a server have the same loop.
            events[0][0].loop.call_soon_threadsafe(_put_all, events)

    def _submit(self, request: Request) -> None:
        try:
            self._require_running()
            request.number = request.generator.submit(request.prompt, request.sampling, request.inputs, request.adapter)
        # The request's own fault: it alone has the error, and the engine goes on.
        except (MtError, ApiError) as error:
            return self._deliver(request, error)
        except Exception:
            log.exception("a request failed before its first step")
            return self._deliver(request, ApiError("the request failed; the server's log says why", status=500))
        # The events of best_of sequences come for the n best.
        request.unfinished = request.sampling.n
        self._open[self.generators.index(request.generator), request.number] = request
        return None

    def _cancel(self, request: Request) -> None:
        # It was refused, or has ended: nothing is in the engine.
        if request.number is None or not request.unfinished:
            return
        if self._open.pop((self.generators.index(request.generator), request.number), None) is not None:
            request.generator.cancel(request.number)

    def _require_running(self) -> None:
        if self.failure is not None:
            raise ApiError("the engine has failed; the server is ending", status=503)
        if self._stopping:
            raise ApiError(STOPPED, status=503)

    def _stop(self) -> None:
        self._stopping = True

    def _fail(self, error: Exception) -> None:
        # Stepping again could hang: other ranks may be in the middle of a collective, and caches half written.
        is_first, self.failure = self.failure is None, error
        failed = ApiError("the engine has failed; the server's log says why", status=500)
        for request in self._open.values():
            self._deliver(request, failed)
        self._open.clear()
        if is_first and self.on_failure is not None:
            self.on_failure()


def _put_all(events: Sequence[tuple[Request, TextEvent | Exception]]) -> None:
    for request, event in events:
        request.events.put_nowait((request.place, event))


def _settle(done: asyncio.Future[Any], outcome: Any, error: Exception | None) -> None:
    # The client has gone while the call ran.
    if done.cancelled():
        return
    if error is None:
        done.set_result(outcome)
    else:
        done.set_exception(error)
