"""What one steady training step asks of a GPU, counted by the stub of CUDA: launches, waits, copies, memory.

    bench/cuda_stub/run.sh python bench/cuda_stub/step_counts.py 8b 7b-a1b --precision bf16 --set train.cuda_graphs=step

Presets are those of `mt bench train`. Kernels do nothing, so that the time of a step is what the host needs to launch
it, and losses mean nothing. Memory is that of torch's own allocator on a device of 140.4 GiB.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mt_core.plugins import PluginHost, load_plugins
from mt_tools.bench.training import TimedRun, peak_bytes
from mt_tools.bench.training_presets import PRECISIONS, PRESETS
from mt_tools.plan.layouts import Planner
from mt_tools.plan.machines import get_machine

WARM_UP = 4
KINDS = (
    *("launches", "products", "collectives", "waits", "copies_to_host", "copies_to_device", "pageable_copies"),
    *("allocations", "graph_launches"),
)
"""The fields of `Counts` in cuda_stub.c."""


class Stub:
    """The library that run.sh preloads."""

    def __init__(self) -> None:
        path = os.environ.get("LD_PRELOAD", "").split(":")[0]
        if not path.endswith("libcuda.so.1"):
            raise SystemExit("no stub of CUDA is preloaded; start this with bench/cuda_stub/run.sh python ...")
        self._library = ctypes.CDLL(path)

    def counts(self) -> dict[str, int]:
        found = (ctypes.c_long * len(KINDS))()
        self._library.cuda_stub_counts(found)
        return dict(zip(KINDS, found, strict=True))

    def log_to(self, path: Path | None) -> None:
        self._library.cuda_stub_log(str(path or "").encode())


def count_step(run: TimedRun, stub: Stub) -> tuple[dict[str, float], Counter[str]]:
    """(counts of a step, what was launched and how often), after a warm-up that compiles kernels and fills caches."""
    for _ in range(WARM_UP):
        run.step()
    torch.cuda.reset_peak_memory_stats()
    with TemporaryDirectory() as folder:
        before = stub.counts()
        stub.log_to(log := Path(folder, "log"))
        run.step()
        stub.log_to(None)
        after = stub.counts()
        launched = Counter(line.split("\t", 1)[1] for line in log.read_text().splitlines())
    found: dict[str, float] = {kind: after[kind] - before[kind] for kind in KINDS}
    found["host_ms"] = min(_host_seconds(run) for _ in range(5)) * 1e3
    found["peak_gb"] = peak_bytes(run.trainer.config) / 1e9
    return found, launched


def _host_seconds(run: TimedRun) -> float:
    began = time.process_time()
    run.step()
    return time.process_time() - began


def count_preset(
    name: str, precision: str, more: list[str], host: PluginHost, stub: Stub
) -> tuple[dict[str, float], Counter[str]]:
    preset = PRESETS[name]
    # A line of the log reads numbers of the device, which is no part of a steady step.
    settings = [*preset.settings(precision, small=False), "logging.log_interval=1000", *more]
    run = TimedRun(settings, preset.preset, host)
    try:
        found, launched = count_step(run, stub)
    finally:
        run.close()
    machine = get_machine("h200")
    plan = Planner(run.trainer.config, host, machine).plan(run.trainer.config, 1)
    found["planned_gb"] = plan.largest.total / 1e9
    return found, launched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("presets", nargs="+", choices=list(PRESETS))
    parser.add_argument("--precision", default="bf16", choices=list(PRECISIONS))
    parser.add_argument("--set", action="append", default=[], dest="more", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--launches", action="store_true", help="print what is launched, copied and waited for too")
    options = parser.parse_args()
    host, stub = load_plugins(), Stub()
    for name in options.presets:
        found, launched = count_preset(name, options.precision, options.more, host, stub)
        print(json.dumps({"preset": name, **{kind: round(value, 2) for kind, value in found.items()}}))
        if options.launches:
            for what, times in launched.most_common():
                print(f"{times:6d}  {what}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
