"""For tests that start ranks themselves: ports that the system chooses, and positions that others can read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mt_core.launch.monitor import position_key
from mt_core.launch.phases import Position
from mt_core.launch.process_group import connect_store
from mt_core.launch.session import RankSession

SECONDS = 120.0


def store_at_any_port(report: Callable[[int], None]) -> Callable[..., dist.TCPStore]:
    """In place of dist.TCPStore: one that serves takes a port that the system chooses and reports it. A port that is
    looked for before could be another program's by then."""
    build = dist.TCPStore

    def store(address: str, port: int, *, is_master: bool, **options: Any) -> dist.TCPStore:
        made = build(address, 0 if is_master else port, is_master=is_master, **options)
        if is_master:
            report(made.port)
        return made

    return store


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_until_published(session: RankSession) -> None:
    """Until the other ranks can read where this one is, which its monitor writes once a second. Not on the rank that
    serves the store."""
    store, key = connect_store(session.environment, SECONDS), position_key(session.environment.rank)
    wait_until(lambda: Position.from_json(store.get(key)).entered == session.phases.position.entered)
