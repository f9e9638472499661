"""`mt data preview`, `where` and `build-index`, as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mt_core.errors import MtError
from mt_core.plugins import load_plugins
from mt_core.specs import MODELS
from mt_data.commands.run_data import build_index, preview, where

app = typer.Typer()
app.command()(preview)
app.command()(where)
app.command("build-index")(build_index)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A run on a blend of two files of raw text."""
    for name, word in (("one", "alpha"), ("two", "beta")):
        lines = [json.dumps({"text": f"{word} {n} \x1b[31m"}) for n in range(300)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
        preset = "gpt-tiny"
        [data]
        dataset_type = "gpt"
        data_path = [{{prefix = "{tmp_path}/one.jsonl", weight = 3}}, {{prefix = "{tmp_path}/two.jsonl", weight = 1}}]
        split = "90,10"
        seq_length = 32
        eod_mask_loss = true
        [train]
        train_iters = 10
        micro_batch_size = 4
        """
    )
    return str(file)


def test_preview_shows_text_and_what_counts(config: str) -> None:
    output = run("preview", config, "--samples", "3")
    assert output.count("sample ") >= 3
    assert "alpha" in output
    assert "<eod>" in output
    assert "positions" in output
    assert "count in the loss" in output
    assert "\x1b[31m" not in output  # an escape sequence of the corpus must not reach the terminal
    assert "␛[31m" in output


def test_where_names_file_document_and_tokens(config: str) -> None:
    output = run("where", config, "--sample", "0")
    assert "data set 0 of 2" in output
    assert "one.jsonl" in output
    assert "tokens" in output
    with pytest.raises(MtError, match="there is no sample 1000000"):
        run("where", config, "--sample", "1000000")
    with pytest.raises(MtError, match="--split training must be train, valid or test"):
        run("where", config, "--sample", "0", "--split", "training")


def test_build_index_fills_the_cache_that_training_reads(config: str, tmp_path: Path) -> None:
    output = run("build-index", config)
    assert "train: 40 samples" in output
    assert "test: no data" in output
    before = sorted(path.name for path in (tmp_path / "cache" / "mt").iterdir())
    run("where", config, "--sample", "5")
    assert sorted(path.name for path in (tmp_path / "cache" / "mt").iterdir()) == before


def without_preset(config: str) -> str:
    text = Path(config).read_text().replace('preset = "gpt-tiny"', '[model]\nfamily = "gpt"\nnum_layers = 2')
    Path(config).write_text(text)
    return config


def test_no_other_package_is_needed(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With mt-cli and mt-data alone nothing registers a model family; the section is not looked at."""
    monkeypatch.setenv("MT_PLUGINS", "data")
    assert load_plugins()[MODELS].names() == []
    with pytest.raises(MtError, match="no installed plugin brings a preset"):
        run("where", config, "--sample", "0")
    without_preset(config)
    assert "one.jsonl" in run("where", config, "--sample", "0")
    assert "alpha" in run("preview", config)
    assert "train: 40 samples" in run("build-index", config)


def test_a_layout_for_more_processes_needs_the_batch_size(config: str) -> None:
    without_preset(config)
    layout = ["--set", "parallel.tensor_model_parallel_size=8"]
    with pytest.raises(MtError, match=r"more processes than there are here \(1\).* set train.global_batch_size"):
        run("where", config, "--sample", "0", *layout)
    output = run("build-index", config, *layout, "--set", "train.global_batch_size=16")
    assert "train: 160 samples" in output


def test_sections_that_are_read_are_checked(config: str) -> None:
    with pytest.raises(MtError, match=r"data\.seq_lenght"):
        run("where", config, "--sample", "0", "--set", "data.seq_lenght=8")
    with pytest.raises(MtError, match="exactly one of train.train_iters, train.train_samples, train"):
        run("where", config, "--sample", "0", "--set", "train.train_samples=8")
    with pytest.raises(MtError, match="modle"):
        run("where", config, "--sample", "0", "--set", "modle.num_layers=8")


def test_a_configuration_is_needed() -> None:
    with pytest.raises(MtError, match="--preset NAME"):
        run("preview")


MEMORY = """
import resource, sys
import numpy as np
from mt_data.datasets.gpt_index import GPTIndexPlan, build_gpt_index
count, bytes_a_document = 6_000_000, 24
lengths = np.full(count, 1000, np.int32)
plan = GPTIndexPlan(1000 * count, 4096, None, 1)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData:")) << 10
limit = used + count * bytes_a_document + int(sys.argv[1]) * (1 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
index = build_gpt_index(range(count), lengths, plan)
print(len(index.shuffle_index))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's RLIMIT_DATA")
def test_memory_of_building_is_bounded() -> None:
    """24 bytes a document, the arrays themselves included, and 64 MiB for thread, blocks and the last steps."""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}

    def build(megabytes: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", MEMORY, str(megabytes)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    enough = build(64)
    assert enough.returncode == 0, enough.stderr
    assert int(enough.stdout) == (1000 * 6_000_000 - 1) // 4096
    assert build(-100).returncode != 0  # the limit does limit


@pytest.mark.slow
def test_commands_ask_for_as_many_samples_as_the_trainer_and_need_no_torch(config: str) -> None:
    pytest.importorskip("torch")
    code = """
import sys
from pathlib import Path
from mt_data.commands.run_data import load_run_data
data = load_run_data(Path(sys.argv[1]), None, ["train.eval_iters=3"])
ours = {split: {name: len(d) for name, d in data.build(split).items()} for split in ("train", "valid", "test")}
assert "torch" not in sys.modules
from mt_core.data.building import build_datasets
for split in ours:
    theirs = build_datasets(data.config, data.tokenizer, split, data.host)
    assert ours[split] == {name: len(d) for name, d in theirs.items()}, (ours, split)
print(ours)
"""
    result = subprocess.run([sys.executable, "-c", code, config], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "'valid': {'valid': 12}" in result.stdout
