"""Killed, interrupted and gone on with: the same bytes, nothing stale, no process left."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.small_process import in_small_process

from mt_core.errors import DataError, PluginError
from mt_data.preprocess.executors import InlineExecutor
from mt_data.preprocess.options import Counts, PreprocessOptions
from mt_data.preprocess.readers import MalformedRecord
from mt_data.preprocess.run import SilentProgress, preprocess

pytestmark = pytest.mark.slow

Options = Callable[..., PreprocessOptions]
TINY = 0.0008


class Notes(SilentProgress):
    """Keeps what a run says and does."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.reused = 0
        self.done = 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, counts: Counts, reused: bool) -> None:
        self.reused += reused
        self.done += not reused


class StopAfter(Notes):
    """Interrupts a run as Ctrl-C does, when some shards are done."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        self.shards = shards

    def advance(self, counts: Counts, reused: bool) -> None:
        super().advance(counts, reused)
        if self.done == self.shards:
            raise KeyboardInterrupt


def interrupt(options: PreprocessOptions, after: int = 3) -> None:
    with pytest.raises(KeyboardInterrupt):
        preprocess(options, StopAfter(after))


@pytest.mark.parametrize("source", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_fifty_kills_at_random_moments(prep: Any, tmp_path: Path, options: Options, source: str) -> None:
    """Each killed process goes on from what the ones before it left; now and then one is let through."""
    import gzip

    plain = prep.write_jsonl(tmp_path / "corpus.jsonl")
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    wanted = options(tmp_path / source, shard_mb=TINY, json_keys=("text",))
    in_small_process(kill_often, wanted, prep.expected_files(prep.TEXTS), random.Random(source))


def kill_often(wanted: PreprocessOptions, expected: tuple[bytes, bytes], dice: random.Random) -> None:
    output = Path(wanted.output_prefix).parent
    times = []
    for _ in range(2):
        started = time.monotonic()
        preprocess(wanted)
        times.append(time.monotonic() - started)
        shutil.rmtree(output)
    kills = 0
    while kills < 25:
        child = os.fork()
        if child == 0:
            try:
                preprocess(wanted)
            finally:
                os._exit(0)
        time.sleep(dice.uniform(0, min(times)))
        os.kill(child, signal.SIGKILL)
        kills += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        complete = (output / "set_text_document.manifest.json").exists()
        if dice.random() < 0.7 and not complete:
            continue  # let the next one go on from here
        if (output / "set.partial" / "run.json").exists() or not complete:
            preprocess(wanted)
        prefix = output / "set_text_document"
        assert (Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()) == expected
        assert sorted(path.name for path in output.iterdir() if path.is_file()) == [
            "set_text_document.bin",
            "set_text_document.idx",
            "set_text_document.manifest.json",
        ]
        shutil.rmtree(output)


def test_finished_shards_are_kept_for_any_number_of_workers(prep: Any, corpus: Path, options: Options) -> None:
    interrupt(options(corpus, shard_mb=TINY), after=3)
    notes = Notes()
    report = preprocess(options(corpus, shard_mb=TINY, workers=2), notes)
    assert notes.reused == report.shards_reused == 3
    assert notes.done == report.shards - 3
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS)


def test_a_compressed_file_read_to_its_end_is_not_read_again(prep: Any, tmp_path: Path, options: Options) -> None:
    import gzip

    source = tmp_path / "corpus.jsonl.gz"
    content = prep.write_jsonl(tmp_path / "corpus.jsonl").read_bytes()
    # Two members: the first bytes of a file are read for its encoding, so these stay.
    begin, rest = gzip.compress(content[:8]), gzip.compress(content[8:])
    source.write_bytes(begin + rest)
    shards = preprocess(options(source, shard_mb=TINY, output_prefix=str(tmp_path / "other"))).shards
    interrupt(options(source, shard_mb=TINY), after=shards)
    times = source.stat()
    source.write_bytes(begin + b"\0" * len(rest))
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    report = preprocess(options(source, shard_mb=TINY))
    assert report.shards_reused >= shards - 1
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS)


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("tokenizer", {"tokenizer": {"vocab_extra_ids": 5}}),
    ("append_eod", {"append_eod": False}),
    ("shard_bytes", {"shard_mb": 2 * TINY}),
    ("json_keys", {"json_keys": ("text", "other")}),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_shards_made_differently_are_not_reused(
    tmp_path: Path, options: Options, name: str, change: dict[str, Any]
) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_text("".join(f'{{"text": "document {n}", "other": "x"}}\n' for n in range(200)))
    interrupt(options(source, shard_mb=TINY))
    notes = Notes()
    report = preprocess(options(source, **{"shard_mb": TINY, **change}), notes)
    assert notes.reused == 0
    assert any(name in note and "thrown away" in note for note in notes.notes)
    clean = preprocess(options(source, **{"shard_mb": TINY, **change, "output_prefix": str(tmp_path / "clean")}))
    for key, prefix in report.outputs.items():
        for ending in (".bin", ".idx"):
            assert Path(f"{prefix}{ending}").read_bytes() == Path(f"{clean.outputs[key]}{ending}").read_bytes()


def test_an_input_that_changed_is_read_anew(prep: Any, corpus: Path, options: Options) -> None:
    interrupt(options(corpus, shard_mb=TINY))
    changed = [*prep.TEXTS[1:], "one more"]
    prep.write_jsonl(corpus, changed)
    notes = Notes()
    report = preprocess(options(corpus, shard_mb=TINY), notes)
    assert notes.reused == 0
    assert "inputs" in notes.notes[0]
    assert prep.files_of(report) == prep.expected_files(changed)


def test_a_shard_whose_file_was_cut_is_done_again(prep: Any, corpus: Path, options: Options) -> None:
    interrupt(options(corpus, shard_mb=TINY))
    first = sorted((Path(options(corpus).output_prefix + ".partial")).glob("*.bin"))[0]
    first.write_bytes(first.read_bytes()[:-2])
    report = preprocess(options(corpus, shard_mb=TINY))
    assert report.shards_reused == 2
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS)


def test_going_on_with_skip_after_a_bad_line(prep: Any, tmp_path: Path, options: Options) -> None:
    source = tmp_path / "a.jsonl"
    lines = [f'{{"text": "document {n}"}}' for n in range(200)]
    source.write_text("\n".join([*lines[:150], "bad", *lines[150:]]))
    with pytest.raises(MalformedRecord, match="line 151"):
        preprocess(options(source, shard_mb=TINY))
    report = preprocess(options(source, shard_mb=TINY, on_error="skip"))
    assert report.shards_reused > 2
    assert report.counts.skipped == 1
    assert prep.files_of(report) == prep.expected_files([f"document {n}" for n in range(200)])


def test_two_runs_of_one_prefix(corpus: Path, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    original = InlineExecutor.run
    refused: list[str] = []

    def run_twice(self: Any, task: Any, shards: Any) -> Iterator[Any]:
        child = os.fork()  # another process: locks are between processes
        if child == 0:
            try:
                preprocess(options(corpus))
            except DataError as error:
                os._exit(17 if "another run is writing" in str(error) else 18)
            finally:
                os._exit(19)
        refused.append(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        yield from original(self, task, shards)

    monkeypatch.setattr(InlineExecutor, "run", run_twice)
    preprocess(options(corpus))
    assert refused == ["17"]


def children() -> list[int]:
    """Processes whose parent is this one, apart from Python's resource tracker and the server of other tests' ranks."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found}
    return [pid for pid, line in lines.items() if b"resource_tracker" not in line and b"forkserver" not in line]


