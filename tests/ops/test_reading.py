"""Readers of runs: logs as their programs write them, files that grow, steps that are repeated."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from mt_core.errors import DataError
from mt_ops.reading.mt_run import MtRunReader
from mt_ops.reading.opening import open_run, open_runs

MEGATRON = """\
------------------------ arguments ------------------------
  global_batch_size ............................... 16
  lr .............................................. 0.0003
 [2026-11-22 11:19:30.123456] iteration        1/       4 | consumed samples:           16 | \
elapsed time per iteration (ms): 581.0 | throughput per GPU (TFLOP/s/GPU): 12.5 | learning rate: 1.500000E-04 | \
global batch size:    16 | lm loss: 4.947000E+00 | loss scale: 1.0 | grad norm: 4.144 | num zeros: 7 | \
params norm: 80.5 | number of skipped iterations:   0 | number of nan iterations:   0 |
 [2026-11-22 11:19:32.123456] iteration        2/       4 | consumed samples:           32 | \
elapsed time per iteration (ms): 500.0 | learning rate: 3.000000E-04 | global batch size:    16 | \
lm loss: 4.500000E+00 | loss scale: 1.0 | grad norm: 3.000 | number of skipped iterations:   0 | \
number of nan iterations:   0 |
------------------------------------------------------------------------------
 validation loss at iteration 2 | lm loss value: 4.400000E+00 | lm loss PPL: 8.145087E+01 |
