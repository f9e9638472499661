"""/v1/batches: the requests of a file, one after another behind those of clients that wait."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError
from starlette.types import ASGIApp, Message

from mt_core.json_objects import DuplicateKeyError, parse_json
from mt_infer.server.errors import ApiError, as_api_error
from mt_infer.server.openai.answers import Piece
from mt_infer.server.openai.fields import Body, RequestBody
from mt_infer.server.openai.files import StoredFiles

log = logging.getLogger(__name__)
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
PRIORITY = 1 << 20
"""Priority of a batch's requests that say none: behind those of clients that wait."""
AT_A_TIME = 32
"""Requests of a batch that are open."""
DAY = 24 * 60 * 60
OVERLOADED = 503


class ExpiresAfter(Body):
    anchor: str
    seconds: int


class BatchBody(RequestBody):
    """The body of POST /v1/batches. output_expires_after: has no effect, since files end with the server."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchLine(RequestBody):
    """A line of a batch's file."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class Answer(NamedTuple):
    """Answer to one request, as JSON."""

    status: int
    body: Any


Ask = Callable[[str, Mapping[str, Any]], Awaitable[Answer]]
"""Path and body of a request -> its answer."""


@dataclass
class Batch:
    """Its state, as clients read it."""

    body: BatchBody
    id: str = field(default_factory=lambda: f"batch_{secrets.token_hex(12)}")
    status: str = "validating"
    times: dict[str, int] = field(default_factory=lambda: {"created_at": int(time.time())})
    counts: dict[str, int] = field(default_factory=lambda: {"total": 0, "completed": 0, "failed": 0})
    errors: list[Piece] = field(default_factory=list)
    output: str | None = None
    failures: str | None = None
    task: asyncio.Task[None] | None = None

    def enter(self, status: str) -> None:
        self.status = status
        self.times[f"{status}_at"] = int(time.time())

    @property
    def has_ended(self) -> bool:
        return self.status in ("failed", "completed", "cancelled")

    def described(self) -> Piece:
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.body.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.body.input_file_id,
            "completion_window": self.body.completion_window,
            "status": self.status,
            "output_file_id": self.output,
            "error_file_id": self.failures,
            "expires_at": self.times["created_at"] + DAY,
            "request_counts": dict(self.counts),
            "metadata": self.body.metadata,
            **self.times,
        }


class Batches:
    """All batches of a server. ask: computes one of their requests."""

    def __init__(self, files: StoredFiles, ask: Ask) -> None:
        self._files, self._ask = files, ask
        self._by_id: dict[str, Batch] = {}

    def add(self, body: BatchBody) -> Batch:
        """Starts it. Raises ApiError for a file that is not there."""
        self._files.find(body.input_file_id, "input_file_id")
        batch = Batch(body)
        self._by_id[batch.id] = batch
        batch.task = asyncio.create_task(self._run(batch))
        return batch

    def find(self, number: str) -> Batch:
        """Raises ApiError."""
        if number not in self._by_id:
            raise ApiError(f'there is no batch "{number[:100]}"', status=404, code="not_found")
        return self._by_id[number]

    def cancel(self, number: str) -> Batch:
        """What has been answered stays. Raises ApiError for one that has ended."""
        batch = self.find(number)
        if batch.has_ended:
            raise ApiError(f'the batch "{batch.id}" has ended ({batch.status})', status=409)
        batch.enter("cancelling")
        assert batch.task is not None
        batch.task.cancel()
        return batch

    def described(self) -> list[Piece]:
        return [batch.described() for batch in self._by_id.values()]

    async def close(self) -> None:
        tasks = [batch.task for batch in self._by_id.values() if batch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, batch: Batch) -> None:
        try:
            content = await asyncio.to_thread(self._files.content, batch.body.input_file_id)
            lines = await asyncio.to_thread(read_lines, content, batch)
            if batch.errors:
                return batch.enter("failed")
            batch.counts["total"] = len(lines)
            batch.enter("in_progress")
            await self._answer_all(batch, lines)
            batch.enter("finalizing")
            batch.enter("completed")
        except asyncio.CancelledError:
            batch.enter("cancelled")
        except Exception as error:
            log.exception("a batch failed")
            batch.errors.append(error_of(None, str(as_api_error(error))))
            batch.enter("failed")

    async def _answer_all(self, batch: Batch, lines: list[BatchLine]) -> None:
        """Each by one of a few workers, which take the next line in turn."""
        rest = iter(lines)

        async def work() -> None:
            for line in rest:
                await self._answer(batch, line)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_A_TIME, len(lines))):
                group.create_task(work())

    async def _answer(self, batch: Batch, line: BatchLine) -> None:
        body = line.body if batch.body.endpoint == "/v1/embeddings" else {"priority": PRIORITY, **line.body}
        answer = await self._ask(batch.body.endpoint, body)
        while answer.status == OVERLOADED:
            # The queue is full of clients' requests.
            await asyncio.sleep(1)
            answer = await self._ask(batch.body.endpoint, body)
        succeeded = answer.status == 200
        batch.counts["completed" if succeeded else "failed"] += 1
        response = {"status_code": answer.status, "request_id": f"req_{secrets.token_hex(12)}", "body": answer.body}
        row = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": line.custom_id, "response": response}
        self._write(batch, succeeded, {**row, "error": None})

    def _write(self, batch: Batch, succeeded: bool, row: Piece) -> None:
        """A line of the file of answers, or of errors, which begins with its first line."""
        data = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        if succeeded:
            batch.output = batch.output or self._files.begin(f"{batch.id}_output.jsonl").id
            self._files.append(batch.output, data)
        else:
            batch.failures = batch.failures or self._files.begin(f"{batch.id}_error.jsonl").id
            self._files.append(batch.failures, data)


def read_lines(content: bytes, batch: Batch) -> list[BatchLine]:
    """The requests of a file; what is against a line goes to the errors of the batch."""
    lines, seen = [], set[str]()
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = BatchLine.model_validate(parse_json(text))
        except (ValueError, RecursionError) as error:
            batch.errors.append(error_of(number, _reason(error)))
            continue
        if (reason := _objection(line, batch.body.endpoint, seen)) is not None:
            batch.errors.append(error_of(number, reason))
        seen.add(line.custom_id)
        lines.append(line)
    if not lines and not batch.errors:
        batch.errors.append(error_of(None, "the file has no line"))
    return lines


def _objection(line: BatchLine, endpoint: str, seen: set[str]) -> str | None:
    if line.custom_id in seen:
        return f'custom_id "{line.custom_id[:100]}" is in another line too'
    if line.url != endpoint:
        return f"url is {line.url[:100]!r}; the batch is for {endpoint}"
    return "stream: an answer of a batch comes in one piece" if line.body.get("stream") else None


def _reason(error: ValueError | RecursionError) -> str:
    """error: of `parse_json` or of pydantic, whose errors are ValueErrors too."""
    if isinstance(error, RecursionError):
        return "the line is nested too deeply"
    if not isinstance(error, ValidationError):
        return str(error) if isinstance(error, DuplicateKeyError) else f"the line is no JSON: {error}"
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else str(first["msg"])


def error_of(line: int | None, message: str) -> Piece:
    return {"code": "invalid_request", "line": line, "message": message, "param": None}


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
