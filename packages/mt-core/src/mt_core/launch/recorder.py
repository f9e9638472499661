"""Ends a failed rank: write the record, announce the failure to the other ranks, exit without cleanup."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from mt_core.launch.environment import RankEnvironment
from mt_core.launch.failure import Failure, describe_failure, followed_by, report, write_failure
from mt_core.launch.phases import Phases

FAILED = "failed"
ELASTIC_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
STORE_SECONDS = 5.0
LINGER_SECONDS = 3.0
"""How long a failed rank that serves the store keeps serving, so that others learn of the failure. Under
torchrun the other ranks wait as long: torchrun reports the first process that exits as the cause."""


def announce(store: dist.Store, failure: Failure) -> Failure:
    """Announce a failure through the store; returns the one announced first. Raises dist.DistError."""
    # compare_set with "" sets the key if it is absent, and returns what is there: an atomic choice of the first
    # failure.
    return Failure.from_json(store.compare_set(FAILED, "", failure.to_json()))


class FailureRecorder:
    """Handles the failure of a rank, from its main thread or its monitor thread; the first call wins."""

    def __init__(self, environment: RankEnvironment, folder: Path | None, phases: Phases) -> None:
        self.environment = environment
        self.folder = folder
        self.phases = phases
        self._store: dist.Store | None = None
        self._leaving = threading.Lock()

    def use_store(self, store: dist.Store) -> None:
        """Uses a separate connection: a blocking store call of another thread holds its connection."""
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=STORE_SECONDS))

    def fail(self, error: BaseException) -> NoReturn:
        """End this rank because of an exception."""
        failure = describe_failure(error, self.environment, self.phases.position)
        # torchrun shows the error file of one rank: that of the cause.
        if not failure.followed:
            _tell_elastic(error, os.environ)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self.leave(failure)

    def leave(self, failure: Failure) -> NoReturn:
        """End this rank with a record, without destructors and cleanup of process groups, which could block."""
        self._leaving.acquire()  # never released: a second thread blocks here until the process exits
        write_failure(failure, self.folder)
        # After the file: the announcement may take seconds, or the process may be killed meanwhile.
        first = self._announce(failure)
        if first.rank != failure.rank and failure.followed and failure.cause is None:
            failure = followed_by(failure, first)
            write_failure(failure, self.folder)
        self._show(failure, first)
        if self.environment.serves_store or (failure.followed and self.environment.launcher == "torchrun"):
            time.sleep(LINGER_SECONDS)
        # sys.exit would run destructors of process groups, which wait for the peers.
        os._exit(failure.exit_code or 1)

    def _announce(self, failure: Failure) -> Failure:
        """The failure that was announced first: this one, or another rank's."""
        if self._store is None:
            return failure
        try:
            return announce(self._store, failure)
        except dist.DistError:  # the store is unreachable too
            return failure

    def _show(self, failure: Failure, first: Failure) -> None:
        """Print to standard error, unless the mt launcher collects and shows the records."""
        if self.environment.launcher == "mt":
            return
        cause = first if failure.cause is None else Failure.from_dict(failure.cause)
        if cause.rank == failure.rank:
            text = report([failure])
        else:
            text = f"{failure.where} ended after {cause.where}: {failure.exception}\n"
        os.write(2, text.encode())


def _tell_elastic(error: BaseException, environ: Mapping[str, str]) -> None:
    """Write the error file that torchrun shows."""
    if environ.get(ELASTIC_ERROR_FILE):
        from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

        with contextlib.suppress(OSError):
            ErrorHandler().record_exception(error)
