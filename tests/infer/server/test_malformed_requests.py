"""Whatever is sent, the answer is JSON that says what is wrong, or the answer: never status 500, never silence."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.infer.server.served import Live, encoder, language_model, live

from mt_infer.server.megatron import MegatronBody
from mt_infer.server.openai.batches import BatchBody
from mt_infer.server.openai.chat import ChatBody
from mt_infer.server.openai.completions import CompletionBody
from mt_infer.server.openai.embeddings import EmbeddingBody, RerankBody, ScoreBody
from mt_infer.server.openai.response_fields import ResponseBody
from mt_infer.server.openai.tokens import DetokenizeBody, TokenizeBody
from mt_infer.server.options import ServerOptions

MESSAGE = {"role": "user", "content": "hi"}
ENDPOINTS: dict[str, tuple[str, type, dict[str, Any]]] = {
    "/v1/completions": ("POST", CompletionBody, {"model": "tiny", "prompt": "x"}),
    "/v1/chat/completions": ("POST", ChatBody, {"model": "tiny", "messages": [MESSAGE]}),
    "/v1/embeddings": ("POST", EmbeddingBody, {"model": "bert", "input": "x"}),
    "/v1/responses": ("POST", ResponseBody, {"model": "tiny", "input": "x"}),
    "/v1/batches": ("POST", BatchBody, {"input_file_id": "x", "endpoint": "/v1/responses", "completion_window": "24h"}),
    "/tokenize": ("POST", TokenizeBody, {"model": "tiny", "prompt": "x"}),
    "/detokenize": ("POST", DetokenizeBody, {"model": "tiny", "tokens": [97]}),
    "/score": ("POST", ScoreBody, {"model": "bert", "text_1": "x", "text_2": ["y"]}),
    "/rerank": ("POST", RerankBody, {"model": "tiny", "query": "x", "documents": ["y"]}),
    "/api": ("PUT", MegatronBody, {"prompts": ["x"], "tokens_to_generate": 2}),
}
numbers = st.one_of(st.integers(), st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30]), st.floats(allow_nan=False))
texts = st.one_of(st.text(max_size=8), st.sampled_from(["", "\x00", "\ufffd", "json_object", "function", "user"]))
keys = st.one_of(
    texts, st.sampled_from(["type", "role", "content", "schema", "json_schema", "name", "function", "text"])
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    with live([language_model("tiny", 1), encoder("bert")], ServerOptions(max_tokens=2, max_queue=8)) as found:
        yield found


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    path = draw(st.sampled_from(list(ENDPOINTS)))
    method, body, valid = ENDPOINTS[path]
    changed = draw(st.lists(st.sampled_from([*body.model_fields, "unknown"]), min_size=1, max_size=3, unique=True))
    return method, path, {**valid, **{name: draw(values) for name in changed}}


def answer(connection: http.client.HTTPConnection, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    connection.request(method, path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read()


def require_error(status: int, body: bytes) -> None:
    assert 400 <= status < 500, body
    assert {"message", "type", "param", "code"} == set(json.loads(body)["error"])


def test_a_key_that_stands_twice_is_named(small: Live) -> None:
    """At every endpoint; Python's reader, and with it FastAPI, would take the last without a word."""
    connection = http.client.HTTPConnection(small.url.removeprefix("http://"), timeout=30)
    for path, (method, _, valid) in ENDPOINTS.items():
        body = json.dumps(valid)
        key = next(iter(valid))
        status, content = answer(connection, method, path, f'{body[:-1]}, "{key}": 1}}'.encode())
        require_error(status, content)
        assert status == 400
        assert f"the key '{key}' stands twice" in content.decode()
    twice = b'{"model": "tiny", "messages": [{"role": "user", "role": "system", "content": "hi"}]}'
    assert b"the key 'role' stands twice" in answer(connection, "POST", "/v1/chat/completions", twice)[1]


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        (b'{"prompt": "\xff"}', "application/json", "'utf-8' codec can't decode byte 0xff"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "application/json", "Exceeds the limit"),
        (b"[" * 200_000, "application/json", "nested too deeply"),
        (b'{"prompt": "x"}', "text/plain", "Content-Type: application/json"),
    ],
)
def test_a_body_that_cannot_be_read_says_why(small: Live, body: bytes, kind: str, reason: str) -> None:
    """FastAPI says of all but wrong syntax that there was an error."""
    connection = http.client.HTTPConnection(small.url.removeprefix("http://"), timeout=30)
    connection.request("POST", "/v1/completions", body, {"Content-Type": kind})
    response = connection.getresponse()
    content = response.read()
    require_error(response.status, content)
    assert reason in json.loads(content)["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("examples", [100, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_malformed_fields_are_errors(small: Live, examples: int) -> None:
    connection = http.client.HTTPConnection(small.url.removeprefix("http://"), timeout=30)
    seen: dict[int, int] = {}

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(requests())
    def check(request: tuple[str, str, dict[str, Any]]) -> None:
        method, path, body = request
        status, found = answer(connection, method, path, json.dumps(body).encode())
        seen[status] = seen.get(status, 0) + 1
        if status != 200:
            require_error(status, found)

    check()
    assert seen[400] > examples // 3
    assert small.service.engine.is_idle
    assert small.used_blocks == 0


BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "user": "\\udfff"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": []}',
    b'{"prompt": [[]]}',
    b'{"prompt": [1, "x"]}',
    b'{"prompt": [true]}',
    b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}]}',
]


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_bodies_that_are_no_requests_are_errors(small: Live, path: str) -> None:
    connection = http.client.HTTPConnection(small.url.removeprefix("http://"), timeout=30)
    for body in BODIES:
        require_error(*answer(connection, ENDPOINTS[path][0], path, body))
    # GET /v1/batches lists them.
    for method in ("DELETE", "PATCH") if path == "/v1/batches" else ("GET", "DELETE", "PATCH"):
        require_error(*answer(connection, method, path, b""))
    require_error(*answer(connection, "POST", "/nothing", b"{}"))
    small_body = {"Content-Type": "text/plain"}
    connection.request(ENDPOINTS[path][0], path, json.dumps(ENDPOINTS[path][2]), small_body)
    response = connection.getresponse()
    require_error(response.status, response.read())
