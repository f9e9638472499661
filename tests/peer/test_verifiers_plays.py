"""The real verifiers plays episodes of its tasks with our environment: prompts, tools, users, and scores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.peer.environment import environment_with

FOLDER = Path(__file__).parent / "verifiers_process"
SOURCES = sorted((Path(__file__).parents[2] / "packages").glob("*/src"))
REQUIREMENTS = ("verifiers>=0.4,<0.5", "lazy-loader", "pluggy")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("verifiers") / "episodes.json"
    given = os.environ.get("MT_PEER_VERIFIERS")
    python = Path(given) if given else environment_with(REQUIREMENTS, sys.version.partition(" ")[0], sys.executable)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*SOURCES, FOLDER]))}
    script = str(FOLDER / "episodes.py")
    done = subprocess.run(
        [str(python), script, str(out)], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def test_rows_have_the_prompts_of_tasks(found: Any) -> None:
    prompt = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 1?"}]
    assert found["rows"][1] == {"prompt": prompt, "item": 1}
    assert found["right"]["prompt"] == prompt


@pytest.mark.parametrize(("turn", "reward"), [("right", 1.0), ("wrong", 0.0)])
def test_an_answer_has_the_score_of_its_task(found: Any, turn: str, reward: float) -> None:
    (reply,) = found[turn]["replies"]
    assert reply["messages"] == []
    assert reply["reward"] == reward
    assert reply["metrics"] == {"verifiers/right": reward, "verifiers/turns": 1.0}


def test_the_model_calls_tools(found: Any) -> None:
    (tool,) = found["tool"]["tools"]
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    called, answered = found["tool"]["replies"]
    ((message,), reward) = called["messages"], answered["reward"]
    assert (message["role"], message["content"], called["reward"]) == ("tool", "4", None)
    assert (reward, answered["metrics"]["verifiers/turns"]) == (1.0, 2.0)


def test_a_turn_that_was_cut_off_is_scored_without_its_text(found: Any) -> None:
    reply = found["cut"]["replies"][-1]
    assert (reply["messages"], reply["reward"]) == ([], 0.0)


def test_an_environment_speaks_as_a_user(found: Any) -> None:
    asked, answered = found["user"]["replies"]
    assert [(one["role"], one["content"]) for one in asked["messages"]] == [("user", "More politely.")]
    assert answered["reward"] == 0.5


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("other prompt", "EpisodeError: verifiers: the row's prompt is not that of task 0"),
        ("no item", "EpisodeError: verifiers: the column item is 3; it is the number of a task, 0 to 2"),
        ("no taskset", "ConfigError: rl.environment_options.verifiers: taskset 'not_installed' not found"),
        ("unknown key", "agents"),
    ],
)
def test_what_is_refused(found: Any, what: str, words: str) -> None:
    assert words in found[what]
