"""What the environment of verifiers makes of an episode's requests; tests/peer asks the package itself."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mt_core.errors import ConfigError
from mt_tune.environments.base import EpisodeError
from mt_tune.environments.verifiers import _TaskDialogue as TaskDialogue
from mt_tune.environments.verifiers import build_verifiers, wire_message
from mt_tune.environments.verifiers_episodes import EpisodeEnd, ModelRequest, chunks, end_of, texts_of

ASKED: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


class Script:
    """In place of PlayedEpisodes: events one after another."""

    def __init__(self, *events: Any) -> None:
        self.events, self.answers = iter(events), list[Any]()

    def begin(self, task: Any) -> Any:
        return None

    def next_event(self, episode: Any) -> Any:
        return next(self.events)

    def answer(self, episode: Any, message: Any, *, cut: bool) -> None:
        self.answers.append((message, cut))


def dialogue(*events: Any) -> tuple[Any, Script]:
    script = Script(ModelRequest(ASKED, [{"name": "add"}]), *events)
    return TaskDialogue(script, None), script  # type: ignore[arg-type]


def test_what_a_request_adds_is_what_follows_the_turn() -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    new = {"role": "tool", "content": "2"}
    played, script = dialogue(ModelRequest([*ASKED, turn, new], None), EpisodeEnd(0.5, {"right": 1.0}, None))
    assert (played.prompt, played.tools) == (ASKED, [{"name": "add"}])
    assert played.reply(turn).messages == [new]
    last = played.end()
    assert (last.messages, last.reward, last.metrics) == ([], 0.5, {"verifiers/right": 1.0})
    ((sent, cut), (empty, is_cut)) = script.answers
    assert sent["tool_calls"] == [{**CALL, "id": "call_0", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    assert (cut, empty["content"], is_cut) == (False, "", True)
    assert texts_of([sent]) == [turn]


@pytest.mark.parametrize(
    "messages",
    [
        [ASKED[1], {"role": "assistant", "content": "x"}, ASKED[1]],
        [*ASKED, ASKED[1]],
        [*ASKED, {"role": "assistant", "content": "x"}],
        [*ASKED, {"role": "assistant", "content": "x"}, ASKED[1], {"role": "assistant", "content": "y"}],
    ],
)
def test_a_harness_that_changes_earlier_messages_is_refused(messages: list[Any]) -> None:
    played, _ = dialogue(ModelRequest(messages, None))
    with pytest.raises(EpisodeError, match="has changed earlier messages"):
        played.reply({"role": "assistant", "content": "x"})


def test_an_episode_that_failed_says_why() -> None:
    played, _ = dialogue(EpisodeEnd(0.0, {}, "ToolsetError: gone"))
    with pytest.raises(EpisodeError, match="verifiers: ToolsetError: gone"):
        played.reply({"role": "assistant", "content": "x"})
    failed = SimpleNamespace(errors=[SimpleNamespace(type="EnvError", message="m")], ok=False, traces=[])
    assert end_of(failed).error == "EnvError: m"


def test_a_turn_is_streamed_with_its_calls() -> None:
    *parts, done = chunks(wire_message({"content": "t", "tool_calls": [CALL]}, iter([7])), "tool_calls")
    first, last, usage = map(json.loads, parts)
    assert first["choices"][0]["delta"]["content"] == "t"
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert (last["choices"][0]["finish_reason"], usage["choices"], done) == ("tool_calls", [], "[DONE]")


def test_the_package_and_a_taskset_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs rl.environment_options.verifiers.taskset"):
        build_verifiers({})
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ConfigError, match="pip install 'verifiers>=0.4'"):
        build_verifiers({"taskset": "any"})
