"""Trackers and the lines of the log: what other programs read of a run."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mt_core.config import load_config
from mt_core.config.schema import Config
from mt_core.errors import MtError, PluginError
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train import Callback, Trainer
from mt_core.train.checkpoint.run_directory import RunDirectory
from mt_core.train.reporting.log_files import build_log_file
from mt_core.train.reporting.step_metrics import peak_of_name
from mt_core.train.reporting.warning_log import LoggedWarnings
from mt_core.train.tracker import IDS_FILE, _read_ids

MEGATRON_LINE = re.compile(  # of programs that read Megatron-LM's logs
    r"^ \[[\d-]+ [\d:.]+\] iteration +(?P<iteration>\d+)/ +(?P<last>\d+) \| consumed samples: +(?P<samples>\d+)"
    r" \| elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \| throughput per GPU \(TFLOP/s/GPU\): [\d.]+"
    r" \| learning rate: (?P<lr>\d\.\d{6}E[+-]\d\d) \| global batch size: +(?P<batch>\d+)"
    r" \| lm loss: (?P<loss>\d\.\d{6}E[+-]\d\d) \| loss scale: 1\.0 \| grad norm: (?P<norm>\d+\.\d{3})"
    r" \| number of skipped iterations: +0 \| number of nan iterations: +0 \|$"
)


def jsonl(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def series(folder: Path, tag: str) -> dict[int, float]:
    """Step -> value, as TensorBoard reads it."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {point.step: point.value for point in events.Scalars(tag)}


@pytest.mark.parametrize("content", [b"", b"[1]", b"3", b"\xff", b'{"wandb": "id"}'])
def test_a_file_of_ids_that_cannot_be_used_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / IDS_FILE).write_bytes(content)
    assert _read_ids(tmp_path) == ({"wandb": "id"} if b"wandb" in content else {})


def test_a_log_without_a_place_keeps_no_lines(tiny, tmp_path: Path) -> None:
    """What is said before training starts waits for the run directory."""
    run: Any = SimpleNamespace(directory=None)
    log = build_log_file(tiny().config)
    log.on_train_start(run)
    log.on_message(run, "kept")
    run.directory = RunDirectory(tmp_path)
    log.on_train_start(run)
    log.on_message(run, "written")
    log.close()
    assert (tmp_path / "log.txt").read_text().endswith(" written\n")
    assert "kept" not in (tmp_path / "log.txt").read_text()


def test_the_terminal_has_warnings_that_a_run_keeps(monkeypatch, capsys) -> None:
    """Without a handler of a program, which shows them itself: once, although two runs keep them."""
    kept: list[str] = []
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with LoggedWarnings(kept.append), LoggedWarnings(kept.append):
        logging.getLogger("mt_data.any").warning("%d lines left out", 2)
        logging.getLogger("mt_data.any").info("not shown")
    logging.getLogger("mt_data.any").warning("behind the run")
    assert kept == ["2 lines left out"] * 2
    assert capsys.readouterr().err == "2 lines left out\nbehind the run\n"
    shown = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [shown])
    with LoggedWarnings(kept.append):
        logging.getLogger("mt_data.any").warning("shown by the program")
    assert (kept[-1], capsys.readouterr().err) == ("shown by the program", "")
    assert logging.getLogger().handlers == [shown]


def test_tensorboard_has_megatrons_names_over_steps_and_samples(tiny, tmp_path: Path) -> None:
    options = ('logging.trackers=["tensorboard"]', "logging.device_peak_tflops=2.0", "train.eval_interval=3")
    Trainer(tiny(*options), run_dir=tmp_path).train()
    train, valid = jsonl(tmp_path, "train"), jsonl(tmp_path, "valid")
    folder = tmp_path / "tensorboard"
    for ours, tag in (
        ("loss", "lm loss"),
        ("learning_rate", "learning-rate"),
        ("grad_norm", "grad-norm"),
        ("global_batch_size", "batch-size"),
        ("loss_scale", "loss-scale"),
        ("iteration_time", "iteration-time"),
        ("tflops", "throughput"),
        ("mfu", "mfu"),
    ):
        assert series(folder, tag) == pytest.approx({line["iteration"]: line[ours] for line in train}), tag
    by_samples = series(folder, "lm loss vs samples")
    assert by_samples == pytest.approx({line["consumed_samples"]: line["loss"] for line in train})
    losses = {line["iteration"]: line["valid_loss"] for line in valid}
    assert sorted(losses) == [3, 6]
    assert series(folder, "lm loss validation") == pytest.approx(losses)
    perplexities = {4 * step: math.exp(loss) for step, loss in losses.items()}
    assert series(folder, "lm loss validation ppl vs samples") == pytest.approx(perplexities)


def test_throughput_is_flops_over_time(tiny, tmp_path: Path) -> None:
    """For each token 6 times the weights of products, and the scores of 8.5 keys on average in 2 layers."""
    trainer = Trainer(tiny("logging.device_peak_tflops=0.5"), run_dir=tmp_path)
    trainer.train()
    matrices = sum(p.numel() for name, p in trainer.model.named_parameters() if "layers" in name and p.dim() == 2)
    token = 6 * (matrices + 32 * trainer.config.model.vocab_size) + 3 * 2 * 4 * 32 * 8.5
    for line in jsonl(tmp_path, "train"):
        assert line["tflops"] == pytest.approx(token * 16 * 4 / line["iteration_time"] / 1e12, rel=1e-6)
        assert line["mfu"] == pytest.approx(line["tflops"] / 0.5)


