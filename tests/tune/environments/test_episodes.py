"""Episodes of several turns: ids are the concatenation of what was drawn and what was added, and nothing is encoded
again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import transformers.utils

from mt_core.errors import ConfigError
from mt_data.datasets.sft.chat_templates import CHATML, ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_tune.environments.base import Episode, EpisodeError
from mt_tune.environments.schemas import function_schema
from mt_tune.environments.tool_environment import ToolEnvironment
from mt_tune.environments.turns import TurnEncoder

HERMES = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
DROPS_REASONING = HERMES.replace(
    "{{ message.content }}\n",
    "{{ message.content if loop.last else message.content.split('</think>')[-1] | trim }}\n",
)
END = b"<|im_end|>"
PROMPT = [{"role": "user", "content": "What is 2 + 3?"}]


def encoder_of(source: str = HERMES, **options: Any) -> TurnEncoder:
    return TurnEncoder(ChatTemplate("the template", source, {}, False), ByteLevelTokenizer(), **options)


def ids(text: str | bytes) -> list[int]:
    return list(text.encode() if isinstance(text, str) else text)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second,
            which may be negative
    """
    return a + b


async def slow_add(a: int, b: int = 1) -> int:
    """Adds later.

    Args:
        a: the first
        b: the second
    """
    return a + b


