"""events.jsonl and environment.json of a run directory, and what each rank does at the moment (status/rank-N.json)."""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from mt_core.config.schema import Config
from mt_core.data.file_contents import configured_contents
from mt_core.launch.phases import Phases
from mt_core.parallel.context import ParallelContext
from mt_core.paths import write_whole
from mt_core.run_events import EVENTS_FILE, event
from mt_core.train.callbacks import Callback, Metrics, Run
from mt_core.train.checkpoint.resume import data_identity
from mt_core.train.reporting.drawn_data import DrawnData
from mt_core.train.state import TrainResult
from mt_core.versions import installed_versions

ENVIRONMENT_FILE = "environment.json"
STATUS_FOLDER = "status"
MOST_OF_AN_ERROR = 2000
"""Characters that are kept of an error's text."""
DISTRIBUTIONS = (
    *("core", "models", "data", "ckpt", "moe", "infer", "tools", "import"),
    *("eval", "tune", "ops", "retrieval", "accelerate", "cli"),
)


class EventLog(Callback):
    """Appends to events.jsonl in the run directory; without a run directory it writes nothing."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._early: list[dict[str, Any]] = []
        """Messages of the time before training starts, when the run directory need not exist."""
        self._drawn: DrawnData | None = None
        self._step, self._has_ended = 0, False

    def on_message(self, run: Run, text: str) -> None:
        kind = "warning" if text.startswith("warning") else "message"
        entry = event(kind, run.state.iteration, text=text)
        if self._file is None:
            self._early.append(entry)
        else:
            self._write(entry)

    def on_train_start(self, run: Run) -> None:
        self._step = run.state.iteration
        if run.directory is None:
            return
        self._file = (run.directory.path / EVENTS_FILE).open("a", encoding="utf-8")
        write_whole(run.directory.path / ENVIRONMENT_FILE, (json.dumps(environment(run.ctx), indent=2) + "\n").encode())
        self._write(
            event(
                "start",
                run.state.iteration,
                resumed_from=None if run.resumed_from is None else str(run.resumed_from),
                world_size=run.ctx.world.size,
                host=socket.gethostname(),
                pid=os.getpid(),
                began=time.time() - run.engine.time.total(),
                data=_identity(run),
                files=configured_contents(run.config),
                **_sign_before(run.directory.path),
            )
        )
        early, self._early = self._early, []
        for entry in early:
            # Said before a checkpoint gave the step.
            self._write({**entry, "iteration": run.state.iteration})
        self._drawn = DrawnData(run)

    def on_event(self, run: Run, kind: str, fields: Mapping[str, Any]) -> None:
        self._write(event(kind, run.state.iteration, **fields))
        if kind == "save":
            self._write_drawn(run)

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        self._write(event("evaluation", run.state.iteration, values=dict(metrics)))

    def on_step_end(self, run: Run, metrics: Metrics) -> None:
        self._step = run.state.iteration

    def on_train_end(self, run: Run, result: TrainResult) -> None:
        self._write_drawn(run)
        self._write(event("end", run.state.iteration, reason=result.stopped))
        self._has_ended = True

    def close(self) -> None:
        """Called after an error too, which is then the one that is handled."""
        error = sys.exc_info()[1]
        if error is not None and not self._has_ended:
            self._write(event("failed", self._step, text=_error_text(error)))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_drawn(self, run: Run) -> None:
        if self._drawn is not None and (fields := self._drawn.fields(run.state.consumed_samples)) is not None:
            self._write(event("data", run.state.iteration, **fields))

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()


def _identity(run: Run) -> dict[str, str]:
    """Fingerprints of the training data and of the tokenizer. Only the trainer has data."""
    data = getattr(run, "train_data", None)
    return {} if data is None else data_identity(data, run.engine.tokenizer)


def _error_text(error: BaseException) -> str:
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__  # rich ends a program whose standard output was closed
    if isinstance(error, BrokenPipeError):
        return "BrokenPipeError: what read the standard output has closed it"
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:MOST_OF_AN_ERROR]


def _sign_before(run_dir: Path) -> dict[str, Any]:
    """What rank 0 of an earlier process did last, where that process did not end by itself."""
    try:
        # This process writes its own status after its start is in the log.
        status = json.loads((run_dir / STATUS_FOLDER / "rank-0.json").read_text(encoding="utf-8"))
        sign = {key: status[key] for key in ("time", "since", "phase", "iteration")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {} if sign["phase"] == "ended" else {"before": sign}


def build_event_log(config: Config) -> EventLog:
    return EventLog()


def environment(ctx: ParallelContext) -> dict[str, Any]:
    """What the process of rank 0 runs on."""
    device = ctx.device
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "distributions": installed_versions(f"mt-{name}" for name in DISTRIBUTIONS),
        "system": platform.platform(),
        "host": socket.gethostname(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "world_size": ctx.world.size,
        "axes": {name: axis.size for name, axis in ctx.axes.items() if axis.size > 1},
        "command": sys.argv,
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    """Commit of the working directory, where it is in a repository."""
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


# -- status of each rank -----------------------------------------------------------------------------


class StatusFile:
    """Rewrites status/rank-N.json each `interval` seconds from a thread: phase, step, seconds in it, memory.

    The thread only reads, so that it shows also where a rank is that does not come back from a collective.
    """

    def __init__(self, run_dir: Path, phases: Phases, run: Run, interval: float) -> None:
        self.path = run_dir / STATUS_FOLDER / f"rank-{run.ctx.world.rank}.json"
        self.phases, self.run, self.interval = phases, run, interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mt-status", daemon=True)

    def start(self) -> None:
        self._write()
        self._thread.start()

    def stop(self) -> None:
        """With a last state."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
            self._write()

    def _work(self) -> None:
        while not self._ended.wait(self.interval):
            self._write()

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Without waiting for the disk, as each second another follows.
            temporary = self.path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(self._status()), encoding="utf-8")
            temporary.replace(self.path)
        except OSError:
            return  # a full disk ends a run by its checkpoint and not by its status

    def _status(self) -> dict[str, Any]:
        position = self.phases.position
        parts = dict(self.run.engine.time.seconds)
        return {
            "time": time.time(),
            "rank": self.run.ctx.world.rank,
            "iteration": self.run.state.iteration,
            "phase": "ended" if self._ended.is_set() else position.phase,
            "since": time.time() - position.seconds,
            "part": self.run.engine.time.current,
            "parts": parts,
            "data_wait_seconds": parts.get("data_wait", 0.0),
            "memory_bytes": _resident_bytes(),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            **_device_memory(self.run.ctx.device),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }


def status_interval(configured: float | None, ranks: int) -> float | None:
    """Seconds between writes. Without a configured value one second, and longer from 64 ranks on: a shared file system
    gets at most 64 files a second."""
    return configured if configured is not None else max(1.0, ranks / 64.0)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _device_memory(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {
        "device_memory_bytes": torch.cuda.memory_allocated(device),
        "device_peak_bytes": torch.cuda.max_memory_allocated(device),
    }
