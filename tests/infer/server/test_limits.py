"""Limits of a server, clients that go away, and templates of ill will."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
import urllib.request
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.infer.server.served import (
    INFERENCE,
    LLAMA,
    Live,
    encoder,
    generator,
    language_model,
    live,
    model_of,
    openai_client,
    scripted_model,
    until,
)

from mt_core.config.loading import config_from_dict
from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_data.tokenizers.null import NullConfig, NullTokenizer
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.sampling.constraints import Constraints
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.errors import AnsweredWhenCancelled, ApiError
from mt_infer.server.options import ServerOptions
from mt_infer.server.running import listen
from mt_infer.server.served_model import ServedModel, model_names
from mt_infer.text import TextGenerator

SAMPLING = SamplingParameters(temperature=0.0, max_tokens=4)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LONG = {"prompt": "x", "model": "alpha", "max_tokens": 240, "temperature": 0, "ignore_eos": True}


def is_error(body: Any) -> bool:
    return isinstance(body, dict) and {"message", "type", "param", "code"} <= set(body.get("error", ()))


def test_an_api_key_guards_all_but_the_page_and_health() -> None:
    with live([scripted_model("ok")], ServerOptions(api_key="secret")) as served:
        for headers, expected in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Bearer secret"}, 200),
        ):
            for path, body in (("/v1/models", None), ("/metrics", None), ("/v1/completions", {"prompt": "x"})):
                status, answer = served.call(path, body, headers=headers)
                assert status == expected
                assert status == 200 or is_error(answer)
        assert served.call("/")[0] == served.call("/health")[0] == 200
        import openai

        with pytest.raises(openai.AuthenticationError):
            openai_client(served, api_key="wrong").models.list()


def test_limits_of_size_tokens_queue_and_time() -> None:
    options = ServerOptions(max_body_bytes=2000, max_tokens=50, max_queue=3, request_seconds=0.3)
    with live([scripted_model("ab", forever=True)], options, drain_seconds=0.1) as served:
        cases = [
            ({"prompt": "x" * 3000}, 413, "2000 bytes"),
            ({"prompt": "x", "max_tokens": 51}, 400, "50 that this server"),
            ({"prompt": ["x"] * 4}, 400, "4 sequences"),
            ({"prompt": "x"}, 504, "0.3 s"),
        ]
        for body, expected, words in cases:
            status, answer = served.call("/v1/completions", body)
            assert (status, words in answer["error"]["message"]) == (expected, True)
        # A stream that has begun ends with the error as an event. On a busy machine its time may be up before.
        answers = (served.call("/v1/completions", {"prompt": "x", "stream": True}) for _ in range(100))
        answer = next(answer for status, answer in answers if status == 200)
        lines = answer.strip().split("\n\n")
        assert is_error(json.loads(lines[-2].removeprefix("data: ")))
        assert lines[-1] == "data: [DONE]"
        model = served.service.models.find(None).generator
        assert until(lambda: model.is_idle)
        served.service.options = replace(options, request_seconds=600)
        threads = [threading.Thread(target=served.call, args=("/v1/completions", {"prompt": "x"})) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert until(lambda: served.service._open == 3)
        status, answer = served.call("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "overloaded")
    for thread in threads:
        thread.join(60)


def test_sequences_among_which_the_best_is_chosen_take_the_queue() -> None:
    with live([scripted_model("ab", forever=True)], ServerOptions(max_queue=3), drain_seconds=0.1) as served:
        thread = threading.Thread(target=served.call, args=("/v1/completions", {"prompt": "x", "best_of": 3}))
        thread.start()
        assert until(lambda: served.service._open == 3)
        assert served.call("/v1/completions", {"prompt": "x"})[0] == 503
    thread.join(60)
    assert served.service._open == 0


def test_embeddings_have_the_same_limits() -> None:
    with live([encoder("bert")], ServerOptions(max_queue=1)) as served:
        assert served.call("/v1/embeddings", {"input": "x"})[0] == 200
        status, answer = served.call("/v1/embeddings", {"input": ["x"] * 33})
        assert (status, "2 sequences" in answer["error"]["message"]) == (400, True)
        served.service.options = ServerOptions(max_queue=1, request_seconds=0.1)
        goes_on = threading.Event()
        served.service.engine._command(goes_on.wait)
        status, answer = served.call("/v1/embeddings", {"input": "x"})
        assert (status, answer["error"]["code"]) == (504, "timeout")
        goes_on.set()
        assert served.service._open == 0


def test_a_constraint_is_compiled_outside_the_thread_of_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_in = []

    def compiled(self: Constraints, name: str, text: str, real: Any = Constraints._compile) -> Any:
        compiled_in.append(threading.current_thread().name)
        return real(self, name, text)

    monkeypatch.setattr(Constraints, "_compile", compiled)
    with live([language_model("alpha", 1)]) as served:
        body = {"prompt": "x", "guided_choice": ["yes"], "max_tokens": 4}
        assert served.call("/v1/completions", body)[1]["choices"][0]["text"] == "yes"
        status, answer = served.call("/v1/completions", {**body, "guided_choice": None, "guided_regex": "("})
        assert (status, "regex is not valid" in answer["error"]["message"]) == (400, True)
    assert compiled_in
    assert "mt-engine" not in compiled_in


def test_metrics_of_the_prefix_cache_and_of_speculation() -> None:
    inference = {**INFERENCE, "cache_block_size": 4, "speculative_method": "ngram"}
    config = config_from_dict({"model": LLAMA, "inference": inference}, load_plugins())
    model, ctx = model_of(config, 1)
    own = TextGenerator.of_model(model, ByteLevelTokenizer(), config, ctx)
    with live([ServedModel("alpha", 0, own)]) as served:
        for _ in range(2):
            body = {"prompt": "abcabcabcabc", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
            assert served.call("/v1/completions", body)[0] == 200
        _, metrics = served.call("/metrics")
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("mt_"))
    found = {name.removesuffix('_total{model="alpha",replica="0"}'): float(value) for name, value in values.items()}
    # 12 tokens twice; the last position is computed anew, and so is its block.
    assert found["mt_prefix_cache_queried_tokens"] == 24
    assert found["mt_prefix_cache_hit_tokens"] == 8
    assert found["mt_speculation_drafted_tokens"] == own.engine.engine.speculation.drafted > 0
    assert found["mt_speculation_accepted_tokens"] == own.engine.engine.speculation.accepted


def test_a_model_that_has_diverged_is_an_error_in_words() -> None:
    model = language_model("nan", 1)
    with torch.no_grad():
        next(model.generator.model.parameters()).fill_(float("nan"))
    with live([model]) as served:
        for body in ({"prompt": "x", "max_tokens": 2, **more} for more in ({}, {"logprobs": 1}, {"temperature": 0})):
            status, answer = served.call("/v1/completions", body)
            assert (status, "training has diverged" in answer["error"]["message"]) == (500, True)
            _, events = served.call("/v1/completions", {**body, "stream": True})
            assert is_error(events if isinstance(events, dict) else json.loads(events.split("\n\n")[-3][6:]))
        assert until(lambda: served.service.engine.is_idle)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_the_cache(served: Live, stream: bool) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    body = json.dumps({**LONG, "stream": stream, "n": 3})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert until(lambda: served.used_blocks > 0)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert until(lambda: served.used_blocks == 0)
    assert served.service.engine.is_idle
    _, metrics = served.call("/metrics")
    assert 'mt_requests_total{model="alpha",outcome="cancelled"}' in metrics


def test_requests_that_the_end_interrupts_get_an_error_object(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[tuple[int, Any]] = []
    with live([scripted_model("ab", forever=True)], drain_seconds=0.1) as served:

        def ask() -> None:
            answers.append(served.call("/v1/completions", {"prompt": "x"}))

        thread = threading.Thread(target=ask)
        thread.start()
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        sent = urllib.request.Request(f"{served.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(sent, timeout=60) as stream:
            stream.readline()
            assert until(lambda: len(served.service.engine._open) == 2)
            served.server.should_exit = True
            events = stream.read().strip().split(b"\n\n")
        thread.join(60)
        with pytest.raises(ApiError, match="the server has stopped"):
            asyncio.run(served.service.engine.call(lambda: None))
    ((status, answer),) = answers
    assert (status, answer["error"]["message"]) == (503, "the server has stopped")
    assert json.loads(events[-2].removeprefix(b"data: ")) == answer
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_request_that_is_cancelled_gets_an_error_object() -> None:
    """What uvicorn does to requests that nothing else ends."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def forever(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def cancelled() -> None:
        request = asyncio.ensure_future(AnsweredWhenCancelled(forever)({"type": "http"}, None, send))
        await asyncio.sleep(0)
        request.cancel()
        await request

    asyncio.run(cancelled())
    assert (sent[0]["status"], is_error(json.loads(sent[1]["body"]))) == (503, True)