------------------------------------------------------------------------------
"""
TITAN = (
    "[titan] 2026-03-01 10:00:00,123 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.1276  "
    "\x1b[38;2;180;60;0mgrad_norm:  1.5 \x1b[36mmemory:  0.65GiB(0.82%)  \x1b[34mtps: 1,234  \x1b[36mtflops: 10.50  "
    "\x1b[35mmfu: 3.20%\x1b[39m\n"
    "[titan] 2026-03-01 10:00:05,123 - root - INFO - step: 10  loss:  7.5  grad_norm:  1.1  memory:  0.65GiB(0.82%)  "
    "tps: 2,000  tflops: 11.00  mfu: 4.00%\n"
)


def write_run(folder: Path, steps: range, *, loss: float = 5.0, elapsed: float = 0.5) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for number, step in enumerate(steps, start=1):
            line = {"kind": "train", "iteration": step, "consumed_samples": 4 * step, "loss": loss - 0.1 * step}
            file.write(json.dumps({**line, "parts": {"forward": 0.2}, "elapsed": elapsed * number}) + "\n")


def test_megatron_log(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(MEGATRON)
    run = open_run(tmp_path / "log.txt")
    assert run.source == "Megatron-LM"
    assert run.series["loss"].values.tolist() == [4.947, 4.5]
    assert run.series["iteration_time"].values.tolist() == [0.581, 0.5]
    assert run.series["params_norm"].steps.tolist() == [1]
    assert run.series["tflops"].last == 12.5
    assert run.series["valid_loss"].smallest == (2, 4.4)
    assert run.axes["samples"].values.tolist() == [16, 32]
    assert run.axes["time"].values.tolist() == [0.0, 2.0]
    assert run.config == {"arguments.global_batch_size": "16", "arguments.lr": "0.0003"}


def test_torchtitan_log(tmp_path: Path) -> None:
    (tmp_path / "titan.log").write_text(TITAN)
    run = open_run(tmp_path / "titan.log")
    assert run.source == "torchtitan"
    assert run.series["loss"].values.tolist() == [8.1276, 7.5]
    assert run.series["tokens_per_second"].values.tolist() == [1234.0, 2000.0]
    assert run.series["mfu"].values.tolist() == pytest.approx([0.032, 0.04])
    assert run.series["memory_gib"].last == 0.65


def test_newest_trainer_state_of_a_folder(tmp_path: Path) -> None:
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        history = [{"step": step, "loss": 1.0 / step, "learning_rate": 0.1}, {"step": step, "eval_loss": 2.0}]
        (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text(json.dumps({"log_history": history}))
    run = open_run(tmp_path)
    assert (run.source, run.series["loss"].steps.tolist(), run.series["valid_loss"].last) == ("transformers", [10], 2.0)


@pytest.mark.slow  # the import of tensorboard
def test_event_files_as_tensorboard_writes_them(tmp_path: Path) -> None:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    for step, loss in ((1, 5.0), (2, 4.0), (3, 9.0), (2, 3.5), (3, 3.0)):
        writer.add_scalar("lm loss", loss, step)
        writer.add_scalar("lm loss vs samples", loss, 16 * step)
    writer.add_scalar("other/thing", 0.25, 3, new_style=True)
    writer.close()
    run = open_run(tmp_path)
    # Steps 2 and 3 were taken twice: the later values count.
    assert (run.series["loss"].steps.tolist(), run.series["loss"].values.tolist()) == ([1, 2, 3], [5.0, 3.5, 3.0])
    assert run.series["other/thing"].last == 0.25
    assert set(run.series) == {"loss", "other/thing"}


def write_event_file(folder: Path, *scalars: tuple[str, int, float]) -> None:
    """Records as TensorBoard has them, with checksums of 0: (tag, step, value)."""
    folder.mkdir(parents=True, exist_ok=True)
    records = b""
    for tag, step, value in scalars:
        of_value = b"\x0a" + bytes([len(tag)]) + tag.encode() + b"\x15" + struct.pack("<f", value)
        summary = b"\x0a" + bytes([len(of_value)]) + of_value
        record = b"\x09" + struct.pack("<d", 1000.0 + step) + b"\x10" + bytes([step])
        record += b"\x2a" + bytes([len(summary)]) + summary
        records += struct.pack("<QI", len(record), 0) + record + bytes(4)
    (folder / "events.out.tfevents.1.host").write_bytes(records)


@pytest.mark.parametrize(
    ("tags", "names"),
    [
        # transformers, Lightning, torchtitan, Megatron-LM.
        (["train/loss", "eval/loss", "eval/accuracy"], ["loss", "valid_loss", "valid_accuracy"]),
        (["loss/train", "loss/val", "val_accuracy"], ["loss", "valid_loss", "valid_accuracy"]),
        (
            ["loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "validation_metrics/loss"],
            ["loss", "loss_metrics/global_max_loss", "valid_loss"],
        ),
        (["lm loss", "lm loss validation", "learning-rate"], ["loss", "valid_loss", "learning_rate"]),
        # Several tags of one name.
        (["loss", "eval/loss", "test/loss"], ["loss", "eval/loss", "test/loss"]),
        (["a/loss", "b/loss"], ["a/loss", "b/loss"]),
    ],
)
def test_no_tag_of_an_event_file_takes_the_place_of_another(tmp_path: Path, tags: list[str], names: list[str]) -> None:
    write_event_file(tmp_path, *((tag, 3, float(place)) for place, tag in enumerate(tags)))
    series = open_run(tmp_path).series
    assert {name: values.last for name, values in series.items()} == {
        name: float(place) for place, name in enumerate(names)
    }


def test_a_folder_of_several_runs_is_refused_with_their_names(tmp_path: Path) -> None:
    write_event_file(tmp_path / "first", ("loss", 1, 5.0))
    write_event_file(tmp_path / "hyperparameters")
    assert open_run(tmp_path).series["loss"].last == 5.0
    write_event_file(tmp_path / "second/tb", ("loss", 1, 6.0))
    with pytest.raises(DataError, match="event files of several runs, first, second/tb; give the folder of one run"):
        open_run(tmp_path)
    assert open_run(tmp_path / "second").series["loss"].last == 6.0


def test_time_goes_on_over_a_resume(tmp_path: Path) -> None:
    write_run(tmp_path / "run", range(1, 5))
    write_run(tmp_path / "run", range(3, 7))
    run = open_run(tmp_path / "run")
    assert run.series["loss"].steps.tolist() == [1, 2, 3, 4, 5, 6]
    # Steps 3 and 4 of the first process are not there, those of the second begin again at 0.5 seconds.
    assert run.axes["time"].values.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]


def test_a_growing_run_is_read_again_where_its_metrics_were_cut(tmp_path: Path) -> None:
    write_run(tmp_path / "run", range(1, 4))
    reader = MtRunReader(tmp_path / "run")
    assert reader.read().last_step == 3
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "iteration": 4, "lo')
    assert reader.read().last_step == 3
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('ss": NaN}\n{"kind": "valid", "iteration": 4, "valid_loss": 2.0}\n')
    run = reader.read()
    assert np.isnan(run.series["loss"].values[-1])
    assert run.series["valid_loss"].last == 2.0
    (tmp_path / "run/metrics.jsonl").write_text('{"kind": "train", "iteration": 1, "loss": 9.0}\n')
    assert reader.read().series["loss"].values.tolist() == [9.0]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_run(tmp_path / "no")
    (tmp_path / "notes.txt").write_text("nothing\n")
    with pytest.raises(DataError, match="no line of a step"):
        open_run(tmp_path / "notes.txt")
    with pytest.raises(DataError, match="no run that can be read"):
        open_run(tmp_path)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_run(tmp_path / folder / "run", range(1, 3))
    assert [run.name for run in open_runs([tmp_path / "a/run", tmp_path / "b/run"])] == ["a/run", "b/run"]
