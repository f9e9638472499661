"""`mt chat`: its commands, a model in this process, a server."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from rich.console import Console
from tests.infer.server.served import Live, chat_format, generator

from mt_core.errors import ConfigError
from mt_infer.chat.chat_format import load_chat_format
from mt_infer.chat.conversation import Conversation
from mt_infer.chat.local_model import LocalModel
from mt_infer.chat.partners import ChatSettings, RemoteModel


class Echo:
    """Answers with what it is sent."""

    name = "echo"

    def answer(self, messages, settings: ChatSettings) -> Generator[str, None, None]:
        if messages[-1]["content"] == "fail":
            raise ConfigError("no [bold] answer")
        yield "|".join(one["content"] for one in messages)
        yield f" \x1b]0;title\x07at {settings.temperature}"


def talk(partner, *lines: str, settings: ChatSettings | None = None) -> str:
    """What the terminal shows."""
    shown = io.StringIO()
    given = iter(lines)

    def read() -> str:
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    Conversation(partner, Console(file=shown, width=300), settings or ChatSettings()).run(read)
    return shown.getvalue()


def test_commands_of_a_conversation() -> None:
    shown = talk(
        Echo(), "a", "/system S", "b", "/undo", "/temperature 0.5", "c", "/reset", "fail", "d", "/temperature x",
        "/temprature", "/seed 3", "/settings", "/help", "/quit", "never",
    ).splitlines()  # fmt: skip
    assert shown[0] == "a ]0;titleat 0.8"
    assert shown[1].startswith("S|a|a ")
    assert "|b ]" in shown[1]
    assert shown[2] == "temperature = 0.5"
    assert shown[3].startswith("S|a|a ")
    assert "|c ]0;titleat 0.5" in shown[3]
    assert "|b" not in shown[3]
    text = "\n".join(shown)
    assert "error: no [bold] answer" in text
    assert "S|d ]" in text  # neither what came before /reset nor the question that failed
    for words in ("/temperature takes a number, not 'x'", 'did you mean "temperature"', "seed = 3", "/undo"):
        assert words in text
    assert "never" not in text


@pytest.mark.slow
def test_a_server_answers_as_the_model_does_here(served: Live) -> None:
    settings = ChatSettings(temperature=0.0, max_tokens=9)
    chat = chat_format()
    here = talk(LocalModel("alpha", generator(1), chat), "hi", "and", settings=settings)
    there = talk(RemoteModel(served.url + "/v1/", None, None), "hi", "and", settings=settings)
    chat.close()
    assert here == there
    assert len(here) > 10


class Broken(BaseHTTPRequestHandler):
    """A server whose answers break off, or are something else."""

    answers: ClassVar = [
        b'data: {"choices": [{"delta": {"content": "beg"}}]}\n\n',
        b"data: <html>\n\n",
        b"data: {}\n\n",
    ]

    def do_GET(self) -> None:
        self.send(b'{"data": [{"id": "broken"}]}', 0)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        assert len(asked) == 1, "what was not answered is not asked again"
        self.send(self.answers[int(asked[0]["content"])], 100)

    def send(self, body: bytes, missing: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_conversation_goes_on_after_an_answer_that_breaks_off() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = talk(RemoteModel(f"http://127.0.0.1:{server.server_port}", None, None), "0", "1", "2", "/help")
        server.shutdown()
    assert shown.count("error:") == 3
    assert "the connection to http://127.0.0.1" in shown
    assert shown.count("something else than OpenAI's interface") == 2
    assert "/undo" in shown


def test_what_cannot_be_answered_is_said(served: Live) -> None:
    assert "context is 256" in talk(RemoteModel(served.url, "alpha", None), "x" * 300)
    plain = chat_format("plain")
    assert "300 tokens" in talk(LocalModel("alpha", generator(1), plain), "x" * 282)
    plain.close()
    assert "there is no model" in talk(RemoteModel(served.url, "gamma", None), "hi")
    with pytest.raises(ConfigError, match="no server answers"):
        RemoteModel("http://127.0.0.1:1", None, None)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, None),
        ({"chat_template.jinja": b"{% for x in %}"}, "no valid Jinja template .*--chat-template"),
        (
            {"tokenizer_config.json": b'{"chat_template": [{"name": "rag", "template": "x"}]}'},
            'none named "default".*--chat-template',
        ),
    ],
)
def test_a_template_with_an_error_is_not_the_same_as_none(files: dict[str, bytes], says: str | None) -> None:
    tokenizer: Any = SimpleNamespace(files=lambda: files)
    if says is None:
        assert load_chat_format(None, tokenizer, SimpleNamespace()) is None
        return
    with pytest.raises(ConfigError, match=says):
        load_chat_format(None, tokenizer, SimpleNamespace())
