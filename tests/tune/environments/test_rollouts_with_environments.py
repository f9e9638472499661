"""Completions with environments: tokens and masks, processes that are ended, and runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tune.environments import counting
from tests.tune.environments.test_episodes import END, PROMPT, call, encoder_of, ids
from tests.tune.rl.runs import config

from mt_core.errors import ConfigError, DataError
from mt_core.plugins import load_plugins
from mt_core.train import Trainer
from mt_tune.environments.base import EpisodeError
from mt_tune.environments.pool import DialoguePool, DialogueProcesses, DialoguesHere
from mt_tune.environments.schemas import function_schema
from mt_tune.environments.setup import source_setup
from mt_tune.rl.config import RLConfig
from mt_tune.rl.episodes import EpisodeLimits, Episodes
from mt_tune.rl.prompts import Prompt
from mt_tune.rl.rollout import Group, Rollout
from mt_tune.rl.rollout_file import ROLLOUTS_FILE, read_rollouts
from mt_tune.rl.row_values import plain_row

MODULE = str(Path(counting.__file__))
HOST = load_plugins()


def setup_of(environments: list[str], tools: tuple[str, ...] = (), **options: Any) -> Any:
    return source_setup(environments, tools, options, [MODULE], HOST)


@contextmanager
def processes(environment: str, **options: Any) -> Iterator[DialoguePool]:
    """3 at a time."""
    keys = {"most": 3, "deadline_seconds": 20.0, "memory_mb": 512, **options}
    pool = DialogueProcesses(setup_of([environment]), **keys)
    try:
        yield pool
    finally:
        pool.close()


def episodes_of(pool: DialoguePool, **limits: Any) -> Episodes:
    keys = {"max_turns": None, "most": 400, "positions": 2000, "skip_failures": False, **limits}
    return Episodes(pool, encoder_of(), EpisodeLimits(**keys))


def group(*targets: int) -> list[Group]:
    return [
        Group(Prompt((1,), [*PROMPT], {"target": target}, "p.jsonl", number + 1), number, [Rollout()])
        for number, target in enumerate(targets)
    ]


def play(episodes: Episodes, groups: list[Group], turn: Any) -> None:
    """Draws turns as a model would: turn(rollout, number of the turn) -> text, of which the end is drawn too."""
    episodes.begin(groups)
    turns: dict[int, int] = {}
    while episodes.is_busy:
        for rollout in episodes.ready(wait=True):
            number = turns[id(rollout)] = turns.get(id(rollout), 0) + 1
            for token in [*ids(turn(rollout, number)), *ids(END)]:
                rollout.add(token, -0.5, 7)
            episodes.end_turn(rollout, "stop")


def reach(rollout: Rollout, number: int) -> str:
    """Calls the tool in the first turn, with the number that the prompt asks for."""
    target = int(rollout.episode.prompt[-1]["content"].split()[-1].strip("."))
    return call("increase", by=target) if number == 1 else "done"


def test_only_what_the_model_drew_counts_and_nothing_is_encoded_again() -> None:
    groups = group(3)
    episodes = episodes_of(DialoguesHere(setup_of(["counting.Counter"])))
    play(episodes, groups, reach)
    rollout = groups[0].rollouts[0]
    given = "\n<|im_start|>user\n<tool_response>now 3</tool_response><|im_end|>\n<|im_start|>assistant\n"
    first, last = [*ids(call("increase", by=3)), *ids(END)], [*ids("done"), *ids(END)]
    assert rollout.tokens == [*first, *ids(given), *last]
    assert rollout.drawn == [1] * len(first) + [0] * len(given) + [1] * len(last)
    assert (rollout.finish, rollout.episode.reward) == ("stop", 1.0)
    assert rollout.episode.metrics == {"tools/calls": 1.0, "tools/failures": 0.0}
    row = plain_row(groups[0], rollout, RLConfig())
    # The prompt has the tools' descriptions, and the observation of `reset`.
    prompt = [{"role": "user", "content": PROMPT[0]["content"] + " Reach 3."}]
    assert row.prompt == encoder_of().prompt_ids(prompt, [function_schema(counting.Counter().increase)])
    assert Group.from_json(groups[0].to_json(), {groups[0].prompt.key: groups[0].prompt}) == groups[0]
    tools = [function_schema(counting.Counter().increase)]
    drawn = [*row.prompt, *first, *ids(given)]
    assert drawn == encoder_of().prompt_ids([*prompt, *rollout.episode.messages[:2]], tools)


@pytest.mark.slow
def test_processes_hold_one_conversation_each_and_wait_for_one_that_is_free() -> None:
    """1 s: seven conversations in three processes."""
    groups = group(*range(1, 8))
    with processes("counting:Counter") as pool:
        play(episodes_of(pool), groups, reach)
    assert [one.rollouts[0].episode.reward for one in groups] == [1.0] * 7
    assert {one.rollouts[0].finish for one in groups} == {"stop"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "words"), [(100, r"took longer than 0.5 s \(rl.environment_deadline_seconds\)"), (200, "its process ended")]
)
def test_a_process_that_hangs_or_ends_names_the_sample(by: int, words: str) -> None:
    """1 s each"""

    def hangs(rollout: Rollout, number: int) -> str:
        return call("increase", by=by)

    with processes("counting:Counter", deadline_seconds=0.5) as pool:
        began = time.monotonic()
        with pytest.raises(EpisodeError, match=rf"p.jsonl, line 1: the environment {words}"):
            play(episodes_of(pool), group(1), hangs)
        assert time.monotonic() - began < 30
        # The others go on, in other processes.
        groups = group(2, 1, 3)
        first = groups[1].rollouts[0]
        play(
            episodes_of(pool, skip_failures=True),
            groups,
            lambda rollout, number: (hangs if rollout is first else reach)(rollout, number),
        )
        assert [one.rollouts[0].finish for one in groups] == ["stop", "error", "stop"]


def test_completions_are_bounded_with_what_environments_add() -> None:
    pool = DialoguesHere(setup_of(["counting:Counter"]))
    groups = group(3)
    play(episodes_of(pool, most=120), groups, reach)
    rollout = groups[0].rollouts[0]
    assert (rollout.finish, sum(rollout.drawn)) == ("length", len(rollout.tokens))
    assert rollout.episode.reward == 1.0
    with pytest.raises(DataError, match=r"p.jsonl, line 1: the prompt has \d+ tokens with what its environment adds"):
        play(episodes_of(DialoguesHere(setup_of(["counting:Counter"])), positions=200), group(1), reach)


def test_turns_are_bounded_and_tools_stand_alone() -> None:
    episodes = episodes_of(DialoguesHere(setup_of([], ("counting:add",))), max_turns=2)
    groups = group(0)
    play(episodes, groups, lambda rollout, number: call("add", a=1, b=number))
    rollout = groups[0].rollouts[0]
    assert [message["role"] for message in rollout.episode.messages] == ["assistant", "tool", "assistant"]
    assert rollout.episode.reward is None


@pytest.mark.parametrize(
    ("environments", "tools", "options", "words"),
    [
        (["elsewhere:Counter"], (), {}, 'rl.environments: "elsewhere:Counter" runs code of the module elsewhere'),
        (["counter"], (), {}, "rl.environments"),
        (["counting:Counter"], (), {"Counte": {}}, 'did you mean "Counter"'),
        (["counting:Counter", "counting:Counter"], (), {}, "LABEL=NAME"),
        ([], ("add",), {}, "MODULE:FUNCTION"),
    ],
)
def test_names_are_checked(environments: list[str], tools: tuple[str, ...], options: dict, words: str) -> None:
    with pytest.raises(Exception, match=words):
        setup_of(environments, tools, **options)


@pytest.mark.long
@pytest.mark.slow
def test_a_run_trains_on_the_turns_of_the_model_alone(tmp_path: Path) -> None:
    """3 s. A new model ends a turn by chance; the user's answer stands in the completion and is not trained on."""
    keys = (
        "rl.environments=[\"counting:Echo\"]", f"rewards.modules=[{json.dumps(MODULE)}]", "rewards.functions=[]",
        "data.chat_template=plain", "data.prompt_format=user_message", "data.seq_length=64",
        "rl.max_completion_length=40", "rl.patience=0", "rl.temperature=3.0", "numerics.batch_invariant=true",
        "rl.environment_processes=6",
        "train.train_iters=2",
    )  # fmt: skip
    trainer = Trainer(config(tmp_path, *keys), run_dir=tmp_path / "run")
    trainer.train()
    lines = read_rollouts(tmp_path / "run" / ROLLOUTS_FILE)
    assert len(lines) == 16
    several = [line for line in lines if line["reward"]]
    assert several, "no turn ended by chance"
    for line in several:
        assert line["rewards"] == {"environment": line["reward"]}
        assert line["completion"].count("more") >= line["reward"] - 1
        assert line["tokens"] < 40
    assert trainer.last_evaluation["valid_reward"] >= 0.0
    assert np.isfinite(trainer.last_evaluation["valid_loss"])


