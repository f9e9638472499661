"""How soon `mt train` has done its first optimizer step, beside what importing torch takes.

    uv run python bench/first_step.py [--rounds 5]

The time of mt is that of the whole process `mt train` with the preset gpt-tiny, stopped after its first step, so
it also holds the checkpoint of that step and the end of the process. Runs are interleaved; medians are printed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 2.0
"""Seconds beside importing torch."""


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    imports, trainings = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            imports.append(seconds([sys.executable, "-c", "import torch"]))
            run_dir = Path(folder) / str(number)
            command = [sys.executable, "-m", "mt_cli", "train", "--run-dir", str(run_dir)]
            trainings.append(seconds([*command, "--set", "train.exit_iteration=1"]))
    base, train = statistics.median(imports), statistics.median(trainings)
    print(f"Python {sys.version.split()[0]}, medians of {rounds} interleaved rounds")
    print(f"import torch                       {base:6.2f} s")
    print(f"mt train, stopped after one step   {train:6.2f} s")
    print(f"beside importing torch: {train - base:.2f} s (limit {LIMIT:.0f} s)")


if __name__ == "__main__":
    main()