def test_requests_for_other_hosts_are_refused(served: Live) -> None:
    status, answer = served.call("/v1/models", headers={"Host": "example.org"})
    assert (status, answer["error"]["code"]) == (403, "wrong_host")
    for host in ("localhost:80", "127.0.0.2", "[::1]:80"):
        assert served.call("/v1/models", headers={"Host": host})[0] == 200
    with live([scripted_model("ok")], ServerOptions(any_host=True)) as open_to_all:
        assert open_to_all.call("/v1/models", headers={"Host": "example.org"})[0] == 200


TEMPLATES = [
    ("{{ raise_exception('no such thing') }}", "no such thing"),
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "longer than 0.5 s"),
    ("{{ messages[0].nothing.here }}", "nothing"),
    ("{{ 'a' * (1024 ** 4) }}", "longer than 67108864 characters"),
    ("{{ ().__class__.__base__.__subclasses__() }}", "unsafe"),
    ("{% if %}", "no valid Jinja"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "words"), TEMPLATES)
def test_a_template_that_fails_or_loops_is_an_error_in_bounded_time(source: str, words: str) -> None:
    tokenizer = ByteLevelTokenizer()
    template = ChatTemplate("it", "", {}, eod_after_answer=False)
    template.source = source
    model = scripted_model("ok", chat=ChatFormat(template, tokenizer, seconds=0.5))
    with live([model]) as served:
        started = time.monotonic()
        status, answer = served.call("/v1/chat/completions", CHAT)
        assert status == 400
        assert words in answer["error"]["message"]
        assert time.monotonic() - started < 20
        assert served.call("/v1/completions", {"prompt": "x"})[0] == 200


