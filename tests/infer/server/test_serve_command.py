"""`mt serve` as it is typed: two ranks behind one address, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mt_cli.main import run
from mt_infer.sampling.parameters import SamplingParameters
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


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of `mt serve` and its address. Every process of it has ended afterwards."""
    command = [sys.executable, "-m", "mt_cli", "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://[\d.:]+", line)
        assert found, (line, process.stderr.read() if process.stderr else "")
        yield process, found[0]
    finally:
        process.kill()
        process.wait(30)


def post(url: str, body: dict):
    data = json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60)


def complete(address: str, model: str) -> str:
    with post(
        f"{address}/v1/completions", {"model": model, "prompt": "The", "max_tokens": 12, "temperature": 0}
    ) as answer:
        return json.load(answer)["choices"][0]["text"]


def test_two_ranks_answer_as_one_and_sigterm_drains(run_dir: Path) -> None:
    greedy = SamplingParameters(temperature=0.0, max_tokens=12)
    expected = TextGenerator.load(run_dir, device="cpu").generate(["The"], greedy)[0][0].text
    two_models = (run_dir, run_dir, "--name", "a", "--name", "b", "--nproc", 2, "--set", TP2)
    with serving(*two_models, "--chat-template", "plain") as (process, address):
        assert {complete(address, name) for name in ("a", "b")} == {expected}
        body = {"model": "a", "prompt": "x", "max_tokens": 120, "temperature": 0, "stream": True, "ignore_eos": True}
        with post(f"{address}/v1/completions", body) as stream:
            assert stream.readline().startswith(b"data: {")
            process.send_signal(signal.SIGTERM)
            lines = [line for line in stream.read().split(b"\n\n") if line]
        assert lines[-1] == b"data: [DONE]"
        assert json.loads(lines[-2].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0


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


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_without_the_extra_it_says_what_to_install(package: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert run(["serve", "anything"]) == 3
    assert f'needs {package}; pip install "mt-infer[server]"' in capsys.readouterr().err
