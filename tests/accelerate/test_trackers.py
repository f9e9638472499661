"""What a program logs is in its trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mt_accelerate import Accelerator
from mt_accelerate.logging import get_logger
from mt_accelerate.tracking import GeneralTracker
from mt_accelerate.utils import LoggerType, ProjectConfiguration


class Notes(GeneralTracker):
    """A program's own tracker."""

    name = "notes"
    main_process_only = False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @property
    def tracker(self) -> Any:
        return self.calls

    def start(self) -> None:
        self.calls.append(("start",))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.calls.append(("log", values, step, options))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_values_are_in_event_files_and_in_the_programs_own_tracker(tmp_path: Path) -> None:
    notes = Notes()
    project = ProjectConfiguration(project_dir=str(tmp_path), logging_dir=str(tmp_path / "logs"))
    accelerator = Accelerator(log_with=[LoggerType.TENSORBOARD, notes, "tensorboard"], project_config=project, cpu=True)
    accelerator.init_trackers("first", config={"lr": 0.1}, init_kwargs={"tensorboard": {"max_queue": 5}})
    accelerator.log({"loss": torch.tensor(2.5), "valid": {"loss": 2}}, step=3, log_kwargs={"notes": {"tag": "a"}})
    with pytest.warns(UserWarning, match="trackers take numbers"):
        accelerator.log({"loss": 1.5, "note": "text"}, step=4)
    accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("own", 7.0, 5)
    assert accelerator.get_tracker("notes") is notes
    accelerator.end_training()

    events = EventAccumulator(str(tmp_path / "logs" / "first"))
    events.Reload()
    found = {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in ("loss", "valid/loss", "own")}
    assert found == {"loss": {3: 2.5, 4: 1.5}, "valid/loss": {3: 2.0}, "own": {5: 7.0}}
    assert notes.calls == [
        ("start",),
        ("config", {"lr": 0.1}),
        ("log", {"loss": torch.tensor(2.5), "valid": {"loss": 2}}, 3, {"tag": "a"}),
        ("log", {"loss": 1.5, "note": "text"}, 4, {}),
        ("finish",),
    ]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"project": "first", "config": {"lr": 0.1}},
        {"step": 3, "loss": 2.5, "valid": {"loss": 2}},
        {"step": 4, "loss": 1.5, "note": "text"},
    ]


def test_all_are_those_whose_packages_are_installed(tmp_path: Path) -> None:
    assert LoggerType.TENSORBOARD in Accelerator(log_with="all", project_dir=str(tmp_path), cpu=True).log_with
    assert LoggerType.TENSORBOARD not in Accelerator(log_with="all", cpu=True).log_with


@pytest.mark.parametrize(("rank", "seen"), [(0, ["of all"]), (1, ["of one", "of all"])])
def test_the_last_rank_logs_for_all(monkeypatch, caplog, rank: int, seen: list[str]) -> None:
    places = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    logger = get_logger("program", log_level="info")
    logger.info("of one", in_order=True)
    logger.info("of all", main_process_only=False)
    logger.debug("below the level", main_process_only=False)
    assert caplog.messages == seen
