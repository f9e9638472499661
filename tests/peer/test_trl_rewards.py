"""TRL's reward functions, run unchanged in our worker processes, and the registered ones beside them, give TRL's
values."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.peer.environment import python_beside_this

SCRIPT = Path(__file__).parent / "trl_process" / "rewards.py"
FUNCTIONS = (
    *("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"),
    *("get_cosine_scaled_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("math_verify")
    out = tmp_path_factory.mktemp("trl") / "rewards.json"
    python = python_beside_this("trl>=1.16,<1.17", "accelerate", "datasets")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(python), str(SCRIPT), str(out)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_runs_unchanged(found: Any, name: str) -> None:
    rewards = found["rewards"][name]
    assert rewards["unchanged"] == rewards["theirs"]
    assert len({*rewards["theirs"]}) > 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_registered_reward_has_the_same_values(found: Any, name: str) -> None:
    rewards = found["rewards"][name]
    assert rewards["registered"] == pytest.approx(rewards["theirs"], abs=1e-12)


def test_columns_that_functions_log_arrive(found: Any) -> None:
    assert found["columns"]["gold_parsed"][1] == "[incomplete reasoning]"
