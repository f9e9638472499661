"""One side as a process: `python bench/tune_steps/run_side.py SIDE CASE FOLDER THREADS`; SIDE is mt_side,
trl_side or material.

Every line of standard input asks for one step, which a line of standard output answers with its times. Runs in the
environment of the side: mt's packages or the peers are imported only where they are asked for.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch


class Clock:
    """Begins at a line of input; ends with a line of output."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what a side prints is no answer

    def begin(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self.wall, self.processor = time.perf_counter(), time.process_time()

    def end(self, loss: float, tokens: int) -> None:
        wall, processor = time.perf_counter() - self.wall, time.process_time() - self.processor
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found = {"wall": wall, "processor": processor, "loss": loss, "tokens": tokens, "peak_mib": peak}
        print(json.dumps(found), file=self.answers)


def main() -> None:
    side, case, folder, threads = sys.argv[1:]
    module = importlib.import_module(side)
    torch.set_num_threads(int(threads))
    if side == "material":
        module.write(Path(folder))
        return
    clock = Clock()
    module.run(case, Path(folder), clock.begin, clock.end)


if __name__ == "__main__":
    main()
