"""Data sets of mt in a script, with the losses of `mt train`; `mt launch` starts scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.accelerate import programs
from tests.accelerate.programs import STEPS, build

from mt_accelerate import Accelerator, MegatronLMPlugin
from mt_accelerate.operations import on_tensors
from mt_accelerate.utils import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from mt_cli import main


@pytest.mark.slow
def test_data_sets_of_mt_come_as_three_iterators(tmp_path: Path) -> None:
    data = MegatronLMDummyDataLoader(dataset_type="mock", seq_length=16, micro_batch_size=2)
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=2, eval_iters=1), cpu=True)
    model = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=10)
    model, _, _, train, valid, _ = accelerator.prepare(model, optimizer, scheduler, data, data, data)
    found = [model(**next(train)).loss.item() for _ in range(STEPS)]
    assert model.consumed_samples == 4 * STEPS
    model.eval()
    first, again = (model(**next(valid)).loss.item() for _ in range(2))
    assert first == again
    build("gpt2").save_pretrained(tmp_path)
    assert found == programs.trainer_losses(model.config, str(tmp_path))


SCRIPT = """
import sys
from tests.accelerate import programs
found = programs.train("gpt2", {}, 2, sys.argv[sys.argv.index("--folder") + 1])
on_files = programs.train_on_files(sys.argv[sys.argv.index("--data") + 1], {}, 2)
if found["main"]:
    print("losses", *found["losses"])
    print("on files", *on_files)
"""
YAML = """
distributed_type: MEGATRON_LM
num_processes: 2
mixed_precision: 'no'
use_cpu: true
megatron_lm_config: {megatron_lm_use_distributed_optimizer: true, megatron_lm_gradient_clipping: 1.0}
"""


def token_files(folder: Path) -> str:
    """The prefix of what `mt data preprocess` writes."""
    lines = [json.dumps({"text": f"the cat {number} sat on mat {number * number}"}) for number in range(200)]
    (folder / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = ["--input", str(folder / "texts.jsonl"), "--output-prefix", str(folder / "texts"), "--append-eod"]
    assert main.run(["data", "preprocess", *words, "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]) == 0
    return str(folder / "texts_text_document")


def losses_after(name: str, output: str) -> list[float]:
    (line,) = [line for line in output.splitlines() if line.startswith(name)]
    return [float(word) for word in line.removeprefix(name).split()]


@pytest.mark.slow
def test_a_process_on_token_files_ends_without_complaints(tmp_path: Path) -> None:
    script = "import sys; from tests.accelerate import programs; print(programs.train_on_files(sys.argv[1], {}, 1))"
    prefix = token_files(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script, prefix], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    losses = json.loads(done.stdout)
    assert losses[2] < losses[0]


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("separator", [[], pytest.param(["--"], marks=pytest.mark.exhaustive)])
def test_mt_launch_runs_a_script_with_the_files_layout(
    tmp_path: Path, monkeypatch, capfd, separator: list[str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "megatron.yaml").write_text(YAML)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = ["launch", "--config_file", str(tmp_path / "megatron.yaml"), str(tmp_path / "script.py")]
    prefix = token_files(tmp_path)
    capfd.readouterr()
    code = main.run([*command, *separator, "--folder", str(tmp_path / "state"), "--data", prefix])
    written = capfd.readouterr()
    assert code == 0, written.err
    # Iterators that still read ahead, and threads that outlive the interpreter.
    assert "Exception ignored" not in written.err
    alone = programs.train("gpt2", {}, 1, str(tmp_path / "alone"))
    assert losses_after("losses", written.out) == pytest.approx(alone["losses"], rel=1e-4)
    assert losses_after("on files", written.out) == pytest.approx(programs.train_on_files(prefix, {}, 1), rel=1e-4)
    assert (tmp_path / "state" / "checkpoints" / "latest").is_file()


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[torch.Tensor]


def test_a_named_tuple_of_tensors_stays_one() -> None:
    """What gather, reduce and pad_across_processes take."""
    one = torch.ones(1)
    assert on_tensors(torch.neg, Pair(one, [one])) == Pair(-one, [-one])
