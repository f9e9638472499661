"""Records steps on each rank: a trace with the names of layers, and a summary beside it."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.parallel.first_rank import on_first_rank
from mt_core.train import Callback, Run
from mt_tools.profile.config import ProfileConfig
from mt_tools.profile.operations import MODULE, summarize
from mt_tools.profile.roof import roof_tflops

MOST_STEPS = 100
"""Most steps of a recording that mt ctl asks for; each takes some MiB of memory until the last."""
TRACE, SUMMARY = "trace-rank-{}.json.gz", "summary-rank-{}.json"


class StepProfile(Callback):
    """Records steps first ... last, then writes the rank's trace and summary into the folder. On all ranks; of those
    that `ranks` leaves out nothing is recorded."""

    def __init__(self, first: int, last: int, folder: Path | None, ranks: Collection[int] | None = None) -> None:
        self.first, self.last, self.folder, self.ranks = first, last, folder, ranks
        self._recording = False
        """Between the first and the last step, also on a rank that is left out."""
        self._profiler: profile | None = None
        self._ranges: ModuleRanges | None = None
        self._before: Mapping[str, float] = {}
        self._began = 0.0

    def is_active(self, step: int) -> bool:
        """Whether steps behind `step` are recorded, or are to be."""
        return self._recording or self.first > step

    def on_train_start(self, run: Run) -> None:
        self._require_rank(run)
        if self.first == run.state.iteration + 1:
            self._start(run)

    def on_step_end(self, run: Run, metrics: Mapping[str, Any]) -> None:
        step = int(metrics["iteration"])
        if step + 1 == self.first:
            self._start(run)
        elif step == self.last and self._recording:
            folder = self._folder(run)
            on_first_rank(lambda: folder.mkdir(parents=True, exist_ok=True), run.ctx.world)
            if self._profiler is not None:
                self._stop(run, folder)
            self._recording = False
            run.message(f"steps {self.first} to {self.last} recorded in {folder}")

    def close(self) -> None:
        if self._ranges is not None:
            self._ranges.remove()
        self._profiler, self._recording = None, False

    def _require_rank(self, run: Run) -> None:
        if self.ranks is not None and min(self.ranks) >= run.ctx.world.size:
            raise ConfigError(
                f"profile.ranks={sorted(self.ranks)} names no rank of this run, which has {run.ctx.world.size}; name "
                "one from 0, or leave the key out for all"
            )

    def _start(self, run: Run) -> None:
        self._recording = True
        if self.ranks is not None and run.ctx.world.rank not in self.ranks:
            return
        activities = [ProfilerActivity.CPU]
        if run.engine.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._ranges = ModuleRanges(run.model)
        self._profiler = profile(activities=activities, record_shapes=True, with_flops=True)
        self._profiler.start()
        # The start of the profiler is no part of the steps.
        self._before, self._began = run.engine.time.totals(), time.perf_counter()

    def _stop(self, run: Run, folder: Path) -> None:
        assert self._profiler is not None
        assert self._ranges is not None
        seconds, after = time.perf_counter() - self._began, run.engine.time.totals()
        self._profiler.stop()
        self._ranges.remove()
        rank, steps = run.ctx.world.rank, self.last - self.first + 1
        _write_trace(self._profiler, folder / TRACE.format(rank))
        parts = {part: (value - self._before.get(part, 0.0)) / steps for part, value in after.items()}
        summary = {
            "rank": rank,
            "first_step": self.first,
            "last_step": self.last,
            "device": run.engine.device.type,
            "threads": torch.get_num_threads(),
            # On this machine, with these threads, beside the same other programs as the steps.
            "roof_tflops": roof_tflops(run.engine.device.type),
            "seconds": seconds / steps,
            "parts": parts,
            "axes": {name: axis.size for name, axis in run.ctx.axes.items() if axis.size > 1},
            "operations": summarize(self._profiler.events(), steps, device=run.engine.device.type),
        }
        (folder / SUMMARY.format(rank)).write_text(json.dumps(summary), encoding="utf-8")
        self._profiler = None

    def _folder(self, run: Run) -> Path:
        if self.folder is not None:
            return self.folder
        if run.directory is None:
            raise ConfigError("profile.folder is not set, and the run has no directory; set it, or give --run-dir")
        return run.directory.path / "profile"


class ModuleRanges:
    """Names in the trace for the forward pass of each layer and of its parts, by their canonical names."""

    def __init__(self, model: nn.Module) -> None:
        self._open: dict[str, list[record_function]] = {}
        self._handles = []
        for name, module in model.named_modules():
            if name and is_named(name):
                self._handles.append(module.register_forward_pre_hook(self._entering(name)))
                self._handles.append(module.register_forward_hook(self._leaving(name), always_call=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, arguments: Any) -> None:
            range_ = record_function(MODULE + name)
            range_.__enter__()
            self._open.setdefault(name, []).append(range_)

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            if ranges := self._open.get(name):
                ranges.pop().__exit__(None, None, None)

        return leave


def is_named(name: str) -> bool:
    """Whether a module has a range: layers, their direct parts, and what stands outside of layers."""
    parts = name.split(".")
    if "layers" in parts:
        return len(parts) - parts.index("layers") in (2, 3)
    return len(parts) == 1 or parts[0] in ("embedding",) or parts[-1] == "final_layernorm"


def _write_trace(recorded: profile, path: Path) -> None:
    plain = path.with_suffix("")
    recorded.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=3) as target:
        target.write(source.read())
    plain.unlink()


def build_profile(config: Config) -> StepProfile:
    keys = config.section(ProfileConfig)
    folder = None if keys.folder is None else Path(keys.folder)
    return StepProfile(keys.first_step, keys.last_step, folder, keys.ranks)


def answer_profile(run: Any, argument: str, by: str) -> str:
    """`mt ctl RUN profile N`: record the next N steps. run: a mt_core.train.run_control.ControlledRun."""
    if not argument.isdigit() or int(argument) < 1:
        raise ConfigError(f"mt ctl RUN profile N: N is {argument!r}; it must be a number of steps")
    now, left = run.state.iteration, run.last_iteration - run.state.iteration
    if int(argument) > min(left, MOST_STEPS):
        raise ConfigError(
            f"mt ctl RUN profile {argument}: the run is at step {now}, with {left} left; N can be 1 to "
            f"{min(left, MOST_STEPS)} (a recording of more than {MOST_STEPS} steps fills the memory)"
        )
    for callback in run.callbacks.callbacks:
        if isinstance(callback, StepProfile) and callback.is_active(now):
            raise ConfigError(
                f"mt ctl RUN profile {argument}: steps {callback.first} to {callback.last} are being recorded, and the "
                f"run is at step {now}; ask again after them"
            )
    first = now + 1
    last = first + int(argument) - 1
    folder = run.directory.path / "profile" / f"steps-{first}-{last}"
    callback = StepProfile(first, last, folder)
    callback.on_train_start(run)
    run.callbacks.callbacks.append(callback)
    return f"records steps {first} to {last} in {folder}; mt profile {folder} shows where their time went"
