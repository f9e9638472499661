"""Run a function on several ranks of this machine: for our tests, and for those of plugins.

    from mt_core.testing import run_ranks

    def total(rank, world):
        value = torch.tensor(float(rank))
        torch.distributed.all_reduce(value)
        return value.item()

    assert run_ranks(4, total) == [6.0] * 4

Ranks are processes forked from a server that has imported torch once, so that a test costs a fraction of a
second. They talk over gloo and use one thread each.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

PRELOADED = [
    "torch",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "mt_core.train.trainer",
]

TEST_LIBRARIES = ["pytest", "hypothesis"]
"""What test modules import, and so each rank that runs a function of theirs: preloaded where the caller has it."""

LAST_PRELOADED = "mt_core._preload"
"""Freezes what has been imported, for the garbage collector."""

SECONDS_TO_END = 5.0

TRITON_INTERPRET = "TRITON_INTERPRET"


class RankFailureError(Exception):
    """A rank raised or died; the message holds its traceback."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `function(rank, world_size, *args)` on each rank; returns what the ranks returned, by rank.

    function and args must be picklable (a module's function). Raises RankFailureError with the traceback of the
    first rank that failed, and TimeoutError when a rank has not ended after `timeout` seconds.
    """
    from torch.distributed import TCPStore

    context = rank_context()
    # Held here, so that it outlives every rank. Port 0: the system chooses a free one.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(target=_rank_main, args=(rank, world_size, store.port, sender, function, args), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    # Only the rank then holds the sending end, so that its death closes the pipe and recv raises EOFError.
    for _, sender in pipes:
        sender.close()
    try:
        results = _collect([receiver for receiver, _ in pipes], timeout)
        for process in processes:
            process.terminate()  # lets coverage, where it measures, save what it has
            process.join(SECONDS_TO_END)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def rank_context() -> ForkServerContext:
    """Makes processes by forking the server that ranks are forked from, which is started if it does not run yet."""
    context = multiprocessing.get_context("forkserver")
    libraries = [name for name in TEST_LIBRARIES if name in sys.modules]
    context.set_forkserver_preload([*PRELOADED, *libraries, LAST_PRELOADED])
    _start_server()
    return context


def _start_server() -> None:
    """Start the server, if it does not run yet, with Triton's interpreter on: what it has imported its ranks cannot
    import otherwise, and on a CPU kernels only run interpreted."""
    # The server inherits the environment of the moment it is started.
    before = os.environ.get(TRITON_INTERPRET)
    os.environ[TRITON_INTERPRET] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[TRITON_INTERPRET]
        else:
            os.environ[TRITON_INTERPRET] = before


def _collect(receivers: Sequence[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    open_ = {receiver: rank for rank, receiver in enumerate(receivers)}
    end = time.monotonic() + timeout
    while open_:
        ready = wait(list(open_), max(end - time.monotonic(), 0.0))
        if not ready:
            raise TimeoutError(f"ranks {sorted(open_.values())} of {len(receivers)} are still busy after {timeout:g} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = open_.pop(receiver)
            try:
                # From a process that this one has started, of the caller's own function.
                outcome, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                raise RankFailureError(f"rank {rank} died") from None
            if outcome == "error":
                raise RankFailureError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _rank_main(
    rank: int, world_size: int, port: int, sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        value = function(rank, world_size, *args)
        # Bytes, since tensors sent as objects would live in memory that this rank takes with it.
        result = pickle.dumps(("result", value))
        # No rank leaves while others still communicate with it.
        dist.barrier()
        dist.destroy_process_group()
        sender.send_bytes(result)
    except BaseException:
        sender.send_bytes(pickle.dumps(("error", traceback.format_exc())))
    finally:
        sender.close()
