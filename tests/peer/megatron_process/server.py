"""Megatron-Core as a process that is asked: imports it once, then forks the ranks of each job.

Standard input has a line for each job: a folder with `request.pt`. The ranks write `rank_N.log` there, and the one that
has the answer `result.pt`. A line of standard output tells how it went: `{"error": null}` or the end of a log.
Each job has processes of its own, since Megatron keeps its arguments, groups and random streams in globals.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

SECONDS = 180.0
TAIL = 6000


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Megatron prints is no answer
    import cuda_on_cpu
    import local_hybrid_layers

    cuda_on_cpu.apply_before_import()
    local_hybrid_layers.install_kernels()
    import megatron.core
    import megatron.training.training  # what a rank needs, so that it is there when it is forked

    cuda_on_cpu.apply_after_import()
    print(json.dumps({"version": megatron.core.__version__}), file=answers)
    for line in sys.stdin:
        folder = Path(json.loads(line)["folder"])
        print(json.dumps({"error": run(folder)}), file=answers)


def run(folder: Path) -> str | None:
    """The end of the log of the rank that failed first; None when all are well."""
    import torch

    world_size = torch.load(folder / "request.pt")["world_size"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {fork_rank(folder, rank, world_size, port): rank for rank in range(world_size)}
    failed = wait(ranks, time.monotonic() + SECONDS)
    return None if failed is None else f"rank {failed}: " + (folder / f"rank_{failed}.log").read_text()[-TAIL:]


def fork_rank(folder: Path, rank: int, world_size: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(folder / f"rank_{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
        import jobs

        jobs.run(folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(ranks: dict[int, int], deadline: float) -> int | None:
    """The first rank that failed or was too slow; the others are ended then."""
    left = dict(ranks)
    while left:
        for child in list(left):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                rank = left.pop(child)
                if status:
                    end(left)
                    return rank
        if time.monotonic() > deadline:
            end(left)
            return min(left.values())
        time.sleep(0.005)
    return None


def end(ranks: dict[int, int]) -> None:
    for child in ranks:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
