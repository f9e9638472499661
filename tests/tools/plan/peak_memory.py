"""Peaks of training steps as torch's allocator counts them, and as planned: [[allocated, planned], ...] for the cases
in the JSON of the argument, [[preset, precision, settings], ...]. Runs on the stub of CUDA."""

from __future__ import annotations

import gc
import json
import sys

import torch

from mt_core.plugins import PluginHost, load_plugins
from mt_tools.bench.training import TimedRun
from mt_tools.bench.training_presets import PRESETS
from mt_tools.plan.layouts import Planner
from mt_tools.plan.machines import get_machine


def peaks(preset: str, precision: str, settings: list[str], host: PluginHost) -> tuple[float, float]:
    # A line of the log would read numbers of the device.
    given = [*PRESETS[preset].settings(precision, small=False), "logging.log_interval=1000", *settings]
    run = TimedRun(given, PRESETS[preset].preset, host)
    try:
        # The first step makes the optimizer's state.
        run.step()
        torch.cuda.reset_peak_memory_stats()
        run.step()
        config = run.trainer.config
    finally:
        run.close()
    allocated = float(torch.cuda.max_memory_allocated())
    return allocated, Planner(config, host, get_machine("h200")).plan(config, 1).largest.total


def main() -> None:
    host, found = load_plugins(), []
    for case in json.loads(sys.argv[1]):
        found.append(peaks(*case, host))
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
