"""events.jsonl and the account of time: by hand, of a run that was cut, and over ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from mt_core.config import load_config
from mt_core.config.loading import LoadedConfig
from mt_core.parallel.context import Axis, waiting
from mt_core.run_events import TimeAccount, account, read_events
from mt_core.testing import run_ranks
from mt_core.train import Trainer
from mt_core.train.reporting.event_log import status_interval
from mt_core.train.reporting.run_summary import time_lines
from mt_core.train.time_parts import TimeParts


def tiny(*overrides: str) -> LoadedConfig:
    small = ("num_layers=1", "hidden_size=16", "num_attention_heads=2", "max_position_embeddings=16")
    common = (
        "data.seq_length=16",
        "data.corpus_bytes=200000",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "logging.log_interval=2",
    )
    keys = [f"model.{key}" for key in small] + list(common) + ["train.sample_prompt=null", "train.eval_iters=1"]
    return load_config(preset="gpt-tiny", overrides=[*keys, "train.train_iters=6", *overrides])


def test_parts_add_up_to_the_time_that_passed() -> None:
    began, axis = time.perf_counter(), Axis(2)
    parts = TimeParts(axes=[axis])
    with parts("forward"):
        time.sleep(0.02)
        with waiting(axis):
            time.sleep(0.2)
        with parts("save"):
            time.sleep(0.1)
    parts.enter("other")
    passed = time.perf_counter() - began
    totals = parts.totals()
    assert sum(totals.values()) == pytest.approx(passed, abs=5e-3)
    # A busy machine wakes a process later.
    assert 0.02 <= totals["forward"] < 0.1, "without the collective and the save within it"
    assert totals["communication"] >= 0.2
    assert totals["save"] >= 0.1


class FakeEvent:
    """An event of a device that is done with everything; a second passes between two."""

    recorded: ClassVar[list[FakeEvent]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        assert not torch.cuda.is_current_stream_capturing(), "it would become part of the graph"
        self.recorded.append(self)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1e3 * (self.recorded.index(other) - self.recorded.index(self))


def test_a_captured_step_is_one_part_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [False]
    monkeypatch.setattr(FakeEvent, "recorded", [])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    parts = TimeParts(device=torch.device("cuda"))
    with parts("graph"):
        capturing[0] = True
        with parts("forward"), parts("backward"):
            time.sleep(0.01)
        capturing[0] = False
    with parts("optimizer"):
        time.sleep(0.01)
    totals = parts.totals()
    assert "forward" not in totals
    assert totals["graph"] == pytest.approx(totals["optimizer"]), "a second of the device each"


def start(at: float, iteration: int) -> dict[str, Any]:
    return {"time": at + 10, "began": at, "kind": "start", "iteration": iteration}


def parts_at(at: float, iteration: int, *ranks: dict[str, float]) -> dict[str, Any]:
    return {"time": at, "kind": "parts", "iteration": iteration, "ranks": list(ranks)}


def test_the_account_of_a_run_that_died_by_hand() -> None:
    """The first process took 20 steps in 40 s and died 5 s later without a save after step 15; the second began 30 s
    later at step 15 and finished."""
    events = [
        start(100.0, 0),
        {"time": 140.0, "kind": "save", "iteration": 15, "seconds": 2.0},
        parts_at(150.0, 20, {"start": 8.0, "load": 2.0, "forward": 10.0, "backward": 30.0}),
        {"time": 155.0, "kind": "warning", "iteration": 20, "text": "bad"},
        start(185.0, 15),
        parts_at(
            205.0,
            20,
            {"start": 10.0, "forward": 4.0, "backward": 6.0},
            {"start": 10.0, "forward": 8.0, "backward": 2.0},
        ),
        {"time": 205.0, "kind": "end", "iteration": 20, "reason": None},
    ]
    whole = account(events)
    assert whole is not None
    assert whole.total == 105.0
    # 5 of 20 steps were taken again: a quarter of 40 s, and the 5 s after the last account.
    assert dict(whole.parts) == {
        "start": 18.0,
        "load": 2.0,
        "forward": 7.5 + 6.0,
        "backward": 22.5 + 4.0,
        "repeated": 15.0,
        "idle": 30.0,
    }
    assert sum(whole.parts.values()) == whole.total
    assert whole.effective == pytest.approx(40.0 / 105.0)
    # Young and Daly: a save of 2 s and a failure a day.
    assert whole.save_interval(1.0) == pytest.approx((2 * 2.0 * 86400.0) ** 0.5 - 2.0)
    assert whole.failure_cost(100.0) == pytest.approx(50.0 + 20.0 / 2)


def test_a_process_that_hung_until_it_was_killed_by_hand() -> None:
    """Its last event is of second 150; it is in its step since second 152 and gave its last sign at 352."""
    sign = {"time": 352.0, "since": 152.0, "phase": "step", "iteration": 20}
    events = [start(100.0, 0), parts_at(150.0, 20, {"start": 10.0, "forward": 40.0})]
    whole = account(events, [sign])
    assert whole is not None
    assert (whole.total, dict(whole.parts)) == (252.0, {"start": 10.0, "forward": 40.0, "hang": 200.0, "lost": 2.0})
    # A later process knows it from the start of its own, where the status of ranks is that of the later one.
    after = [*events, {**start(400.0, 20), "before": sign}, {"time": 410.0, "kind": "end", "iteration": 20}]
    whole = account(after, [{**sign, "phase": "ended"}])
    assert whole is not None
    assert whole.parts["hang"] == 200.0
    assert whole.parts["idle"] == 48.0
    # A process that is killed in the middle of a step has not hung.
    whole = account(events, [{**sign, "time": 155.0}])
    assert whole is not None
    assert "hang" not in whole.parts


def test_nothing_to_account_for() -> None:
    assert account([]) is None


def test_events_of_a_run_that_was_stopped_and_continued(tmp_path: Path) -> None:
    Trainer(tiny("train.exit_iteration=3"), run_dir=tmp_path).train()
    Trainer(tiny(), run_dir=tmp_path).train()
    (tmp_path / "events.jsonl").open("a").write('{"cut')
    events = read_events(tmp_path)
    assert [(entry["kind"], entry["iteration"]) for entry in events if entry["kind"] in ("start", "save", "end")] == [
        ("start", 0),
        ("save", 3),
        ("end", 3),
        ("start", 3),
        ("save", 6),
        ("end", 6),
    ]
    assert events[0]["resumed_from"] is None
    assert [entry["reason"] for entry in events if entry["kind"] == "end"] == ["train.exit_iteration=3", None]
    assert any(entry["text"].startswith("time: ") for entry in events if entry["kind"] == "message")
    whole = account(events)
    assert whole is not None
    assert "repeated" not in whole.parts
    assert sum(whole.parts.values()) == pytest.approx(whole.total, rel=0.02, abs=0.05)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(line["elapsed"] >= 0 and abs(line["time"] - time.time()) < 600 for line in lines)
    assert {"forward", "backward", "optimizer"} <= set(lines[0]["parts"])
    assert json.loads((tmp_path / "environment.json").read_text())["torch"] == torch.__version__
    status = json.loads((tmp_path / "status" / "rank-0.json").read_text())
    assert (status["phase"], status["iteration"]) == ("ended", 6)


def train_with_tensor_parallelism(rank: int, world: int, folder: str) -> None:
    Trainer(tiny("parallel.tensor_model_parallel_size=2"), run_dir=folder).train()


@pytest.mark.dist
@pytest.mark.slow
def test_each_rank_waits_and_shows_its_status(tmp_path: Path) -> None:
    run_ranks(2, train_with_tensor_parallelism, str(tmp_path))
    (last,) = [entry for entry in read_events(tmp_path) if entry["kind"] == "parts"][-1:]
    assert [rank["communication"] > 0 for rank in last["ranks"]] == [True, True]
    assert sorted(path.name for path in (tmp_path / "status").iterdir()) == ["rank-0.json", "rank-1.json"]


def test_data_drawn_from_a_blend_is_counted_over_a_resume(tmp_path: Path) -> None:
    """Weights 3 : 1, two processes of 3 steps of 4 samples: together 9 and 3 samples."""
    from mt_data.datasets.blend import BlendedDataset, build_blend_index

    class Part:
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> dict[str, Any]:
            tokens = np.full(16, index % 7, np.int64)
            return {"tokens": tokens, "labels": tokens, "loss_mask": np.ones(16, np.float32)}

        def describe(self, index: int) -> str:
            return str(index)

    blend = BlendedDataset([Part(), Part()], build_blend_index([3, 1], 24), ["web", "code"], [0.75, 0.25])
    Trainer(tiny("train.exit_iteration=3"), run_dir=tmp_path, train_data=blend).train()
    Trainer(tiny(), run_dir=tmp_path, train_data=blend).train()
    drawn = [entry for entry in read_events(tmp_path) if entry["kind"] == "data"]
    assert [(entry["iteration"], entry["first_sample"]) for entry in drawn] == [(3, 0), (6, 12)]
    assert [[part["samples"] for part in entry["datasets"]] for entry in drawn] == [[9, 3], [9, 3]]
    assert drawn[0]["datasets"][0] == {"name": "web", "weight": 0.75, "samples": 9, "tokens": 144}


def test_many_ranks_write_less_often() -> None:
    assert [status_interval(None, ranks) for ranks in (1, 64, 1024)] == [1.0, 1.0, 16.0]
    assert status_interval(0.5, 1024) == 0.5


def test_an_interval_of_saves_is_advised_to_runs_that_are_longer_than_it() -> None:
    """A short trial would end with a line about failures of nodes."""
    short, long = (TimeAccount({"step": total}, total, saves=(0.5, 0.5)) for total in (20.0, 1e6))
    assert len(list(time_lines(short, 0.0038, 1))) == 1
    assert "lose least" in list(time_lines(long, 0.0038, 1))[-1]
