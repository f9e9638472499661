"""Reward functions in processes: deadlines, processes that end, memory, restarts, what the user reads.

Costs 0.1 s for each process, which imports no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mt_core.errors import ConfigError, PluginError
from mt_core.plugins import load_plugins
from mt_tune.rewards.base import RewardError, RewardSample
from mt_tune.rewards.build import build_rewards
from mt_tune.rewards.config import RewardsConfig
from mt_tune.rewards.scoring import RewardFunctions

HOSTILE = str(Path(__file__).with_name("hostile.py"))


def samples_of(*completions: str, **row: Any) -> list[RewardSample]:
    return [RewardSample(f"ask {text}", text, [1], [2], row) for text in completions]


def build(*functions: str, **keys: Any) -> RewardFunctions:
    config = RewardsConfig(functions=list(functions), modules=[HOSTILE], **{"workers": 2, **keys})
    return build_rewards(config, load_plugins())


@pytest.fixture(scope="module")
def each() -> Iterator[RewardFunctions]:
    with build("hostile:each", deadline_seconds=0.5, memory_mb=200) as functions:
        yield functions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("sleep", "took longer than 0.5 s (rewards.deadline_seconds) and was ended"),
        ("spin", "took longer than 0.5 s (rewards.deadline_seconds) and was ended"),
        ("exit", "ended its process with status 3"),
        ("leave", "ended its process with status 4"),
        ("abort", "was ended by SIGABRT"),
        ("memory", "raised MemoryError (hostile.py, line 16); its process may take 200 MiB (rewards.memory_mb)"),
        ("raise", "raised IndexError: list index out of range (hostile.py, line 17)"),
    ],
)
def test_the_sample_is_named_and_other_calls_go_on(each: RewardFunctions, behaviour: str, reason: str) -> None:
    with pytest.raises(RewardError) as raised:
        each.score(samples_of("a", "bb", behaviour, "ccc"), 0)
    assert (raised.value.sample, raised.value.reason) == (2, reason)
    assert str(raised.value) == f"reward \"each\", sample 2 (prompt 'ask {behaviour}'): {reason}"
    assert each.score(samples_of("a", "bb"), 0).values == {"each": [1.0, 2.0]}


@pytest.mark.slow
def test_results_of_a_wrong_number_are_refused() -> None:
    with build("hostile:too_few") as functions, pytest.raises(RewardError, match="returned 1 rewards for 2 samples"):
        functions.score(samples_of("a", "b"), 0)


@pytest.mark.slow
def test_skipped_samples_have_no_reward_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with build("hostile:each", "hostile:together", on_failure="skip", deadline_seconds=0.5) as functions:
        table = functions.score(samples_of("a", "exit", "bad", "sleep"), 0)
    assert table.values["each"] == [1.0, None, 3.0, None]
    # Judged again without the bad one: shares are of the other three.
    assert table.values["together"] == [1 / 10, 4 / 10, None, 5 / 10]
    assert table.metrics["rewards/each/failed"] == 2
    assert "left out: reward \"each\", sample 1 (prompt 'ask exit'): ended its process with status 3" in caplog.text


@pytest.mark.slow
def test_processes_import_no_torch() -> None:
    with build("hostile:has_torch", "think_format", workers=1) as functions:
        assert functions.score(samples_of("a"), 0).values["has_torch"] == [0.0]


@pytest.mark.slow
def test_calls_are_divided_among_processes() -> None:
    with build("hostile:process", samples_per_call=1, workers=2) as functions:
        found = {value for _ in range(5) for value in functions.score(samples_of(*"abcdef"), 0).values["process"]}
    assert len(found) == 2
    assert os.getpid() not in found


@pytest.mark.slow
def test_a_function_of_options_labels_and_verls_signature() -> None:
    keys = {"options": {"twice": {"factor": 2.0}, "thrice": {"factor": 3.0}}}
    with build("twice=hostile:times", "thrice=hostile:times", "hostile.compute_score", **keys) as functions:
        table = functions.score(samples_of("a", "bb", reward_model={"style": "rule", "ground_truth": "bb"}), 0)
    assert table.values == {"twice": [2.0, 4.0], "thrice": [3.0, 6.0], "compute_score": [0.0, 1.0]}
    assert table.logged == {"length": 1.5}


@pytest.mark.slow
def test_a_row_without_ground_truth_is_named() -> None:
    with build("hostile:compute_score", workers=1) as functions, pytest.raises(RewardError) as raised:
        functions.score(samples_of("a"), 0)
    assert raised.value.sample == 0
    assert 'neither reward_model["ground_truth"] nor ground_truth' in str(raised.value)


@pytest.mark.slow
def test_processes_of_a_function_end_with_it(tmp_path: Path) -> None:
    file = tmp_path / "processes"
    with build("hostile:starts_a_child", deadline_seconds=0.5, workers=1) as functions, pytest.raises(RewardError):
        functions.score(samples_of("a", file=str(file)), 0)
    assert_gone(file.read_text().split())


@pytest.mark.slow
def test_a_function_that_never_returns_ends_with_training(tmp_path: Path) -> None:
    """Training is killed while a function holds the interpreter's lock."""
    (tmp_path / "spin.py").write_text(
        "import os, re\n"
        "def spin(completions, file, **kwargs):\n"
        "    open(file[0], 'w').write(str(os.getpid()))\n"
        "    return [float(bool(re.match('(a+)+$', 'a' * 60 + 'b')))]\n"
    )
    script = f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_processes import *
        keys = RewardsConfig(functions=["spin:spin"], modules=[{str(tmp_path / "spin.py")!r}], workers=1)
        build_rewards(keys, load_plugins()).score(samples_of("a", file={str(tmp_path / "number")!r}), 0)
    """
    training = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    while not (tmp_path / "number").exists() or not (tmp_path / "number").read_text():
        time.sleep(0.05)
        assert training.poll() is None
    training.kill()
    training.wait()
    assert_gone([(tmp_path / "number").read_text()])


def assert_gone(processes: list[str]) -> None:
    end = time.monotonic() + 20
    while any(running(process) for process in processes):
        assert time.monotonic() < end, processes
        time.sleep(0.02)


def running(process: str) -> bool:
    """A zombie has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_process_that_ended_between_two_calls_is_replaced() -> None:
    with build("hostile:process", workers=1) as functions:
        [first] = functions.score(samples_of("a"), 0).values["process"]
        os.kill(int(first), 9)
        time.sleep(0.1)
        [second] = functions.score(samples_of("a"), 0).values["process"]
    assert first != second


@pytest.mark.parametrize(
    ("functions", "keys", "words"),
    [
        ([], {}, "rewards.functions is empty"),
        (["os:getpid"], {}, 'runs code of the module os, which rewards.modules='),
        (["hostile:each", "hostile:each"], {}, 'name one of them as "LABEL=each"'),
        (["hostile:each"], {"weights": [1.0, 2.0]}, "rewards.weights has 2 factors for 1 functions"),
        (["hostile:each"], {"options": {"eech": {}}}, 'rewards.options.eech: rewards.functions has no eech (did you'),
        (["hostile:none"], {"workers": 0}, "none: cannot be imported: AttributeError"),
    ],
)  # fmt: skip
def test_keys_that_cannot_be(functions: list[str], keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build(*functions, **keys)
    assert words in str(raised.value)


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    keys = RewardsConfig(functions=["broken:f"], modules=[str(tmp_path / "broken.py")], workers=1)
    with pytest.raises(ConfigError, match="f: cannot be imported: ModuleNotFoundError: No module named"):
        build_rewards(keys, load_plugins())


def test_a_name_that_nobody_registers() -> None:
    with pytest.raises(PluginError, match=r"rewards.functions=acuracy needs a reward named"):
        build("acuracy")
