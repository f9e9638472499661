"""One contender as a process: `python bench/peer_steps CONTENDER CASE THREADS`.

Every line of standard input asks for one step, which a line of standard output answers with its times. Runs in the
environment of the contender: mt's packages or the peers are imported only where they are asked for.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable

import torch
from cases import CASES, Case
from torch import Tensor


class Clock:
    """Begins at a line of input; ends with a line of output."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what a contender prints is no answer

    def begin(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self.wall, self.processor = time.perf_counter(), time.process_time()

    def end(self, loss: float) -> None:
        wall, processor = time.perf_counter() - self.wall, time.process_time() - self.processor
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"wall": wall, "processor": processor, "loss": loss, "peak_mib": peak}), file=self.answers)


def random_ids(case: Case) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda: torch.randint(0, case.vocab, (case.batch, case.sequence + 1), generator=generator)


def main() -> None:
    contender, case, threads = importlib.import_module(sys.argv[1]), CASES[sys.argv[2]], int(sys.argv[3])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock, draw = Clock(), random_ids(case)
    # transformers' Trainer owns its loop; the others give a function of one step.
    if hasattr(contender, "run"):
        contender.run(case, draw, clock.begin, clock.end)
        return
    step, parameters = contender.build(case)
    print(f"{sys.argv[1]}: {parameters:,} parameters", file=sys.stderr)
    while True:
        # Before the clock begins: the data are not part of the step.
        ids = draw()
        clock.begin()
        clock.end(step(ids))


if __name__ == "__main__":
    main()
