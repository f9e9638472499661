"""The registered rewards: values by hand, their options, the sandbox, a server."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_tune.rewards.base import RewardError, RewardSample
from mt_tune.rewards.build import build_rewards
from mt_tune.rewards.config import RewardsConfig


def rewards_of(name: str, samples: list[RewardSample], **options: Any) -> list[float | None]:
    keys = RewardsConfig(functions=[name], options={name: options} if options else {}, workers=0)
    return list(build_rewards(keys, load_plugins()).score(samples, 0).values[name])


def texts(*completions: str, **row: Any) -> list[RewardSample]:
    return [RewardSample("ask", text, [1], [1] * len(text), row) for text in completions]


def test_regex() -> None:
    samples = texts("a 12", "12", "none")
    assert rewards_of("regex", samples, pattern=r"\d+") == [1.0, 1.0, 0.0]
    assert rewards_of("regex", samples, pattern=r"\d+", full=True, reward=0.5, penalty=-1) == [-1.0, 0.5, -1.0]


def test_exact_match_takes_the_last_match() -> None:
    samples = texts("2 and so #### 1,200 or\n#### 72", "#### 1,200", "1200", answer="1200")
    assert rewards_of("exact_match", samples, pattern=r"#### ([\d,]+)", ignore=",") == [0.0, 1.0, 0.0]
    assert rewards_of("exact_match", texts(" Yes", "no", answer="yes"), ignore_case=True) == [1.0, 0.0]


def test_messages_are_judged_by_the_last_one() -> None:
    messages = [{"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2"}]
    assert rewards_of("exact_match", [RewardSample([], messages, [], [], {"answer": 2})]) == [1.0]


def test_think_format() -> None:
    samples = texts("<think>a\nb</think>c", "<think>a", " <think>a</think>", "<think>a<think>b</think>")
    assert rewards_of("think_format", samples) == [1.0, 0.0, 0.0, 0.0]


def test_overlong_is_dapos_penalty() -> None:
    samples = [RewardSample("", "", [], [0] * length, {}) for length in (1, 80, 90, 100, 200)]
    assert rewards_of("overlong", samples, max_length=100, cache=20) == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_repetition() -> None:
    samples = [RewardSample("", "", [], ids, {}) for ids in ([1, 2, 3, 4], [5, 5, 5, 5, 5], [1])]
    assert rewards_of("repetition", samples, ngram_size=2) == [0.0, -0.75, 0.0]


@pytest.mark.slow
def test_accuracy_compares_values() -> None:
    pytest.importorskip("math_verify")
    samples = texts(r"so \boxed{\frac{2}{6}}", r"\boxed{0.5}", "1/3", solution=r"\frac{1}{3}")
    assert rewards_of("accuracy", samples) == [1.0, 0.0, 0.0]
    assert rewards_of("accuracy", samples, numbers=True) == [1.0, 0.0, 1.0]
    thought = texts(r"<think>\boxed{2}</think>\boxed{1}", r"\boxed{1}", solution="1")
    assert rewards_of("accuracy", thought, after="</think>") == [1.0, 0.0]
    assert rewards_of("accuracy", texts("1", solution="no number")) == [None]


@pytest.mark.slow
def test_cosine_accuracy() -> None:
    pytest.importorskip("math_verify")
    half = [
        RewardSample("", text, [], [1] * tokens, {"solution": "3"})
        for text, tokens in ((r"\boxed{3}", 50), (r"\boxed{2}", 50), (r"\boxed{3}", 1000), (r"\boxed{2}", 0))
    ]
    found = rewards_of("cosine_accuracy", half, max_length=100)
    assert [round(value or 0.0, 12) for value in found] == [0.75, -0.75, 0.5, -1.0]


@pytest.mark.slow
def test_accuracy_ends_what_takes_too_long_in_a_process() -> None:
    """math-verify bounds its own time by SIGALRM, which needs the main thread of the process: a tower of powers scores
    0 and ends neither the process nor the run."""
    pytest.importorskip("math_verify")
    keys = RewardsConfig(functions=["accuracy"], workers=1, deadline_seconds=60)
    with build_rewards(keys, load_plugins()) as functions:
        table = functions.score(texts(r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2}", solution="2"), 0)
    assert table.values["accuracy"] == [0.0, 1.0]


CODE = "I think so:\n```python\ndef twice(x):\n    return {}\n```\n"
TESTS = ["assert twice(2) == 4", "assert twice(3) == 6"]


@pytest.mark.slow
def test_code_in_a_sandbox() -> None:
    samples = texts(
        CODE.format("2 * x"),
        CODE.format("x * x"),
        CODE.format("exit(0)"),
        CODE.format("__import__('urllib.request').request.urlopen('http://127.0.0.1:1') or 2 * x"),
        "def twice(x): return x + x",
        tests=TESTS,
    )
    assert rewards_of("code", samples) == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert rewards_of("code", samples[:2], partial=True) == [1.0, 0.5]


@pytest.mark.slow
def test_code_that_reads_and_writes() -> None:
    tests = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
    samples = texts("a, b = map(int, input().split())\nprint(a + b)", "print(3)", "while True: pass", tests=tests)
    assert rewards_of("code", samples, seconds=1) == [1.0, 0.0, 0.0]
    assert rewards_of("code", samples[:2], partial=True) == [1.0, 0.5]


def test_reasoning_gym() -> None:
    gym = pytest.importorskip("reasoning_gym")
    [item] = gym.create_dataset("chain_sum", size=1, seed=1)
    row = {**item, "metadata": json.dumps(item["metadata"])}
    samples = texts(f"<answer>{item['answer']}</answer>", item["answer"], "<answer>x</answer>", **row)
    assert rewards_of("reasoning_gym", samples) == [1.0, 0.0, 0.0]


# -- http --------------------------------------------------------------------------------------------


@contextmanager
def server(*answers: Any) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """A server that gives these answers, numbers as statuses, and what it was asked."""
    asked: list[Mapping[str, Any]] = []
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = left.pop(0)
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(b"" if isinstance(answer, int) else json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/reward", asked
        http.shutdown()
        thread.join()


def test_http_sends_samples_and_takes_rewards() -> None:
    with server({"rewards": [1, None]}) as (url, asked):
        assert rewards_of("http", texts("a", "b", level=2), url=url) == [1.0, None]
    assert asked == [
        {
            "prompts": ["ask", "ask"],
            "completions": ["a", "b"],
            "completion_ids": [[1], [1]],
            "columns": {"level": [2, 2]},
        }
    ]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"rewards": [1]}, "returned 1 rewards for 2 samples"),
        ({"rewards": [1, "good"]}, "returned 'good'"),
        ({"rewards": [1, math.nan]}, "returned nan"),
        ({"scores": [1, 2]}, 'the answer has no list "rewards"'),
        (302, "status 302"),
        (404, "status 404"),
    ],
)
def test_http_refuses_other_answers(answer: Any, words: str) -> None:
    with server(answer, answer, answer) as (url, _), pytest.raises(RewardError) as raised:
        rewards_of("http", texts("a", "b"), url=url)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("http", {"url": "http://example.org/reward"}, "is not on this machine"),
        ("http", {"url": "file:///etc/passwd"}, "must read http://HOST:PORT/PATH"),
        ("regex", {}, "the reward regex needs the option pattern: set rewards.options.regex.pattern"),
        ("regex", {"pattern": "("}, "is no regular expression"),
        ("regex", {"patern": "a"}, 'has no option patern (did you mean "pattern"?)'),
        ("regex", {"pattern": 1}, "rewards.options.regex.pattern=1 must be of type str"),
        ("overlong", {"max_length": 10, "cache": 20}, "cache=20 must be from 1 to max_length=10"),
    ],
)
def test_options_that_cannot_be(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rewards_of(name, texts("a"), **options)
    assert words in str(raised.value)


def test_a_column_that_rows_lack_is_named() -> None:
    with pytest.raises(RewardError, match="the rows have no column answer for the reward exact_match; they have level"):
        rewards_of("exact_match", texts("a", level=1))