def test_time_of_evaluations_is_no_time_of_steps(tiny, tmp_path: Path) -> None:
    evaluations = []

    def slow_evaluation(*_: object) -> float:
        began = time.perf_counter()
        time.sleep(0.3)
        evaluations.append(time.perf_counter() - began)
        return 1.0

    trainer = Trainer(tiny("train.eval_interval=2", "train.train_iters=4"), run_dir=tmp_path)
    trainer.engine.evaluate = slow_evaluation  # type: ignore[method-assign]
    began = time.perf_counter()
    trainer.train()
    steps = [line["iteration_time"] for line in jsonl(tmp_path, "train")]
    assert len(steps) == 4
    assert sum(steps) + sum(evaluations) < time.perf_counter() - began


def test_megatrons_log_line(tiny, tmp_path: Path) -> None:
    Trainer(tiny("logging.log_format=megatron", "train.eval_interval=3"), run_dir=tmp_path).train()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    found = [match for line in lines if (match := MEGATRON_LINE.match(line))]
    assert len(found) == 6
    for match, line in zip(found, jsonl(tmp_path, "train"), strict=True):
        read = {key: float(match[key]) for key in ("iteration", "last", "samples", "lr", "batch", "loss")}
        expected = (line["iteration"], 6, line["consumed_samples"], line["learning_rate"], 4, line["loss"])
        assert tuple(read.values()) == pytest.approx(expected, rel=1e-6)
    loss = jsonl(tmp_path, "valid")[0]["valid_loss"]
    line = f" validation loss at iteration 3 | lm loss value: {loss:.6E} | lm loss PPL: {math.exp(loss):.6E} | "
    at = lines.index(line)
    assert lines[at - 1] == lines[at + 1] == "-" * (len(line) + 1)


def test_peaks_are_those_of_the_named_device() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989.4,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA L4": 121.0,
        "NVIDIA GB200": 2500.0,
        "NVIDIA A10G": None,
        "NVIDIA GeForce RTX 4090": None,
    }
    assert {name: peak_of_name(name) for name in names} == names


# -- failures -----------------------------------------------------------------------------------------


class Broken(Callback):
    """Fails at every step; `at_start` also as it starts."""

    at_start = False

    def on_train_start(self, run: Any) -> None:
        if self.at_start:
            raise OSError("no route to host")

    def on_step_end(self, run: Any, metrics: Any) -> None:
        raise OSError("disk full")


class BrokenAtStart(Broken):
    at_start = True


def build_broken(config: Config) -> Broken:
    return Broken()


def build_broken_at_start(config: Config) -> Broken:
    return BrokenAtStart()


def test_a_tracker_that_fails_is_reported_once_and_stops_nothing(tiny, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("mt_ops.trackers.services.build_wandb", build_broken)
    result = Trainer(tiny('logging.trackers=["wandb"]'), run_dir=tmp_path).train()
    assert result.state.iteration == 6
    text = (tmp_path / "log.txt").read_text()
    assert text.count("the tracker wandb failed, and may lack points: OSError: disk full") == 1


def test_a_tracker_that_cannot_start_is_an_error(tiny, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("mt_ops.trackers.services.build_wandb", build_broken_at_start)
    with pytest.raises(PluginError, match="wandb does not start: no route to host; correct its settings"):
        Trainer(tiny('logging.trackers=["wandb"]'), run_dir=tmp_path).train()


def test_without_the_distribution_of_trackers_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_PLUGINS", "core,models,data")
    host = load_plugins()
    with pytest.raises(PluginError, match=r"logging.trackers=comet needs a callback .*pip install 'mt-ops\[comet\]'"):
        load_config(preset="gpt-tiny", overrides=['logging.trackers=["comet"]'], host=host)


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_missing_package_is_named_before_anything_is_built(tiny, monkeypatch, tracker: str) -> None:
    monkeypatch.setattr("mt_core.train.tracker.find_spec", lambda name: None)
    with pytest.raises(PluginError, match=rf'{tracker} needs the package {tracker}; pip install "mt-ops\[{tracker}\]"'):
        Trainer(tiny(f'logging.trackers=["{tracker}"]'))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (['logging.trackers=["tensorbord"]'], "tensorboard"),
        (["wandb.project=x"], "it only counts when logging.trackers has wandb"),
        (['logging.trackers=["tensorboard"]', "mlflow.experiment=x"], "logging.trackers has mlflow"),
        (["logging.log_format=gnuplot"], "megatron"),
    ],
)
def test_bad_options(tiny, options: list[str], words: str) -> None:
    with pytest.raises(MtError, match=words):
        Trainer(tiny(*options))


def trained_on_two_ranks(rank: int, world: int, run_dir: str, overrides: list[str]) -> list[str]:
    from mt_core.config.loading import load_config

    Trainer(load_config(preset="gpt-tiny", overrides=overrides), run_dir=run_dir).train()
    return sorted(str(path.relative_to(run_dir)) for path in Path(run_dir).rglob("events.out.*"))


@pytest.mark.slow
def test_one_rank_writes(tmp_path: Path) -> None:
    from tests.core.conftest import LITTLE_TEXT, TINY

    overrides = [
        *TINY,
        LITTLE_TEXT,
        'logging.trackers=["tensorboard"]',
        "parallel.pipeline_model_parallel_size=2",
    ]
    files = run_ranks(2, trained_on_two_ranks, str(tmp_path), overrides)
    assert len(files[0]) == 1
    assert sorted(series(tmp_path / "tensorboard", "lm loss")) == [1, 2, 3, 4, 5, 6]
