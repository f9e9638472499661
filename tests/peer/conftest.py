"""Tests that ask the real Megatron-Core what it computes from our files; see README.md beside this file."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.peer.environment import peer_python
from tests.peer.megatron import Megatron

from mt_core.plugins import PluginHost, load_plugins


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of this folder; without `-m peer` they are not run."""
    here = Path(__file__).parent
    asked = [item for item in items if here in item.path.parents]
    for item in asked:
        item.add_marker(pytest.mark.peer)
    if asked and "peer" not in config.option.markexpr:
        config.hook.pytest_deselected(items=asked)
        items[:] = [item for item in items if here not in item.path.parents]


@pytest.fixture(scope="session")
def megatron() -> Iterator[Megatron]:
    process = Megatron(peer_python())
    yield process
    process.close()


@pytest.fixture(scope="session")
def host() -> PluginHost:
    return load_plugins()
