"""The cost of looking at runs: a report of 100 runs with 100,000 steps each, and `mt watch` beside a run.

    python bench/run_views.py [--runs 100] [--steps 100000] [--interval 10] [--seconds 30]

Prints the seconds and megabytes of the report, and the percentage of a core that the terminal view of a run takes which
writes a line of its log each two seconds and the status of 8 ranks each second. Goals: 20 s, 20 MB, 3 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from mt_ops.reading.opening import open_runs
from mt_ops.report.page import report

RANKS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--interval", type=int, default=10, help="logging.log_interval")
    parser.add_argument("--seconds", type=float, default=30.0, help="of watching")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mt-run-views-"))
    try:
        paths = [
            write_run(folder / f"run-{number:03}", options.steps, options.interval, number)
            for number in range(options.runs)
        ]
        began, before = time.perf_counter(), cpu_seconds()
        page = report(open_runs(paths))
        seconds, computed = time.perf_counter() - began, cpu_seconds() - before
        what = f"{options.runs} runs of {options.steps:,} steps, a line each {options.interval}"
        took = f"{seconds:.1f} s, {computed:.1f} CPU seconds, {len(page) / 1e6:.1f} MB"
        print(f"report of {what}: {took} (goals 20 s, 20 MB)")
        share = asyncio.run(watch(paths[0], options.steps, options.seconds))
        print(f"mt watch: {share:.2%} of a core over {options.seconds:g} s (goal 3 %)")
    finally:
        shutil.rmtree(folder)


def cpu_seconds() -> float:
    """Of this process and those that it has ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def write_run(folder: Path, steps: int, interval: int, seed: int) -> Path:
    """A run directory with all metrics of a decoder on a GPU, and noise that does not compress."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    at = np.arange(interval, steps + 1, interval)
    losses = 2 + 8 * (at + 50.0) ** -0.3 + random.normal(0, 0.03, len(at))
    norms, times = np.exp(random.normal(-0.5, 0.3, len(at))), random.gamma(50, 0.01, len(at))
    elapsed = np.cumsum(times * interval)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for place, step in enumerate(at.tolist()):
            file.write(json.dumps(_line(step, losses[place], norms[place], times[place], elapsed[place])) + "\n")
    (folder / "config.json").write_text(json.dumps({"train": {"train_iters": 2 * steps}, "data": {"seq_length": 2048}}))
    return folder


def _line(step: int, loss: float, norm: float, seconds: float, elapsed: float) -> dict[str, object]:
    return {
        "kind": "train",
        "iteration": step,
        "consumed_samples": 256 * step,
        "global_batch_size": 256,
        "loss": loss,
        "grad_norm": norm,
        "learning_rate": 3e-4 / (1 + step / 1e5),
        "loss_scale": 1.0,
        "skipped_iterations": 0,
        "iteration_time": seconds,
        "tokens_per_second": 524288 / seconds,
        "skipped_since_log": 0,
        "tflops": 200 / seconds,
        "mfu": 0.2 / seconds,
        "time": 1.7e9 + elapsed,
        "elapsed": elapsed,
        "parts": {"forward": 0.3 * seconds, "backward": 0.6 * seconds, "data_wait": 0.001},
    }


async def watch(folder: Path, step: int, seconds: float) -> float:
    """CPU seconds of this process over seconds, while another writes."""
    from mt_ops.watch.terminal import WatchApp
    from mt_ops.watch.watched_run import WatchedRun

    writer = os.fork()
    if writer == 0:
        _write_on(folder, step)
    try:
        app = WatchApp(WatchedRun(folder), 2.0)
        async with app.run_test(size=(120, 45)):
            await asyncio.sleep(2.0)
            before = time.process_time()
            await asyncio.sleep(seconds)
            return (time.process_time() - before) / seconds
    finally:
        os.kill(writer, 9)
        os.waitpid(writer, 0)


def _write_on(folder: Path, step: int) -> None:
    """Until it is killed."""
    (folder / "status").mkdir(exist_ok=True)
    for second in range(10**6):
        for rank in range(RANKS):
            entry = {"time": time.time(), "rank": rank, "iteration": step, "phase": "step", "since": time.time() - 0.2}
            entry |= {"parts": {"forward": 3.0, "communication": 1.0}, "host": "node", "memory_bytes": 2**34}
            draft = folder / f"status/rank-{rank}.part"
            draft.write_text(json.dumps(entry))
            draft.replace(folder / f"status/rank-{rank}.json")
        if second % 2:
            step += 10
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(_line(step, 2.5, 0.6, 0.5, 5.0 * step)) + "\n")
        time.sleep(1.0)


if __name__ == "__main__":
    main()