@pytest.fixture
def new_children() -> Callable[[], set[int]]:
    """Those since the test began: other tests in this process may have left a browser or the like."""
    before = set(children())
    return lambda: set(children()) - before


def test_an_interrupted_run_leaves_no_process(
    corpus: Path, options: Options, new_children: Callable[[], set[int]]
) -> None:
    interrupt(options(corpus, shard_mb=TINY, workers=2))
    assert not multiprocessing.active_children()
    assert not new_children()


class KillAWorker(Notes):
    def advance(self, counts: Counts, reused: bool) -> None:
        super().advance(counts, reused)
        if self.done == 1:
            for process in multiprocessing.active_children():
                os.kill(process.pid or 0, signal.SIGKILL)


def test_a_worker_that_dies_ends_the_run(
    prep: Any, corpus: Path, options: Options, new_children: Callable[[], set[int]]
) -> None:
    with pytest.raises(DataError, match=r"a worker process was ended by SIGKILL while it worked on .*corpus.jsonl"):
        preprocess(options(corpus, shard_mb=TINY, workers=2), KillAWorker())
    assert not new_children()
    assert prep.files_of(preprocess(options(corpus, shard_mb=TINY))) == prep.expected_files(prep.TEXTS)


def test_a_fork_that_fails_leaves_the_garbage_collector_as_it_was(
    corpus: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mt_data.preprocess.executors.can_fork", lambda: True)
    monkeypatch.setattr("mt_data.preprocess.executors._fork", Mock(side_effect=OSError(errno.EAGAIN, "no process")))
    with pytest.raises(OSError, match="no process"):
        preprocess(options(corpus, shard_mb=TINY, workers=2))
    assert gc.get_freeze_count() == 0


@pytest.fixture
def no_plugins_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that loads plugins anew finds no tokenizer."""
    from mt_core.plugins import load_plugins

    monkeypatch.setenv("MT_PLUGINS", "")
    monkeypatch.setattr("mt_data.preprocess.encoder.load_plugins", lambda: load_plugins(allow=["data"]))


@pytest.mark.usefixtures("no_plugins_in_workers")
def test_workers_are_copies_of_the_process_that_planned(
    prep: Any, corpus: Path, options: Options, monkeypatch: pytest.MonkeyPatch, new_children: Callable[[], set[int]]
) -> None:
    """They import nothing and build no tokenizer, which costs more CPU than a small corpus."""
    monkeypatch.setattr("mt_data.preprocess.executors.can_fork", lambda: True)  # whatever threads other tests left
    report = preprocess(options(corpus, shard_mb=TINY, workers=2))
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS)
    assert not new_children()


@pytest.mark.usefixtures("no_plugins_in_workers")
def test_a_worker_that_cannot_start_ends_the_run(
    corpus: Path, options: Options, new_children: Callable[[], set[int]]
) -> None:
    """Beside another thread, whose locks a copy would inherit, workers are started anew; these fail."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(PluginError, match="ByteLevelTokenizer"):
            preprocess(options(corpus, shard_mb=TINY, workers=2))
    finally:
        done.set()
        thread.join()
    assert not new_children()


# Workers stop after the third shard, so that the run is under way when the signal comes.
RUN = """
import signal
from pathlib import Path
import typer
from mt_data.commands.preprocess import PreprocessCommand, preprocess
from mt_data.preprocess import executors
run_shard = executors.run_shard
def run_and_wait(task, shard, encoder):
    result = run_shard(task, shard, encoder)
    while len(list(Path(task.folder).glob("*.done.json"))) >= 3:
        signal.pause()
    return result
executors.run_shard = run_and_wait
if __name__ == "__main__":
    app = typer.Typer()
    app.command(cls=PreprocessCommand)(preprocess)
    app()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_to_the_command(prep: Any, tmp_path: Path, options: Options, number: signal.Signals) -> None:
    source = prep.write_jsonl(tmp_path / "corpus.jsonl", prep.TEXTS * 30)
    script = tmp_path / "run.py"
    script.write_text(RUN)
    prefix = str(tmp_path / "out" / "set")
    arguments = ["--input", str(source), "--output-prefix", prefix, "--tokenizer-type", "ByteLevelTokenizer"]
    arguments += ["--append-eod", "--workers", "2", "--shard-mb", "0.002"]
    command = subprocess.Popen(
        [sys.executable, str(script), *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    partial = Path(f"{prefix}.partial")
    while len(list(partial.glob("*.done.json"))) < 3:
        assert command.poll() is None, command.communicate()
        time.sleep(0.02)
    if number == signal.SIGINT:
        os.killpg(command.pid, number)  # as a terminal does
    else:
        command.send_signal(number)
    message = command.communicate(timeout=120)[1]
    workers_end = time.monotonic() + 120
    while members_of(command.pid) and time.monotonic() < workers_end:
        time.sleep(0.02)
    assert not members_of(command.pid)
    if number != signal.SIGKILL:
        assert "the same command goes on from there" in message
        assert "Traceback" not in message
        assert command.returncode == 128 + number
    assert partial.exists()
    report = preprocess(options(source, shard_mb=0.002))
    assert report.shards_reused >= 3
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS * 30)


def members_of(session: int) -> list[str]:
    """Processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(stat.parent.name)
    return found
