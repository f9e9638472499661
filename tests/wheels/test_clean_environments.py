"""Each subset of the distributions works by itself, and says what it misses."""

from __future__ import annotations

import csv
import json
import zipfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.wheels, pytest.mark.long]
Install = Callable[..., Any]


@pytest.fixture(scope="module")
def cli_alone(install: Install) -> Any:
    return install("mt-core", "mt-cli")


@pytest.fixture(scope="module")
def cli_and_data(install: Install) -> Any:
    return install("mt-core", "mt-cli", "mt-data")


@pytest.fixture(scope="module")
def with_example(install: Install) -> Any:
    return install("mt-core[train]", "mt-cli", "mt-data", "mt-ckpt", "mt-infer", "mt-plugin-example")


def test_wheels_are_pure_python_and_typed(wheels: dict[str, Path]) -> None:
    assert len(wheels) == len(list((Path(__file__).parents[2] / "packages").glob("mt-*"))) + 1
    for name, wheel in wheels.items():
        assert wheel.name.endswith("-py3-none-any.whl")
        names = zipfile.ZipFile(wheel).namelist()
        module = name.replace("-", "_")
        assert f"{module}/plugin.py" in names
        assert f"{module}/py.typed" in names
        assert not [entry for entry in names if entry.startswith("tests")]


def test_cli_alone_lists_plugins(cli_alone) -> None:
    assert not cli_alone.has("torch")
    assert not cli_alone.has("numpy")
    found = json.loads(cli_alone("mt", "plugins", "--json").stdout)
    assert [(p["name"], p["loaded"], p["problems"]) for p in found["plugins"]] == [
        ("cli", True, []),
        ("core", True, []),
    ]
    assert cli_alone("mt", "plugins").returncode == 0
    shown = cli_alone("mt", "--help")
    assert shown.returncode == 0
    assert "Train a model" in shown.stdout


def test_cli_alone_says_what_training_needs(cli_alone) -> None:
    done = cli_alone("mt", "train")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr == (
        "error: mt train needs torch, mt-models, mt-data and mt-ckpt; "
        'pip install "mt-core[train]" mt-models mt-data mt-ckpt\n'
    )


def test_cli_alone_says_where_other_commands_are(cli_alone) -> None:
    for command, home in (("data", "mt-data"), ("generate", "mt-infer"), ("import", "mt-import")):
        done = cli_alone("mt", command, "x")
        assert done.returncode == 3
        assert f"mt {command} is a command of {home}, which is not installed (pip install {home})" in done.stderr


def test_cli_alone_explains_the_configuration(cli_alone) -> None:
    done = cli_alone("mt", "config", "explain", "optimizer.adam_beta1")
    assert done.returncode == 0, done.stderr
    assert "0.9" in done.stdout
    assert "pip install mt-models" in cli_alone("mt", "models").stdout
    done = cli_alone("mt", "doctor")
    assert done.returncode == 0, done.stderr
    assert 'missing (pip install "mt-core[train]")' in done.stdout


def test_data_is_prepared_without_torch(cli_and_data, tmp_path: Path) -> None:
    assert not cli_and_data.has("torch")
    shown = cli_and_data("mt", "data", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "preprocess" in shown.stdout
    texts = ["héllo", "two"]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--input", "c.jsonl", "--output-prefix", "c", "--tokenizer-type", "ByteLevelTokenizer", "--append-eod"]
    done = cli_and_data("mt", "data", "preprocess", *options, "--workers", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    end_of_document = 256
    ids = [number for text in texts for number in (*text.encode(), end_of_document)]
    assert list(array("H", (tmp_path / "c_text_document.bin").read_bytes())) == ids


def test_the_example_plugin_trains(with_example, tmp_path: Path) -> None:
    assert not with_example.has("mt_models")
    found = json.loads(with_example("mt", "plugins", "--json").stdout)
    owners = {(entry["kind"], entry["name"]): entry["distribution"] for entry in found["registrations"]}
    assert owners["models", "conv"] == owners["callbacks", "loss_csv"] == "mt-plugin-example"
    assert [plugin["problems"] for plugin in found["plugins"] if plugin["problems"]] == []

    few = ["train.train_iters=6", "data.corpus_bytes=2000000", "data.seq_length=32", "train.sample_tokens=5"]
    few += ["train.eval_iters=1", 'train.callbacks=["loss_csv"]', "logging.progress=plain", "train.num_threads=1"]
    overrides = [part for override in few for part in ("--set", override)]
    done = with_example("mt", "train", "--preset", "conv-tiny", *overrides, "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "run" / "losses.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["iteration"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    losses = [float(row["loss"]) for row in rows]
    assert losses[-1] < losses[0]

    text = with_example("mt", "generate", "run", "--prompt", "def ", "--max-tokens", 8, "--seed", 1, cwd=tmp_path)
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("def ")

    refused = with_example("mt", "train", "--preset", "conv-tiny", "--set", "model.kernel_size=999", cwd=tmp_path)
    assert refused.returncode == 2
    assert "model.kernel_size=999 is longer than data.seq_length=128; it can be 1 to 128" in refused.stderr
