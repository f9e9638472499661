"""Small models with random weights, and a server of them in this process."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.interfaces import Tokenizer
from mt_core.nn.layout import initialize
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train import build
from mt_data.datasets.sft.chat_templates import load_chat_template
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.embedding import TextEmbedder
from mt_infer.requests import EngineStatistics, FinishReason
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.sampling.sampler import LogProbs
from mt_infer.server.app import create_app
from mt_infer.server.options import ServerOptions
from mt_infer.server.running import Server, address_of, listen
from mt_infer.server.served_model import ServedModel
from mt_infer.server.service import Service
from mt_infer.text import TextEvent, TextGenerator

if TYPE_CHECKING:
    import openai

CONTEXT = 256
VOCABULARY = 261
LLAMA = {
    "family": "llama",
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "vocab_size": VOCABULARY,
}
BERT = {**LLAMA, "family": "bert"}
INFERENCE = {"cache_memory_gb": 0.05, "max_requests": 64}


def configuration(model: Mapping[str, Any]) -> Config:
    return config_from_dict({"model": model, "inference": INFERENCE}, load_plugins())


def model_of(config: Config, seed: int) -> tuple[torch.nn.Module, ParallelContext]:
    ctx = ParallelContext(device=torch.device("cpu"))
    model = build.build_model(config, ctx, load_plugins())
    initialize(model, seed, ctx)
    return model.eval(), ctx


def generator(seed: int = 1, tokenizer: Tokenizer | None = None) -> TextGenerator:
    config = configuration(LLAMA)
    model, ctx = model_of(config, seed)
    return TextGenerator.of_model(model, tokenizer or ByteLevelTokenizer(), config, ctx)


def chat_format(template: str = "chatml") -> ChatFormat:
    tokenizer = ByteLevelTokenizer()
    return ChatFormat(load_chat_template(template, None, tokenizer), tokenizer, seconds=0.5)


def language_model(name: str, seed: int, **others: Any) -> ServedModel:
    return ServedModel(name, 0, generator(seed), chat=chat_format(), **others)


def encoder(name: str) -> ServedModel:
    config = configuration(BERT)
    model, ctx = model_of(config, 3)
    return ServedModel(name, 0, embedder=TextEmbedder(model, ByteLevelTokenizer(), ctx.device, VOCABULARY))


@dataclass
class Live:
    """A server that answers at `url`."""

    url: str
    service: Service
    server: Server

    def call(
        self, path: str, body: Any = None, *, method: str | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """The status and the JSON of the answer; body: sent as JSON, bytes as they are."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, _json(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _json(error.read())

    @property
    def used_blocks(self) -> int:
        return sum(one.engine.engine.manager.used_blocks for one in self.service.models.generators)


def openai_client(served: Live, *, api_key: str = "none", timeout: float = 60) -> openai.OpenAI:
    import openai  # 1 s in each worker that collects tests: imported where it is used

    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=api_key, max_retries=0, timeout=timeout)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()


@contextmanager
def live(
    models: list[ServedModel], options: ServerOptions | None = None, *, drain_seconds: float = 5
) -> Iterator[Live]:
    service = Service(models, options or ServerOptions())
    listening = listen("127.0.0.1", 0)
    ready = threading.Event()
    server = Server(create_app(service), ready.set, drain_seconds, service.engine.stop)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield Live(address_of(listening), service, server)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


class ScriptedGenerator:
    """In place of a TextGenerator: answers every request with the same text, a character a step."""

    longest = 2048

    def __init__(self, text: str, *, forever: bool = False) -> None:
        self.tokenizer = ByteLevelTokenizer()
        self.prompts = SimpleNamespace(has_encoder=False, takes_images=False, takes_sounds=False)
        world = SimpleNamespace(size=1)
        self.engine = SimpleNamespace(ctx=SimpleNamespace(world=world), statistics=[EngineStatistics()])
        self._text, self._forever = text, forever
        self._open: dict[int, int] = {}
        self._count = 0
        self.cancelled: list[int] = []

    @property
    def is_idle(self) -> bool:
        return not self._open

    def prompt_tokens(self, prompt: Any) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def submit(self, prompt: Any, sampling: SamplingParameters, inputs: Any, adapter: str | None = None) -> int:
        self._count += 1
        self._open[self._count] = 0
        return self._count

    def compile_constraint(self, sampling: SamplingParameters) -> None:
        pass

    def cancel(self, request: int) -> None:
        if self._open.pop(request, None) is not None:
            self.cancelled.append(request)

    def step(self) -> list[TextEvent]:
        time.sleep(0.001)
        return [self._event(request) for request in list(self._open)]

    def _event(self, request: int) -> TextEvent:
        place = self._open[request]
        self._open[request] += 1
        if place >= len(self._text) and not self._forever:
            del self._open[request]
            return TextEvent(request, 0, "", finish=FinishReason.STOP)
        letter = self._text[place % len(self._text)]
        return TextEvent(request, 0, letter, token=ord(letter), logprobs=LogProbs(-0.5))


def scripted_model(text: str, *, forever: bool = False, **others: Any) -> ServedModel:
    return ServedModel("scripted", 0, ScriptedGenerator(text, forever=forever), **others)  # type: ignore[arg-type]


def until(holds: Callable[[], bool]) -> bool:
    """Whether it holds within two minutes."""
    end = time.monotonic() + 120
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()