def test_without_a_chat_template_or_a_tokenizer_the_rest_works() -> None:
    ids = NullTokenizer(NullConfig(vocab_size=261))
    with live([ServedModel("ids", 0, generator(1, ids))]) as served:
        status, answer = served.call("/v1/chat/completions", CHAT)
        assert (status, "--chat-template" in answer["error"]["message"]) == (400, True)
        status, answer = served.call("/v1/completions", {"prompt": "some text"})
        assert (status, "reads whole numbers" in answer["error"]["message"]) == (400, True)
        status, answer = served.call("/v1/completions", {"prompt": [5, 6], "max_tokens": 3, "logprobs": 1})
        assert status == 200
        assert len(answer["choices"][0]["text"].split()) == 3


def test_an_engine_that_fails_ends_the_server_and_says_so() -> None:
    model = scripted_model("ok")

    def step() -> None:
        raise RuntimeError("no memory")

    model.generator.step = step
    with live([model]) as served:
        failed = threading.Event()
        served.service.engine.on_failure = failed.set
        status, answer = served.call("/v1/completions", {"prompt": "x"})
        assert (status, "engine has failed" in answer["error"]["message"]) == (500, True)
        assert failed.wait(5)
        assert served.call("/health")[0] == 503
        assert served.call("/v1/completions", {"prompt": "x"})[0] == 503


def test_an_engine_that_fails_between_steps_ends_the_server_and_says_so() -> None:
    """Here where a request that is late is cancelled."""
    model = scripted_model("ok", forever=True)
    model.generator.cancel = raises
    with live([model], ServerOptions(request_seconds=0.1)) as served:
        failed = threading.Event()
        served.service.engine.on_failure = failed.set
        assert served.call("/v1/completions", {"prompt": "x"})[0] == 504
        assert failed.wait(60)
        assert served.call("/health")[0] == 503


def test_a_request_that_cannot_be_submitted_ends_alone() -> None:
    model = scripted_model("ok")
    submit, model.generator.submit = model.generator.submit, raises
    with live([model]) as served:
        status, answer = served.call("/v1/completions", {"prompt": "x"})
        assert (status, "the request failed" in answer["error"]["message"]) == (500, True)
        model.generator.submit = submit
        assert served.call("/v1/completions", {"prompt": "x"})[0] == 200


def raises(*arguments: Any) -> None:
    raise RuntimeError("a defect")


def test_names_and_addresses_that_cannot_be(tmp_path) -> None:
    with pytest.raises(ConfigError, match="--name is given 1 times"):
        model_names([tmp_path / "a", tmp_path / "b"], ["one"])
    with pytest.raises(ConfigError, match='two models are named "a"'):
        model_names([tmp_path / "x" / "a", tmp_path / "y" / "a"], [])
    assert model_names([tmp_path / "mine" / "checkpoints" / "latest"], []) == ["mine"]
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="choose another --host or --port"):
            listen("127.0.0.1", taken.getsockname()[1])


@pytest.mark.slow
def test_two_hundred_streams_at_a_time() -> None:
    async def text(port: int, number: int) -> str:
        body = {"prompt": f"prompt {number}", "max_tokens": 4, "temperature": 0, "stream": True}
        sent = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(sent)}\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + sent)
        lines = (await reader.read()).decode().splitlines()
        writer.close()
        assert "data: [DONE]" in lines
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        return "".join(one["text"] for piece in pieces for one in piece["choices"])

    async def all_texts(port: int) -> list[str]:
        return await asyncio.gather(*(text(port, number) for number in range(200)))

    with live([language_model("many", 1)]) as served:
        found = asyncio.run(all_texts(int(served.url.rpartition(":")[2])))
        assert served.used_blocks == 0
    some = range(0, 200, 25)
    alone = generator(1).generate([f"prompt {number}" for number in some], SAMPLING)
    assert [found[number] for number in some] == [one[0].text for one in alone]
