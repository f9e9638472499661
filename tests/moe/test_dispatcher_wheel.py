"""examples/mt-dispatcher-example as a user gets it: a wheel, installed, found through its entry point, and used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.command_on_ranks import fork_ranks

from mt_cli import main

pytestmark = [pytest.mark.wheels, pytest.mark.long]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "mt-dispatcher-example"
RECIPE = ROOT / "examples" / "mixtral-tiny.toml"
SETTINGS = [
    "parallel.expert_model_parallel_size=2",
    "model.num_layers=2",
    "data.corpus_bytes=1000000",
    "data.seq_length=32",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.train_iters=2",
    "train.num_threads=1",
    "train.eval_interval=null",
    "train.eval_iters=1",
    "train.sample_prompt=null",
    "lr_schedule.lr_warmup_iters=1",
    "checkpoint.save_interval=null",
    "logging.log_interval=1",
    "logging.progress=none",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = shutil.which("uv")
    if program is None:
        pytest.skip("uv is not on the PATH")
    house = tmp_path_factory.mktemp("wheel")
    command = [program, "-q", "build", "--wheel", "--no-sources", "--out-dir", str(house), str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    (built,) = house.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed in; its dependencies are those of the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("site")
    command = ["uv", "-q", "pip", "install", "--no-deps", "--python", sys.executable, "--target", folder, wheel]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def mt(site: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command, with the folder on the path."""
    environment = {key: value for key, value in os.environ.items() if key != "MT_PLUGINS"}
    environment["PYTHONPATH"] = str(site)
    command = [sys.executable, "-m", "mt_cli", *map(str, arguments)]
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)


def training(run_dir: Path, *further: str) -> list[str]:
    """The command for two processes with sharded experts."""
    settings = [part for setting in (*SETTINGS, *further) for part in ("--set", setting)]
    return ["train", str(RECIPE), "--nproc", "2", *settings, "--run-dir", str(run_dir)]


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


COUNTED = "model.moe.moe_token_dispatcher_type=counted"


def test_the_wheel_is_pure_python_and_typed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert {"mt_dispatcher_example/plugin.py", "mt_dispatcher_example/py.typed"} <= set(names)


def test_the_installed_plugin_is_listed_with_its_distribution(site: Path, tmp_path: Path) -> None:
    found = json.loads(mt(site, "plugins", "--json", cwd=tmp_path).stdout)
    owners = {(entry["kind"], entry["name"]): entry["distribution"] for entry in found["registrations"]}
    assert owners["moe_dispatchers", "counted"] == "mt-dispatcher-example"
    assert [plugin["problems"] for plugin in found["plugins"] if plugin["name"] == "dispatcher-example"] == [[]]


def test_a_training_run_uses_it_and_computes_the_same(site: Path, tmp_path: Path, monkeypatch) -> None:
    plain, counted, path = tmp_path / "plain", tmp_path / "counted", tmp_path / "traffic.jsonl"
    options = "model.moe.moe_dispatcher_options"
    done = mt(site, *training(counted, COUNTED, f'{options}.path="{path}"', f"{options}.every=2"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    fork_ranks(monkeypatch)
    assert main.run(training(plain)) == 0
    assert losses(counted) == losses(plain)
    for rank in range(2):
        lines = [json.loads(line) for line in Path(f"{path}.{rank}").read_text().splitlines()]
        assert all(sum(line["rows_to_rank"]) == 2 * 32 * 2 for line in lines)  # tokens of a micro-batch x top-2
        assert [line["dispatch"] % 2 for line in lines] == [0] * len(lines)


def test_without_the_wheel_the_name_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["train", str(RECIPE), "--set", COUNTED]) != 0
    shown = capsys.readouterr().err
    assert "moe_token_dispatcher_type" in shown
    assert "alltoall" in shown
    assert "Traceback" not in shown


def test_its_options_are_checked_before_anything_is_built(site: Path, tmp_path: Path) -> None:
    done = mt(site, "train", RECIPE, "--set", COUNTED, "--set", "model.moe.moe_dispatcher_options.evry=2", cwd=tmp_path)
    assert done.returncode != 0
    assert "model.moe.moe_dispatcher_options.evry" in done.stderr
    assert "every" in done.stderr
