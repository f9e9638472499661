"""The pretraining recipes of Megatron-Bridge, dumped by itself: they import, and what imports trains.

The version is the last whose recipes have the sizes of their models; later ones ask a hub for them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.peer.environment import installed_alone
from tests.peer.test_megatron_scripts import GOAL, imported, train_small

from mt_core.plugins import PluginHost

BRIDGE = "megatron-bridge==0.1.0rc0"
OTHERS = (
    *("megatron-core==0.14.0", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3", "nvidia-modelopt==0.47.0"),
    *("hydra-core==1.3.8", "timm==1.0.31", "einops", "psutil", "datasets", "dill", "multiprocess", "pandas", "pyarrow"),
    *("fsspec", "aiohttp", "httpx", "pytz", "python-dateutil", "six", "tzdata", "xxhash"),
    "nvidia-resiliency-ext",
)
"""What its modules import, each without what it needs in turn: torch and transformers are those of the tests."""
DUMP = Path(__file__).parent / "bridge_process" / "dump_recipes.py"
REFUSED: Mapping[str, str] = {
    "llama4_e128": "attention within chunks of the sequence",
    "llama4_e16": "attention within chunks of the sequence",
}
"""Recipe -> words of the reason why it cannot be imported."""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("recipes")
    # Megatron-Bridge first: both it and Megatron-Core have a namespace package `megatron`.
    paths = [installed_alone(requirement) for requirement in (BRIDGE, *OTHERS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(DUMP), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return sorted(folder.glob("*.yaml"))


def test_recipes_import_and_train(recipes: list[Path], host: PluginHost, tmp_path: Path) -> None:
    failed: dict[str, str] = {}
    seen = set[str]()
    for path in recipes:
        result, why = imported(path, host)
        if result is None:
            failed[path.stem] = why
        else:
            train_small(result, host, seen, tmp_path)
    assert len(recipes) > 25
    assert len(seen) > 10
    assert {name: why for name, why in failed.items() if REFUSED.get(name, "?") not in why} == {}
    assert 1 - len(failed) / len(recipes) >= GOAL
