"""`mt serve` as it is typed: two ranks behind one address, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import urllib.request
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

from mt_cli.main import run
from mt_core.testing import run_ranks
from mt_infer.commands import serve as command
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server import served_model
from mt_infer.text import TextGenerator

pytestmark = pytest.mark.slow
TP2 = "parallel.tensor_model_parallel_size=2"
TRAIN = [
    "--set", "model.num_layers=2", "--set", "model.hidden_size=32", "--set", "model.num_attention_heads=4",
    "--set", "train.train_iters=1", "--set", "train.eval_interval=null", "--set", "train.sample_prompt=null",
    "--set", "data.corpus_bytes=1000000", "--set", "data.seq_length=128", "--set", "logging.progress=none",
]  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "tiny"
    assert run(["train", *TRAIN, "--run-dir", str(place)]) == 0
    return place


def post(url: str, body: dict):
    data = json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60)


def complete(address: str, model: str) -> str:
    with post(
        f"{address}/v1/completions", {"model": model, "prompt": "The", "max_tokens": 12, "temperature": 0}
    ) as answer:
        return json.load(answer)["choices"][0]["text"]


def address(printed: Path) -> str:
    """What the command has printed, or is about to."""
    for _ in range(600):
        if found := re.search(r"http://[\d.:]+(?= )", printed.read_text()):
            return found[0]
        time.sleep(0.1)
    raise TimeoutError("no address was printed")


def use(printed: Path, processes: list[int], seen: list[str]) -> None:
    """Two completions, and one that is under way when all ranks get SIGTERM."""
    url = address(printed)
    seen += [complete(url, name) for name in ("a", "b")]
    body = {"model": "a", "prompt": "x", "max_tokens": 120, "temperature": 0, "stream": True, "ignore_eos": True}
    with post(f"{url}/v1/completions", body) as stream:
        assert stream.readline().startswith(b"data: {")
        for process in processes:
            os.kill(process, signal.SIGTERM)
        lines = [line for line in stream.read().split(b"\n\n") if line]
    assert lines[-1] == b"data: [DONE]"
    seen.append(json.loads(lines[-2].removeprefix(b"data: "))["choices"][0]["finish_reason"])


def on_rank(rank: int, world: int, run_dir: Path) -> tuple[int, list[str]]:
    """The exit code of the command, and on rank 0 what its client has seen."""
    processes: list[int] = [0] * world
    dist.all_gather_object(processes, os.getpid())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # as a launcher sets them; the world is there already
    models = (run_dir, run_dir, "--name", "a", "--name", "b", "--chat-template", "plain")
    command = ["serve", *map(str, models), "--set", TP2, "--port", "0"]
    printed, seen = run_dir / f"printed-{rank}.txt", list[str]()
    client = threading.Thread(target=use, args=(printed, processes, seen))
    with printed.open("w", buffering=1) as out, redirect_stdout(out):
        if not rank:
            client.start()
        code = run(command)
    if not rank:
        client.join()
    return code, seen


@pytest.mark.dist
def test_two_ranks_answer_as_one_and_sigterm_drains(run_dir: Path) -> None:
    greedy = SamplingParameters(temperature=0.0, max_tokens=12)
    expected = TextGenerator.load(run_dir, device="cpu").generate(["The"], greedy)[0][0].text
    assert run_ranks(2, on_rank, run_dir) == [(0, [expected, expected, "length"]), (0, [])]


@pytest.mark.parametrize(
    ("host", "any_host"), [((), False), (("--host", "127.0.0.1"), False), (("--host", "0.0.0.0"), True)]
)
def test_only_a_server_of_a_network_answers_to_any_host(host, any_host, monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    monkeypatch.setattr(served_model, "load_models", lambda paths, **options: [])
    monkeypatch.setattr(command, "_serve", lambda models, options, *others: served.append(options))
    assert run(["serve", "anything", "--port", "0", *host]) == 0
    assert [options.any_host for options in served] == [any_host]


def test_a_chat_template_that_is_missing_is_said_before_models_are_loaded(monkeypatch, capsys) -> None:
    monkeypatch.setattr(served_model, "load_models", lambda paths, **options: pytest.fail("models are loaded"))
    assert run(["serve", "anything", "--chat-template", "no-such-file.jinja"]) == 2
    assert "neither a file nor one of" in capsys.readouterr().err


def test_paths_that_cannot_be_served(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        ([run_dir / "nothing"], "nothing"),
        ([run_dir, run_dir], 'two models are named "tiny"'),
        ([run_dir, "--chat-template", "chatnl"], "neither a file nor one of tokenizer, chatml"),
        ([run_dir, "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        ([run_dir, "--set", "inference.cache_memory_gb=0.00000001"], "cache_memory_gb"),
    ]
    for arguments, words in cases:
        assert run(["serve", *map(str, arguments), "--port", "0"]) != 0
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client", "python_multipart"])
def test_without_the_extra_it_says_what_to_install(package: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert run(["serve", "anything"]) == 3
    assert f'needs {package}; pip install "mt-infer[server]"' in capsys.readouterr().err
