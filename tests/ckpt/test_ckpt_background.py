"""Saving while training goes on, and which checkpoints of a run are kept."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from tests.ckpt.conftest import Kit
from tests.small_process import in_small_process

from mt_ckpt.native.read import open_checkpoint
from mt_ckpt.native.save import save_checkpoint
from mt_core.config.loading import LoadedConfig, load_config
from mt_core.config.schema import CheckpointConfig
from mt_core.errors import CheckpointError, ConfigError
from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train import Callback, Trainer
from mt_core.train.checkpoint.local_shards import whole_fragment
from mt_core.train.checkpoint.run_directory import RunDirectory
from mt_core.train.checkpoint.saving import AsyncCheckpointWriter, CheckpointContents, Commit, HostCopies, WholeMethod

SMALL = [
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "data.num_workers=0",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.train_iters=12",
    "train.eval_interval=null",
    "train.eval_iters=1",
    "train.sample_prompt=null",
    "train.num_threads=1",
    "checkpoint.save_interval=null",
    "logging.log_interval=1",
    "logging.progress=none",
]

CONTEXT = build_parallel_context(AxisSizes())


def small(host: PluginHost, *overrides: str) -> LoadedConfig:
    return load_config(preset="gpt-tiny", overrides=[*SMALL, *overrides], host=host)


def iterations(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in (run / "checkpoints").glob("iter_*"))


def assert_same(first: Path, second: Path) -> None:
    one, other = open_checkpoint(first), open_checkpoint(second)
    assert list(one.shapes()) == list(other.shapes())
    for name in one.shapes():
        assert torch.equal(one.read(name), other.read(name)), name


# -- the writer -------------------------------------------------------------------------------------


class HeldSave:
    """Saves when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def __call__(self, path, tensors, metadata, files) -> None:
        self.begun.release()
        assert self.go.acquire(timeout=60)
        save_checkpoint(path, tensors, metadata, files)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path / "run")
    found.create()
    return found


def background(save: Callable[..., None], directory: RunDirectory, host: PluginHost, **keys) -> AsyncCheckpointWriter:
    config = CheckpointConfig(async_save=True, **keys)
    method = WholeMethod(save, Commit(directory, config, host), CONTEXT)
    return AsyncCheckpointWriter(method, config.async_in_flight, CONTEXT)


def contents(tensors: Iterable[tuple[str, torch.Tensor]], metadata=None, files=None) -> CheckpointContents:
    return CheckpointContents([whole_fragment(name, tensor) for name, tensor in tensors], metadata or {}, files or {})


def test_what_is_written_is_what_the_tensors_were(directory: RunDirectory, host: PluginHost) -> None:
    save = HeldSave()
    writer = background(save, directory, host)
    weight, transposed = torch.arange(6.0), torch.arange(6).view(2, 3).t()
    path = directory.checkpoint(1)
    writer.write(path, contents([("model.w", weight), ("model.t", transposed)], {"iteration": 1}))
    weight.fill_(-1)
    transposed.fill_(-1)
    assert writer.committed() == []
    assert directory.latest_checkpoint() is None
    assert not path.exists()
    save.go.release()
    (committed,) = writer.finish()
    assert committed.path == directory.latest_checkpoint() == path
    assert torch.equal(open_checkpoint(path).read("model.w"), torch.arange(6.0))
    assert torch.equal(open_checkpoint(path).read("model.t"), torch.tensor([[0, 3], [1, 4], [2, 5]]))
    assert writer.finish() == []
    writer.close()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_checkpoint_beyond_the_limit_waits(directory: RunDirectory, host: PluginHost, in_flight: int) -> None:
    save = HeldSave()
    writer = background(save, directory, host, async_in_flight=in_flight)
    state = contents([("model.w", torch.ones(3))])
    for iteration in range(1, in_flight + 1):
        writer.write(directory.checkpoint(iteration), state)
    further = threading.Thread(target=writer.write, args=(directory.checkpoint(9), state))
    further.start()
    assert save.begun.acquire(timeout=60)
    further.join(0.2)
    assert further.is_alive()
    save.go.release()
    further.join(60)
    assert not further.is_alive()
    assert directory.checkpoint(1).exists()
    for _ in range(in_flight):
        save.go.release()
    assert [done.path for done in writer.finish()] == [
        *(directory.checkpoint(iteration) for iteration in range(1, in_flight + 1)),
        directory.checkpoint(9),
    ]
    writer.close()


def test_close_reports_what_became_of_those_in_flight(directory: RunDirectory, host: PluginHost) -> None:
    def fail_second(path, tensors, metadata, files) -> None:
        if path.name.endswith("2"):
            raise CheckpointError("the disk is full")
        save_checkpoint(path, tensors, metadata, files)

    writer = background(fail_second, directory, host, async_in_flight=2)
    for iteration in (1, 2):
        writer.write(directory.checkpoint(iteration), contents([("model.w", torch.ones(3))]))
    assert writer.close() == ["committed iter_0000001", "iter_0000002 was not written: the disk is full"]
    assert directory.latest_checkpoint() == directory.checkpoint(1)


