"""`mt ctl`: a run is asked by files in its directory, and does after a step what it is asked for."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mt_core.config import load_config
from mt_core.config.loading import LoadedConfig
from mt_core.errors import ConfigError
from mt_core.run_events import event, read_events
from mt_core.run_requests import CONTROL_FOLDER, RequestFolder, RunRequest, read_answer, withdraw, write_request
from mt_core.testing import run_ranks
from mt_core.train import Callback, Trainer


def tiny(*overrides: str) -> LoadedConfig:
    small = ("num_layers=1", "hidden_size=16", "num_attention_heads=2", "max_position_embeddings=16")
    common = ("data.seq_length=16", "train.global_batch_size=4", "train.micro_batch_size=2", "logging.log_interval=1")
    keys = [f"model.{key}" for key in small] + list(common) + ["train.sample_prompt=null", "train.eval_iters=1"]
    return load_config(preset="gpt-tiny", overrides=[*keys, "train.train_iters=8", *overrides])


class Asks(Callback):
    """Writes requests after given steps, as another process would, and keeps what the run logs."""

    def __init__(self, *requests: tuple[int, str, str]) -> None:
        self.requests, self.asked = requests, dict[str, RunRequest]()
        self.lines: dict[int, Mapping[str, Any]] = {}

    def on_step_end(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.lines[int(metrics["iteration"])] = dict(metrics)
        for step, command, argument in self.requests:
            if step == metrics["iteration"]:
                request = write_request(run.directory.path, command, argument)
                self.asked[f"{command} {argument}".strip()] = request


@pytest.fixture(autouse=True)
def _look_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = RequestFolder.__init__

    def at_once(self: RequestFolder, run_dir: Path) -> None:
        usual(self, run_dir, interval=0.0)

    monkeypatch.setattr(RequestFolder, "__init__", at_once)


def trained(directory: Path, *requests: tuple[int, str, str], overrides: tuple[str, ...] = ()) -> tuple[Asks, Trainer]:
    asks = Asks(*requests)
    trainer = Trainer(tiny(*overrides), run_dir=directory, callbacks=[asks])
    trainer.train()
    return asks, trainer


def answers(directory: Path, asks: Asks) -> dict[str, str]:
    found = {what: read_answer(directory, request) for what, request in asks.asked.items()}
    return {what: "no answer" if answer is None else answer.text for what, answer in found.items()}


def carried_out(directory: Path) -> list[tuple[str, int, bool]]:
    control = [entry for entry in read_events(directory) if entry["kind"] == "control"]
    return [(entry["command"], entry["iteration"], entry["ok"]) for entry in control]


def losses(asks: Asks) -> dict[int, float]:
    return {step: line["loss"] for step, line in asks.lines.items()}


def test_save_evaluate_note_and_stop(tmp_path: Path) -> None:
    requests = (2, "save", ""), (3, "eval", ""), (3, "note", "looks good"), (5, "stop", "enough")
    asks, trainer = trained(tmp_path, *requests)
    found = answers(tmp_path, asks)
    assert found["save"] == f"saved {tmp_path}/checkpoints/iter_0000002"
    assert (tmp_path / "checkpoints" / "iter_0000002").is_dir()
    assert found["eval"].startswith("valid_loss ")
    assert found["note looks good"] == "noted"
    assert found["stop enough"] == "saves and stops after step 5"
    assert trainer.state.iteration == 5
    assert carried_out(tmp_path) == [("save", 2, True), ("eval", 3, True), ("note", 3, True), ("stop", 5, True)]
    assert list((tmp_path / CONTROL_FOLDER).iterdir()) == [], "requests are removed, and answers when they are read"


def test_asking_changes_no_step(tmp_path: Path) -> None:
    """Saving, evaluating and generating between steps leave the weights and random streams as they were."""
    asked, _ = trained(tmp_path / "a", (2, "save", ""), (3, "eval", ""), (4, "generate", "def"), overrides=DROPOUT)
    alone, _ = trained(tmp_path / "b", overrides=DROPOUT)
    assert losses(asked) == losses(alone)
    text = answers(tmp_path / "a", asked)["generate def"]
    assert text.startswith("def")
    assert len(text) > 3
    (sample,) = [entry for entry in read_events(tmp_path / "a") if entry["kind"] == "sample"]
    assert sample["prompt"] + sample["text"] == text


DROPOUT = ("model.hidden_dropout=0.1", "train.sample_tokens=4")


def test_a_changed_learning_rate_is_used_and_outlives_a_resume(tmp_path: Path) -> None:
    plain = ("lr_schedule.lr_decay_style=constant", "lr_schedule.lr_warmup_iters=0", "optimizer.lr=0.001")
    asks, _ = trained(tmp_path, (3, "set", "optimizer.lr=0.0005"), overrides=(*plain, "train.exit_iteration=5"))
    assert answers(tmp_path, asks) == {"set optimizer.lr=0.0005": "optimizer.lr is 0.0005 from step 4 on, 0.001 before"}
    assert [asks.lines[step]["learning_rate"] for step in range(1, 6)] == [0.001, 0.001, 0.001, 0.0005, 0.0005]
    assert json.loads((tmp_path / "config.json").read_text())["optimizer"]["lr"] == 0.0005
    assert "mt ctl set by" in json.loads((tmp_path / "config-origins.json").read_text())["optimizer.lr"]
    # The configuration that the run was started with goes on with the changed value.
    again, trainer = trained(tmp_path, overrides=plain)
    assert [again.lines[step]["learning_rate"] for step in (6, 7, 8)] == [0.0005] * 3
    assert "mt ctl set by" in trainer.loaded.origin("optimizer.lr")
    # As one run with the change in its middle.
    whole, _ = trained(tmp_path / "whole", (3, "set", "optimizer.lr=0.0005"), overrides=plain)
    assert [again.lines[step]["loss"] for step in (6, 7, 8)] == [whole.lines[step]["loss"] for step in (6, 7, 8)]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("model.num_layers=3", "a running training changes optimizer.lr"),
        ("optimizer.learning=3", "a running training changes"),
        ("optimizer.lr=-1", "optimizer.lr"),
        ("optimizer.lr=high", "optimizer.lr"),
        ("optimizer.min_lr=5", "min_lr"),
        ("", "set KEY=VALUE"),
        ("train.exit_iteration=1", "the run is at step 1 and ends at step 2; it can be 2 to 2, or null for none"),
        ("train.exit_iteration=3", "the run is at step 1 and ends at step 2; it can be 2 to 2, or null for none"),
        ("train.exit_iteration=-1", "input should be greater than 0; the run is at step 1"),
        ("train.exit_iteration=None", "None is no value; null sets none"),
        ("train.exit_iteration=", "nothing is no value"),
        ("train.eval_iters=9999", "holds"),
        ("train.eval_iters=0", "it can be 1 to"),
        ("optimizer.lr=null", "optimizer.lr needs a value, and null is none; it is 0.003 now"),
        ("optimizer.lr=nan", "finite"),
        ("train.eval_interval=0", "greater than 0"),
        ("logging.log_interval=-5", "greater than 0"),
    ],
)
def test_what_would_break_the_run_is_refused_and_training_goes_on(tmp_path: Path, argument: str, words: str) -> None:
    asks, trainer = trained(tmp_path, (1, "set", argument), overrides=("train.train_iters=2",))
    (answer,) = [read_answer(tmp_path, request) for request in asks.asked.values()]
    assert answer is not None
    assert not answer.ok
    assert words in answer.text
    assert trainer.state.iteration == 2


def test_keys_of_evaluations_are_refused_where_nothing_is_evaluated(tmp_path: Path) -> None:
    requests = (1, "set", "train.eval_interval=1"), (1, "set", "train.eval_iters=1")
    asks, _ = trained(tmp_path, *requests, overrides=("train.train_iters=2", "train.eval_iters=0"))
    found = answers(tmp_path, asks)
    assert all("the run has no validation set" in text for text in found.values()), found


def test_a_preset_with_a_warm_up_as_long_as_the_run_does_not_refuse_other_keys(tmp_path: Path) -> None:
    """gpt-tiny warms up for more steps than these; the origin of that value is known to the run alone."""
    asks, _ = trained(tmp_path, (1, "set", "train.eval_interval=1"), overrides=("train.train_iters=3",))
    assert answers(tmp_path, asks) == {
        "set train.eval_interval=1": "train.eval_interval is 1 from step 2 on, 100 before"
    }
    # Nor does the configuration that the run stored.
    assert load_config(tmp_path / "config.json").config.lr_schedule.lr_warmup_iters == 20


def hostile(folder: Path, kind: str) -> Path:
    path = folder / "request-0123.json"
    content = json.dumps({"command": "stop", "argument": "", "by": "mallory"})
    if kind == "link":
        (folder.parent / "elsewhere.json").write_text(content)
        path.symlink_to(folder.parent / "elsewhere.json")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_text({"huge": '{"command": "' + "x" * 100_000 + '"}', "nested": "[" * 50_000}.get(kind, content))
    if kind == "writable":
        path.chmod(0o666)
    if kind == "folder":
        folder.chmod(0o777)
    return path


@pytest.mark.parametrize("kind", ["link", "writable", "folder", "huge", "nested", "usual"])
def test_only_files_that_nobody_else_could_write_are_requests(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / CONTROL_FOLDER
    folder.mkdir(mode=0o700)
    hostile(folder, kind)
    requests = RequestFolder(tmp_path)
    assert requests.waits() == (kind == "usual")
    assert [request.command for request in requests.take()] == (["stop"] if kind == "usual" else [])


def test_a_fifo_does_not_stop_the_run(tmp_path: Path) -> None:
    folder = tmp_path / CONTROL_FOLDER
    folder.mkdir(mode=0o700)
    hostile(folder, "fifo")
    reader = threading.Thread(target=RequestFolder(tmp_path).waits, daemon=True)
    reader.start()
    reader.join(timeout=5)
    assert not reader.is_alive()


def test_the_command_waits_and_withdraws(mt: Callable[..., Any], tmp_path: Path) -> None:
    missing = mt("ctl", str(tmp_path), "save")
    assert (missing.code, "is not a run directory" in missing.err) == (2, True)
    (tmp_path / "config.json").write_text("{}")
    unknown = mt("ctl", str(tmp_path), "sav")
    assert (unknown.code, 'did you mean "save"' in unknown.err) == (2, True)
    silent = mt("ctl", str(tmp_path), "save", "--timeout", "0.1")
    assert silent.code == 75
    assert "withdrawn" in silent.err
    assert list((tmp_path / CONTROL_FOLDER).iterdir()) == []
    answering = threading.Thread(target=_answer_one, args=(tmp_path,))
    answering.start()
    told = mt("ctl", str(tmp_path), "note", "a", "b", "--timeout", "10")
    answering.join()
    assert (told.code, told.out) == (0, "step 7: note a b\n")


def test_a_run_that_has_ended_answers_at_once(mt: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    start = event("start", 0, host=socket.gethostname(), pid=os.getpid())

    def ended(*more: Mapping[str, Any]) -> tuple[int, str]:
        lines = [start, *more]
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
        told = mt("ctl", str(tmp_path), "save", "--timeout", "0.1")
        return told.code, told.err

    code, text = ended(event("end", 20, reason=None))
    assert code == 1
    assert re.search(r"has ended at step 20 \(\d{4}-\d\d-\d\d [\d:]+\): finished; nothing in it can answer", text)
    assert "stopped by signal SIGTERM" in ended(event("end", 7, reason="signal SIGTERM"))[1]
    assert "at step 3 " in ended(event("failed", 3, text="OSError: full"))[1]
    code, text = ended({**start, "time": time.time() - 60, "pid": 2**22 + 1})
    assert (code, "its process is gone, the last sign was 0:01:00 ago" in text) == (1, True)
    assert not (tmp_path / CONTROL_FOLDER).exists(), "nothing is asked of it"
    assert ended(event("save", 5))[0] == 75, "one that goes on is waited for"


def test_a_run_that_ends_while_it_is_asked(mt: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("mt_ops.commands.ctl.LOOK", 0.01)
    (tmp_path / "config.json").write_text("{}")
    events = tmp_path / "events.jsonl"
    events.write_text(json.dumps(event("start", 0)) + "\n")

    def end_when_asked() -> None:
        latest = time.monotonic() + 30
        while not list((tmp_path / CONTROL_FOLDER).glob("*")) and time.monotonic() < latest:
            time.sleep(0.01)
        with events.open("a") as file:
            file.write(json.dumps(event("end", 9, reason=None)) + "\n")

    threading.Thread(target=end_when_asked).start()
    told = mt("ctl", str(tmp_path), "save", "--timeout", "60")
    assert (told.code, "has ended at step 9" in told.err) == (1, True)
    assert list((tmp_path / CONTROL_FOLDER).iterdir()) == []


def _answer_one(directory: Path) -> None:
    folder = RequestFolder(directory)
    end = time.monotonic() + 10
    while not folder.waits() and time.monotonic() < end:
        time.sleep(0.01)
    (request,) = folder.take()
    folder.answer(request, ok=True, text=f"{request.command} {request.argument}", iteration=7)


def test_a_request_that_is_not_read_can_be_withdrawn_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    request = write_request(tmp_path, "stop")
    assert [withdraw(tmp_path, request), withdraw(tmp_path, request)] == [True, False]
    with pytest.raises(ConfigError, match="no config.json"):
        write_request(tmp_path / "nowhere", "stop")


def test_a_request_is_refused_when_it_is_wanted_no_more(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    late, early = write_request(tmp_path, "stop", seconds=-1.0), write_request(tmp_path, "save", seconds=60.0)
    for_ever = write_request(tmp_path, "note", "x")
    folder = RequestFolder(tmp_path)
    assert folder.waits()
    assert {request.id for request in folder.take()} == {early.id, for_ever.id}
    answer = read_answer(tmp_path, late)
    assert answer is not None
    assert not answer.ok
    assert re.fullmatch(r"the request was wanted until \d{4}-\d\d-\d\d [\d:]+ alone", answer.text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_withdraws_the_request(mt: Callable[..., Any], tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "config.json").write_text("{}")
    folder = tmp_path / CONTROL_FOLDER
    before = signal.getsignal(number)
    asked = []

    def end_when_asked() -> None:
        while not asked and watcher_until > time.monotonic():
            asked.extend(folder.glob("request-*"))
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    watcher_until = time.monotonic() + 10
    watcher = threading.Thread(target=end_when_asked)
    watcher.start()
    told = mt("ctl", str(tmp_path), "stop", "--timeout", "60")
    watcher.join()
    assert (told.code, "which is withdrawn" in told.err) == (128 + number, True)
    assert len(asked) == 1
    assert list(folder.iterdir()) == []
    assert signal.getsignal(number) is before


def test_set_takes_one_value_at_a_time(mt: Callable[..., Any], tmp_path: Path) -> None:
    told = mt("ctl", str(tmp_path), "set", "optimizer.lr=1", "optimizer.min_lr=0")
    assert (told.code, "set optimizer.lr=1 optimizer.min_lr=0: one KEY=VALUE at a time" in told.err) == (2, True)


def ask_two_ranks(rank: int, world: int, folder: str, tensor_parallel: int) -> tuple[int, list[float]]:
    too_long = (3, "generate", "def " * 40)
    asks = Asks((2, "set", "optimizer.lr=0.0005"), too_long, (4, "generate", "def"), (5, "stop", ""))
    parallel = f"parallel.tensor_model_parallel_size={tensor_parallel}"
    constant = ("lr_schedule.lr_decay_style=constant", "lr_schedule.lr_warmup_iters=0")
    config = tiny(parallel, "train.sample_tokens=4", "optimizer.lr=0.001", *constant)
    RequestFolder.__init__.__defaults__ = (0.0,)  # type: ignore[attr-defined]
    trainer = Trainer(config, run_dir=folder, callbacks=[asks] if rank == 0 else [])
    trainer.train()
    return trainer.state.iteration, [trainer.engine.schedule(0)]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [2, 1], ids=["tensor parallel", "data parallel"])
def test_all_ranks_do_the_same(tmp_path: Path, tensor_parallel: int) -> None:
    """One run of two ranks: a changed value, a text, a refused one and the stop are those of both."""
    assert run_ranks(2, ask_two_ranks, str(tmp_path), tensor_parallel) == [(5, [0.0005])] * 2
    carried = [("set", 2, True), ("generate", 3, False), ("generate", 4, True), ("stop", 5, True)]
    assert carried_out(tmp_path) == carried