def test_a_calculator_is_called_token_in_token_out() -> None:
    episode = ToolEnvironment(encoder_of(), [add]).start({"prompt": PROMPT})
    # Bytes that are no UTF-8 and would not come back from decoding: what was drawn must stay as it is.
    drawn = [*ids("let me\xff".encode("latin-1")), *ids(call("add", a=2, b=3)), *ids(END)]
    found = episode.after(drawn)
    answer = "\n<|im_start|>user\n<tool_response>5</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert (found.token_ids, found.done) == (ids(answer), False)
    assert found.metrics == {"tools/calls": 1.0, "tools/failures": 0.0}
    last = ids(b"5" + END)
    assert episode.after(last).done
    whole = [*episode.prompt_ids, *drawn, *found.token_ids, *last]
    assert bytes(whole).startswith(bytes(episode.prompt_ids) + bytes(drawn))
    assert [message["role"] for message in episode.messages] == ["assistant", "tool", "assistant"]
    assert episode.messages[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert episode.messages[1] == {"role": "tool", "name": "add", "content": "5"}


def test_the_concatenation_is_what_the_template_writes() -> None:
    """For drawn turns that encode as themselves, ids are those of the whole conversation, rendered at once."""
    encoder = encoder_of()
    episode = ToolEnvironment(encoder, [add]).start({"prompt": PROMPT})
    drawn = ids(call("add", a=2, b=3)) + ids(END)
    whole = [*episode.prompt_ids, *drawn, *episode.after(drawn).token_ids]
    assert whole == encoder.prompt_ids([*PROMPT, *episode.messages], [function_schema(add)])


def test_a_mark_that_was_not_drawn_is_added_and_a_turn_that_was_cut_ends_the_episode() -> None:
    drawn = ids(call("add", a=1, b=1))
    found = ToolEnvironment(encoder_of(), [add]).start({"prompt": PROMPT}).after(drawn)
    assert bytes(found.token_ids).startswith(END + b"\n<|im_start|>user")
    cut = ToolEnvironment(encoder_of(), [add]).start({"prompt": PROMPT}).after(drawn, finished=False)
    assert (cut.done, cut.token_ids) == (True, [])


def test_calls_that_fail_are_told_to_the_model() -> None:
    episode = ToolEnvironment(encoder_of(), [add, slow_add]).start({"prompt": PROMPT})
    turn = call("add", a=1) + call("multiply", a=1) + call("slow_add", a=4)
    found = episode.after(ids(turn) + ids(END))
    contents = [message["content"] for message in episode.messages[1:]]
    assert "missing 1 required positional argument" in contents[0]
    assert contents[1:] == ["{'error': 'Tool multiply not found.'}", "5"]
    assert found.metrics == {"tools/calls": 3.0, "tools/failures": 2.0}


def test_turns_are_bounded() -> None:
    episode = ToolEnvironment(encoder_of(), [add], max_turns=2).start({"prompt": PROMPT})
    turn = ids(call("add", a=1, b=1)) + ids(END)
    assert [episode.after(turn).done for _ in range(2)] == [False, True]


# -- environments of TRL -----------------------------------------------------------------------------


class Counter:
    """An environment as TRL's environment_factory takes it."""

    def reset(self, **row: Any) -> str | None:
        self.target, self.value = row["target"], 0
        return f" Reach {self.target}."

    def increase(self, by: int) -> str:
        """Increases the counter.

        Args:
            by: how much
        """
        self.value += by
        return f"now {self.value}"

    def get_reward(self) -> float:
        return float(self.value == self.target)

    def _hidden(self) -> None:
        raise AssertionError


class Other(Counter):
    async def get_reward(self) -> float:  # type: ignore[override]
        return 7.0


def play(episode: Episode, *turns: str) -> Any:
    return [episode.after(ids(turn) + ids(END)) for turn in turns][-1]


def test_an_environment_resets_acts_and_rewards() -> None:
    environment = ToolEnvironment(encoder_of(), factories={None: Counter})
    row = {"prompt": PROMPT, "target": 3}
    episodes = [environment.start(row) for _ in range(2)]
    assert episodes[0].prompt[-1]["content"] == "What is 2 + 3? Reach 3."
    assert PROMPT[-1]["content"] == "What is 2 + 3?"
    assert b'"increase"' in bytes(episodes[0].prompt_ids)
    assert b"_hidden" not in bytes(episodes[0].prompt_ids)
    assert play(episodes[0], call("increase", by=1), call("increase", by=2), "done").reward == 1.0
    assert play(episodes[1], "done").reward == 0.0
    environment.release(episodes[0])
    assert environment.start({**row, "target": 0}).environment is episodes[0].environment


def test_a_row_chooses_its_environment() -> None:
    environment = ToolEnvironment(encoder_of(), factories={"counter": Counter, "other": Other})
    assert play(environment.start({"target": 0, "environment": "other"}), "done").reward == 7.0
    with pytest.raises(ConfigError, match=r"environment is 'countr'; .* \(did you mean \"counter\"\?\)"):
        environment.start({"target": 0, "environment": "countr"})


def test_an_environment_that_fails_is_named() -> None:
    with pytest.raises(EpisodeError, match=r"Counter.reset raised KeyError: 'target'"):
        ToolEnvironment(encoder_of(), factories={None: Counter}).start({"prompt": PROMPT})


# -- templates and tools that cannot be --------------------------------------------------------------


def test_a_template_that_drops_reasoning_is_refused_by_name_or_kept_on_request() -> None:
    turn = ids("<think>\nx\n</think>\n\n" + call("add", a=1, b=1)) + ids(END)
    with pytest.raises(ConfigError, match=r"the template does not keep earlier turns: .* turn with reasoning"):
        ToolEnvironment(encoder_of(DROPS_REASONING), [add]).start({"prompt": PROMPT}).after(turn)
    kept = ToolEnvironment(encoder_of(DROPS_REASONING, keep_dropped_turns=True), [add]).start({"prompt": PROMPT})
    assert bytes(kept.after(turn).token_ids).startswith(b"\n<|im_start|>user\n<tool_response>2<")


def test_a_template_without_tools_is_refused() -> None:
    source = CHATML.source + "{# <tool_call> #}"
    with pytest.raises(ConfigError, match="environments with tools need a chat template that writes them"):
        ToolEnvironment(encoder_of(source), [add]).start({"prompt": PROMPT})
    with pytest.raises(ConfigError, match="has no form of tool calls that mt reads"):
        ToolEnvironment(encoder_of(CHATML.source), [add])


def test_a_prompt_that_is_a_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="a text gets no chat template"):
        ToolEnvironment(encoder_of(), [add]).start({"prompt": "What?"})


def typed(
    text: str, number: float, flag: bool, several: list[int], choice: Literal["a", "b"], maybe: str | None = None
) -> Sequence[str]:
    """Takes all types.

    Two paragraphs.

    Args:
        text: a text
        number: a number
        flag: a flag
        several: numbers
        choice: one of two
        maybe: a text or nothing

    Returns:
        Nothing of use.
    """
    return []


@pytest.mark.parametrize("function", [add, typed])
def test_schemas_are_those_of_transformers(function: Any) -> None:
    expected = transformers.utils.get_json_schema(function)["function"]
    found = function_schema(function)["function"]
    assert (found["name"], found["description"]) == (expected["name"], expected["description"])
    assert found["parameters"] == expected["parameters"]


def test_a_tool_without_hints_is_refused() -> None:
    def bare(a):  # type: ignore[no-untyped-def]
        """Does.

        Args:
            a: it
        """

    with pytest.raises(ConfigError, match="the tool bare needs a type hint for its argument a"):
        function_schema(bare)
