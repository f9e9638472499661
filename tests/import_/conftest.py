"""What tests of mt import share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mt_core.plugins import PluginHost, load_plugins

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="session")
def host() -> PluginHost:
    return load_plugins()


@pytest.fixture(scope="session")
def golden() -> Path:
    """Checkpoints that Megatron wrote."""
    folder = os.environ.get("MT_GOLDEN")
    if folder is None:
        pytest.skip("MT_GOLDEN names no folder with files that Megatron wrote")
    return Path(folder) / "ckpt"
