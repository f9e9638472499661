"""Episodes that verifiers plays on an event loop in a thread, whose model is an endpoint of this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mt_tune.environments.base import Message

T = TypeVar("T")
MODEL, SESSION = "policy", "X-Session-ID"
"""The model's name, and the header in which verifiers sends the id of a trace."""
KEY_VARIABLE = "MT_VERIFIERS_KEY"
"""Not set: the endpoint takes any key, and listens on the loopback address alone."""


@dataclass(frozen=True)
class ModelRequest:
    """The model's turn. messages: all so far. tools: JSON schemas."""

    messages: list[Message]
    tools: list[Any] | None


@dataclass(frozen=True)
class EpisodeEnd:
    """metrics: what verifiers has measured, with the parts of the reward. error: of an episode that failed."""

    reward: float
    metrics: Mapping[str, float]
    error: str | None


@dataclass
class OpenEpisode:
    """events: what the dialogue waits for. pending: the request that waits for a turn."""

    events: asyncio.Queue[ModelRequest | EpisodeEnd] = field(default_factory=asyncio.Queue)
    pending: asyncio.Future[tuple[Message, bool]] | None = None
    traces: list[Any] = field(default_factory=list)
    playing: asyncio.Task[None] | None = None


class PlayedEpisodes:
    """Plays episodes of an environment of verifiers. Methods are those of another thread, and wait."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._of_trace: dict[str, OpenEpisode] = {}
        self._resources = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True)
        self._thread.start()
        self._address = self._wait(self._open())

    def begin(self, task: Any) -> OpenEpisode:
        return self._wait(self._begun(task))

    def next_event(self, episode: OpenEpisode) -> ModelRequest | EpisodeEnd:
        """The model's next turn, or the end."""
        return self._wait(episode.events.get())

    def answer(self, episode: OpenEpisode, message: Message, *, cut: bool) -> None:
        """A turn. cut: it is the last one, whatever the environment would go on with."""
        self._wait(self._answered(episode, message, cut))

    def abandon(self, episode: OpenEpisode) -> None:
        self._wait(self._abandoned(episode))

    def close(self) -> None:
        self._wait(self._resources.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _wait(self, act: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(act, self._loop).result()

    # -- on the event loop ----------------------------------------------------------------------------

    async def _open(self) -> str:
        """The address of the endpoint."""
        from aiohttp import web

        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/v1/chat/completions", self._completion)
        runner = web.AppRunner(application)
        await runner.setup()
        self._resources.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        await self._resources.enter_async_context(self._env.serving())
        port = runner.addresses[0][1]
        return f"http://127.0.0.1:{port}/v1"

    async def _begun(self, task: Any) -> OpenEpisode:
        episode = OpenEpisode()
        episode.playing = asyncio.create_task(self._play(task, episode))
        return episode

    async def _play(self, task: Any, episode: OpenEpisode) -> None:
        from verifiers.v1 import EvalClientConfig, ModelContext

        def begun(trace: Any) -> None:
            episode.traces.append(trace)
            self._of_trace[trace.id] = episode

        context = ModelContext(MODEL, EvalClientConfig(base_url=self._address, api_key_var=KEY_VARIABLE))
        try:
            played = await self._env.run_episode(task, context, on_trace=begun)
            end = end_of(played)
        except Exception as error:
            end = EpisodeEnd(0.0, {}, f"{type(error).__name__}: {error}")
        for trace in episode.traces:
            del self._of_trace[trace.id]
        await episode.events.put(end)

    async def _completion(self, request: Any) -> Any:
        """What verifiers sends to the model."""
        from aiohttp import web

        body, episode = await request.json(), self._of_trace.get(request.headers.get(SESSION, ""))
        if episode is None or episode.pending is not None:
            return web.json_response({"error": {"message": "no episode waits for a turn of the model"}}, status=400)
        episode.pending = asyncio.get_running_loop().create_future()
        await episode.events.put(ModelRequest(texts_of(body["messages"]), body.get("tools")))
        message, cut = await episode.pending
        episode.pending = None
        finish = "length" if cut else "tool_calls" if message.get("tool_calls") else "stop"
        if not body.get("stream"):
            return web.json_response(completion(message, finish))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks(message, finish):
            await response.write(f"data: {chunk}\n\n".encode())
        await response.write_eof()
        return response

    async def _answered(self, episode: OpenEpisode, message: Message, cut: bool) -> None:
        assert episode.pending is not None
        if cut:
            # verifiers then refuses further turns of the model, and scores what there is.
            for trace in episode.traces:
                trace.stop("cut")
        episode.pending.set_result((message, cut))

    async def _abandoned(self, episode: OpenEpisode) -> None:
        if episode.pending is not None:
            episode.pending.cancel()
        if episode.playing is not None and not episode.playing.done():
            episode.playing.cancel()
            await asyncio.gather(episode.playing, return_exceptions=True)


def end_of(played: Any) -> EpisodeEnd:
    errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
    if errors or not played.ok:
        return EpisodeEnd(
            0.0, {}, "; ".join(f"{error.type}: {error.message}" for error in errors) or "it is not complete"
        )
    (trace,) = played.traces
    measured = {name: value for name, value in trace.metrics.items() if value is not None}
    parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    return EpisodeEnd(float(trace.reward), {name: float(value) for name, value in (measured | parts).items()}, None)


def texts_of(messages: Sequence[Message]) -> list[Message]:
    """Messages as chat templates take them: contents are texts, arguments of tools are objects."""
    return [{**message, **_text(message), **_calls(message)} for message in messages]


def _text(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return {"content": content or ""}


def _calls(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return {}
    read = [{**call["function"], "arguments": json.loads(call["function"]["arguments"])} for call in calls]
    return {"tool_calls": [{"type": "function", "function": function} for function in read]}


USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
FIELDS = {"id": "turn", "created": 0, "model": MODEL}


def completion(message: Message, finish: str) -> Mapping[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {**FIELDS, "object": "chat.completion", "choices": [choice], "usage": USAGE}


def chunks(message: Message, finish: str) -> list[str]:
    """The same as events of a stream."""
    delta = dict(message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
    parts: list[Mapping[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
        {"choices": [], "usage": USAGE},
    ]
    return [*(json.dumps({**FIELDS, "object": "chat.completion.chunk", **part}) for part in parts), "[DONE]"]
