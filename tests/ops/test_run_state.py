"""One function says what state a run is in, and every command uses it. 3 s."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.ops.test_ctl import tiny

from mt_core.run_events import read_events
from mt_core.run_state import run_state
from mt_core.train import Callback, Trainer
from mt_ops.reading.opening import open_run
from mt_ops.report.page import report
from mt_ops.watch.watched_run import summary

NOW, GONE = 1000.0, 2**22 + 1
"""No process has the second number: it is above the largest of Linux."""


def entry(kind: str, ago: float, **fields: Any) -> dict[str, Any]:
    return {"time": NOW - ago, "iteration": 4, "kind": kind, **fields}


def start(ago: float, pid: int = GONE, host: str = "") -> dict[str, Any]:
    return entry("start", ago, host=host or socket.gethostname(), pid=pid)


def sign(ago: float, phase: str = "step", pid: int = GONE, host: str = "") -> dict[str, Any]:
    here = host or socket.gethostname()
    return {"time": NOW - ago, "iteration": 6, "phase": phase, "host": here, "pid": pid}


@pytest.mark.parametrize(
    ("events", "status", "text"),
    [
        ([], [], ""),
        ([start(900), entry("end", 10, reason=None)], [sign(10, "ended")], "finished"),
        ([start(900), entry("end", 10, reason="signal SIGTERM")], [], "stopped by signal SIGTERM"),
        ([start(900), entry("failed", 10, text="OSError: no space")], [sign(9, "ended")], "failed: OSError: no space"),
        # A run of an older version that ended by an error.
        ([start(900)], [sign(2, "ended")], "ended by an error"),
        ([start(900)], [sign(10)], "its process is gone, the last sign was 10.0 s ago"),
        ([start(900)], [sign(10, host="elsewhere")], "its process is gone, the last sign was 10.0 s ago"),
        ([start(900, host="elsewhere")], [sign(10, host="elsewhere")], "training"),
        ([start(900, host="elsewhere")], [sign(70, host="elsewhere")], "silent for 0:01:10"),
        # In a container whose processes have other numbers.
        ([start(900)], [sign(1)], "training"),
        ([start(900, os.getpid())], [sign(10, pid=os.getpid())], "training"),
        # What an earlier process left.
        (
            [start(900), entry("end", 500, reason=None), start(100, os.getpid())],
            [sign(500, "ended")],
            "silent for 0:01:40",
        ),
    ],
)
def test_state(events: list[Mapping[str, Any]], status: list[Mapping[str, Any]], text: str) -> None:
    assert run_state(events, status, NOW).text(NOW) == text


def hung(rank: int, ago: float, **fields: Any) -> dict[str, Any]:
    """A rank that has been in one step for 570 s and gives signs."""
    place = {"rank": rank, "part": "other", "since": NOW - 570}
    return {**sign(ago, pid=os.getpid()), **place, **fields}


PLACES = "no step for 0:09:30 (rank 0, rank 1 in step/other)"


@pytest.mark.parametrize(
    ("status", "step_seconds", "text"),
    [
        ([hung(0, 1), hung(1, 1)], 0.2, PLACES),
        ([hung(0, 1), hung(1, 1)], None, PLACES),
        # The usual step takes a minute and more; a phase that a rank has just entered; a step of 20 s.
        ([hung(0, 1), hung(1, 1)], 60.0, "training"),
        ([hung(0, 1), hung(1, 1, since=NOW - 3)], 0.2, "training"),
        ([hung(0, 1, since=NOW - 20)], 0.2, "training"),
        (
            [hung(0, 1), hung(1, 1, phase="data", part="data_wait")],
            0.2,
            "no step for 0:09:30 (rank 0 in step/other; rank 1 in data/data_wait)",
        ),
        ([hung(rank, 1) for rank in range(8)], 0.2, "no step for 0:09:30 (8 ranks in step/other)"),
        # Killed after it had hung.
        (
            [hung(0, 10, pid=GONE), hung(1, 10)],
            0.2,
            "its process is gone, the last sign was 10.0 s ago; before it " + PLACES.replace("9:30", "9:20"),
        ),
    ],
)
def test_a_run_without_a_new_step_is_stalled(
    status: list[Mapping[str, Any]], step_seconds: float | None, text: str
) -> None:
    events = [start(900, os.getpid()), entry("save", 600)]
    assert run_state(events, status, NOW, NOW - 580, step_seconds).text(NOW) == text


class Fails(Callback):
    def on_step_end(self, run: Any, metrics: Mapping[str, Any]) -> None:
        if metrics["iteration"] == 3:
            raise OSError("the disk is gone")


def test_a_run_that_fails_says_so_everywhere(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        Trainer(tiny(), run_dir=tmp_path / "run", callbacks=[Fails()]).train()
    last = read_events(tmp_path / "run")[-1]
    assert (last["kind"], last["iteration"], last["text"]) == ("failed", 3, "OSError: the disk is gone")
    run = open_run(tmp_path / "run")
    assert next(iter(summary(run))).startswith("run: failed: OSError: the disk is gone, step 3 of 8")
    assert "<td>failed: OSError: the disk is gone</td>" in report([run])


@pytest.mark.slow
def test_a_closed_output_is_the_same_in_report_and_watch(tmp_path: Path) -> None:
    """`mt train | head -9`: rich ends the program by SystemExit."""
    keys = ["model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "logging.log_interval=1"]
    keys += ["train.train_iters=4000", "train.eval_interval=null", "train.sample_prompt=null", "data.seq_length=16"]
    program = "import sys; from mt_cli.main import main; sys.exit(main())"
    words = [word for key in keys for word in ("--set", key)]
    command = ["train", "--preset", "gpt-tiny", "--run-dir", str(tmp_path / "run"), *words]
    running = subprocess.Popen(
        [sys.executable, "-c", program, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert running.stdout is not None
    for line in running.stdout:
        if " step 3/" in line or line.startswith("step 3") or "step 3" in line:
            break
    running.stdout.close()
    running.wait(timeout=60)
    text = "failed: BrokenPipeError: what read the standard output has closed it"
    run = open_run(tmp_path / "run")
    assert text in next(iter(summary(run)))
    assert f"<td>{text}</td>" in report([run])
    assert json.loads((tmp_path / "run/status/rank-0.json").read_text())["phase"] == "ended"