def test_copies_keep_their_memory_and_follow_changed_tensors() -> None:
    copies = HostCopies()

    def fill(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        return {copy.name: copy.tensor() for copy in copies.fill([whole_fragment(*item) for item in tensors.items()])}

    before = fill(a=torch.ones(4), b=torch.ones(2), c=torch.ones(3))
    given = torch.full((4,), 2.0)
    after = fill(a=given, b=torch.full((3,), 3.0), d=torch.ones(1, dtype=torch.int64))
    given.fill_(-1)
    assert list(after) == ["a", "b", "d"]
    assert after["a"].data_ptr() == before["a"].data_ptr()
    assert after["a"].tolist() == [2.0] * 4
    assert after["b"].tolist() == [3.0] * 3
    assert before["b"].tolist() == [1.0] * 2


@pytest.mark.slow
@pytest.mark.parametrize("tries", [30, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_killed_at_random_moments(saved: Path, tries: int) -> None:
    """`latest` names a whole checkpoint, whenever the process with the writing thread dies; old ones are pruned."""
    in_small_process(kill_at_random_moments, saved, tries)


def kill_at_random_moments(saved: Path, tries: int) -> None:
    kit, host = Kit(), load_plugins()
    directory = RunDirectory(saved.parent.parent)
    directory.set_latest(saved)
    moments = random.Random(1)
    metadata = {value: {"iteration": value, "config": {"model": {"family": "gpt"}}} for value in (1, 2)}
    files = open_checkpoint(saved).files()

    def save(path, tensors, metadata, files) -> None:
        save_checkpoint(path, tensors, metadata, files, max_shard_bytes=1 << 17)

    def train_on_and_on(begin: int, write_end: int) -> None:
        writer = background(save, directory, host, keep_last=2)
        for iteration in count(begin):
            value = 1 + iteration % 2
            state = contents(kit.states[value].items(), metadata[value], files)
            writer.write(directory.checkpoint(iteration), state)
            os.write(write_end, b"." * len(writer.committed()))

    for number in range(1, tries + 1):
        kill_after_first_commit(partial(train_on_and_on, 100 * number), moments.uniform(0, 0.04))
        latest = directory.latest_checkpoint()
        assert latest is not None
        assert int(latest.name.removeprefix("iter_")) >= 100 * number
        kit.assert_whole(latest)
    assert len(iterations(directory.path)) <= 4


def kill_after_first_commit(work: Callable[[int], None], seconds: float) -> None:
    """Run `work` in a forked child and kill it some time after it has written to the descriptor it is given."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    heard = os.read(read_end, 1)
    os.close(read_end)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert heard
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


# -- in a run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(host: PluginHost, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run with all checkpoints, saved at once and in the background."""
    folder = tmp_path_factory.mktemp("runs")
    Trainer(small(host, "checkpoint.save_interval=3"), run_dir=folder / "now").train()
    overrides = ("checkpoint.save_interval=3", "checkpoint.async_save=true")
    Trainer(small(host, *overrides), run_dir=folder / "background").train()
    return folder / "now", folder / "background"


@pytest.mark.slow
def test_checkpoints_written_in_the_background_are_the_same(runs: tuple[Path, Path]) -> None:
    now, behind = runs
    assert iterations(now) == iterations(behind) == [3, 6, 9, 12]
    for iteration in iterations(now):
        assert_same(RunDirectory(now).checkpoint(iteration), RunDirectory(behind).checkpoint(iteration))
    assert RunDirectory(behind).latest_checkpoint() == RunDirectory(behind).checkpoint(12)


def test_the_log_says_requested_then_committed(runs: tuple[Path, Path]) -> None:
    log = (runs[1] / "log.txt").read_text()
    for iteration in (3, 6, 9, 12):
        requested = log.index(f"requested iter_{iteration:07d}, which is written while training continues")
        assert requested < log.index(f"committed iter_{iteration:07d}, written in")
        assert log.count(f"saved iter_{iteration:07d}") == 1
    assert "requested" not in (runs[0] / "log.txt").read_text()


@pytest.mark.parametrize("async_save", ["true", "false"])
def test_a_run_keeps_what_its_keys_name(host: PluginHost, tmp_path: Path, async_save: str) -> None:
    (tmp_path / "checkpoints" / "iter_notes").mkdir(parents=True)
    (tmp_path / "checkpoints" / "iter_0000000").mkdir()  # no checkpoint
    keys = ("checkpoint.save_interval=2", "checkpoint.keep_last=2", "checkpoint.keep_every=4")
    Trainer(small(host, *keys, f"checkpoint.async_save={async_save}"), run_dir=tmp_path).train()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[!.]*")) == [
        "iter_0000000", "iter_0000004", "iter_0000008", "iter_0000010", "iter_0000012", "iter_notes", "latest",
    ]  # fmt: skip
    log = (tmp_path / "log.txt").read_text()
    assert re.findall(r"removed (\S+)", log) == ["iter_0000002", "iter_0000006"]


def test_a_checkpoint_that_cannot_be_removed_does_not_stop_training(
    host: PluginHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise CheckpointError(f"{path}: cannot be removed: Permission denied")

    monkeypatch.setattr("mt_core.retention.remove", refuse)
    keys = ("checkpoint.save_interval=6", "checkpoint.keep_last=1")
    assert Trainer(small(host, *keys), run_dir=tmp_path).train().state.iteration == 12
    assert re.search(r"warning: .*iter_0000006: cannot be removed: Permission", (tmp_path / "log.txt").read_text())


class FillDisk(Callback):
    """No byte can be written once the checkpoint of step 4 is committed; step 10 waits until the write has failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.found_out = threading.Event()

    def on_step_end(self, run: Trainer, metrics) -> None:
        if metrics["iteration"] == 6:
            while run.directory.latest_checkpoint() is None:
                time.sleep(0.01)
            self.monkeypatch.setattr(os, "pwrite", self.full)
        if metrics["iteration"] == 10:
            assert self.found_out.wait(60)
            while list(run.directory.checkpoints.glob(".tmp-*")):
                time.sleep(0.01)

    def full(self, *args: object) -> int:
        self.found_out.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("async_save", ["true", "false"])
def test_a_full_disk_stops_training_and_latest_stays(
    host: PluginHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: str
) -> None:
    config = small(host, "checkpoint.save_interval=4", f"checkpoint.async_save={async_save}")
    trainer = Trainer(config, run_dir=tmp_path, callbacks=[FillDisk(monkeypatch)])
    with pytest.raises(CheckpointError, match=r"iter_0000008: not saved: No space left on device"):
        trainer.train()
    assert trainer.state.iteration < 12
    assert RunDirectory(tmp_path).latest_checkpoint() == RunDirectory(tmp_path).checkpoint(4)
    assert iterations(tmp_path) == [4]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("checkpoint.async_in_flight=2", "async_in_flight.*async_save"),
        ("checkpoint.async_in_flight=0", "async_in_flight"),
        ("checkpoint.keep_last=0", "keep_last"),
        ("checkpoint.keep_every=5", "keep_every=5: without checkpoint.keep_last every checkpoint is kept"),
        ("checkpoint.ckpt_format=trtllm", "ckpt_format=trtllm is written by mt convert only; training writes mt"),
    ],
)
def test_what_cannot_be_meant_is_refused(host: PluginHost, tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Trainer(small(host, override), run_dir=tmp_path)


# -- the loss of the first resumed step -------------------------------------------------------------


@pytest.fixture
def stopped(host: PluginHost, tmp_path: Path) -> Path:
    """A run that stopped after ten of its steps."""
    Trainer(small(host, "train.exit_iteration=10"), run_dir=tmp_path / "run").train()
    return tmp_path / "run"


def damage(run: Path, factor: float) -> None:
    """Multiply all weights, as a wrong conversion might; the checkpoint's checksums are right."""
    path = RunDirectory(run).latest_checkpoint()
    assert path is not None
    reader = open_checkpoint(path)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in reader.shapes():
            yield name, reader.read(name) * factor if name.startswith("model.") else reader.read(name)

    save_checkpoint(path, list(tensors()), dict(reader.metadata), reader.files())


def test_a_resumed_loss_far_from_the_last_ones_is_an_error(host: PluginHost, stopped: Path) -> None:
    damage(stopped, 20.0)
    with pytest.raises(CheckpointError) as error:
        Trainer(small(host), run_dir=stopped).train()
    words = str(error.value)
    first, mean = re.search(r"first resumed step is (\S+); that of the 10 steps before .* was (\S+) on", words).groups()
    assert float(first) > 2 * float(mean) > 0
    assert "converted and lacks weights" in words
    assert "checkpoint.resume_loss_check=warn" in words
    assert iterations(stopped) == [10]


def test_the_error_can_be_made_a_warning(host: PluginHost, stopped: Path) -> None:
    damage(stopped, 20.0)
    result = Trainer(small(host, "checkpoint.resume_loss_check=warn"), run_dir=stopped).train()
    assert result.state.iteration == 12
    assert "warning: the loss of the first resumed step is" in (stopped / "log.txt").read_text()


def test_an_undamaged_checkpoint_goes_on_and_keeps_the_losses(host: PluginHost, stopped: Path) -> None:
    trainer = Trainer(small(host), run_dir=stopped)
    assert len(trainer.recent_losses.to_list()) == 10
    trainer.train()
    assert "warning" not in (stopped / "log.txt").read_text()
    latest = RunDirectory(stopped).latest_checkpoint()
    assert latest is not None
    assert len(open_checkpoint(latest).metadata["recent_losses"]) == 12


def test_other_data_that_were_accepted_are_not_compared(host: PluginHost, stopped: Path) -> None:
    damage(stopped, 20.0)
    keys = ("data.eod_mask_loss=true", 'checkpoint.accept_changes=["data.eod_mask_loss"]')
    Trainer(small(host, *keys), run_dir=stopped).train()
    log = (stopped / "log.txt").read_text()
    assert "accepted changes:\n  key                 then   now\n  data.eod_mask_loss  False  True" in log
