"""Ranks forked from a process that has imported transformers and mt_accelerate, which takes each of them two seconds
otherwise."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.accelerate.programs import FAMILIES, build

from mt_core import testing


class TransformersRanks:
    """The process that ranks are forked from; itself forked from the server of `run_ranks`."""

    def __init__(self) -> None:
        context = testing.rank_context()
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_serve, args=(end,))
        self._process.start()
        end.close()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """As `run_ranks`; raises RankFailureError with the traceback of any error."""
        self._pipe.send((world_size, function, args, timeout))
        failed, value = self._pipe.recv()
        if failed:
            raise testing.RankFailureError(value)
        return list(value)

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection) -> None:
    import mt_accelerate.accelerator  # noqa: F401

    for family in (*FAMILIES, "mixtral"):
        build(family)
    gc.freeze()
    testing.rank_context = lambda: multiprocessing.get_context("fork")  # type: ignore[assignment,return-value]
    while True:
        try:
            world_size, function, args, timeout = pipe.recv()
        except EOFError:
            return
        try:
            outcome = (False, testing.run_ranks(world_size, function, *args, timeout=timeout))
        except Exception:
            outcome = (True, traceback.format_exc())
        pipe.send(outcome)