def test_prompts_that_are_texts_are_refused(tmp_path: Path) -> None:
    keys = ('rl.environments=["counting:Echo"]', f"rewards.modules=[{json.dumps(MODULE)}]", "data.prompt_format=text")
    with pytest.raises(ConfigError, match="line 1: the prompt is a text, and conversations"):
        Trainer(config(tmp_path, *keys, "data.chat_template=plain", "rewards.functions=[]"))


def test_questions_of_reasoning_gym() -> None:
    gym = pytest.importorskip("reasoning_gym")
    answers = [item["answer"] for item in gym.create_dataset("chain_sum", size=3, seed=1)]
    options = {"reasoning_gym": {"dataset": "chain_sum", "size": 3, "seed": 1}}
    setup = source_setup(["reasoning_gym"], (), options, [], HOST)
    source = setup.load()
    for number, answer in enumerate(answers):
        for turn, reward in ((f"<answer>{answer}</answer>", 1.0), (answer, 1.0), ("<answer>x</answer>", 0.0)):
            dialogue = source.begin({"prompt": PROMPT, "item": number})
            assert dialogue.prompt[0]["content"].startswith(PROMPT[0]["content"] + "State the final answer")
            assert dialogue.reply({"role": "assistant", "content": turn}).reward == reward
    with pytest.raises(EpisodeError, match="the number of a question, 0 to 2"):
        source.begin({"prompt": PROMPT, "item": 3})
