"""Tests that ask the real Megatron-Core what it computes from our files; see README.md beside this file."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator

import pytest
from tests.peer.environment import peer_python
from tests.peer.megatron import Megatron

from mt_core.plugins import PluginHost, load_plugins

FOLDER = "tests/peer/"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of this folder; without `-m peer` they are not run."""
    asked = [item for item in items if item.nodeid.startswith(FOLDER)]
    for item in asked:
        item.add_marker(pytest.mark.peer)
    if asked and "peer" not in config.option.markexpr:
        config.hook.pytest_deselected(items=asked)
        items[:] = [item for item in items if not item.nodeid.startswith(FOLDER)]


@pytest.fixture(scope="session")
def megatron() -> Iterator[Megatron]:
    process = Megatron(peer_python())
    yield process
    process.close()


@pytest.fixture(scope="session")
def host() -> PluginHost:
    return load_plugins()
