"""The registered reward of programs: what the completion's code does in a sandbox with the tests of its row."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mt_core.errors import DataError
from mt_core.sandbox.programs import Limits, ProgramRunner
from mt_tune.rewards.base import text_of
from mt_tune.rewards.options import column, read_options
from mt_tune.rewards.reward_specs import RewardFunction

FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
"""A block of code in Markdown; one that was cut off at the length of a completion ends with it."""
TESTS_OF_STREAMS = """
import io, sys
_code = compile({code!r}, "program.py", "exec")
_words = lambda text: [line.split() for line in text.strip().splitlines()]
for _input, _wanted in zip({inputs!r}, {outputs!r}, strict=True):
    sys.stdin, sys.stdout = io.StringIO(_input), io.StringIO()
    try:
        exec(_code, {{"__name__": "__main__"}})
    except SystemExit:
        pass
    _written, sys.stdout = sys.stdout.getvalue(), sys.__stdout__
    if _words(_written) != _words(_wanted):
        raise AssertionError(f"wrote {{_written[:100]!r}} for the input {{_input[:100]!r}}")
"""


@dataclass(frozen=True)
class CodeOptions:
    """column: of tests. A text is Python code that runs behind the program and raises where it is wrong; so is each of
    a list of texts; an object {"inputs": [...], "outputs": [...]}, or such JSON, has texts for standard input and what
    is to be written for each, compared by words. partial: the share of the list's tests that pass, each run by itself,
    instead of 1 for all and 0 otherwise.

    seconds, memory_mb, processes: of one program, limits of the sandbox. workers: programs at a time, by default one
    for each CPU. allow_unisolated: where the kernel offers no user namespaces, programs run without isolation.
    """

    column: str = "tests"
    partial: bool = False
    seconds: int = 10
    memory_mb: int = 1024
    processes: int = 32
    workers: int | None = None
    allow_unisolated: bool = False


def build_code(options: Mapping[str, Any]) -> RewardFunction:
    """1 for a completion whose program passes all tests of its row, 0 otherwise. The program is the last block of code
    of the completion, or all of it if it has none.

    Programs run as those of `mt eval generation`: in user namespaces, without network and without the environment.
    """
    keys = read_options(CodeOptions, "code", options)
    runner = ProgramRunner(
        Limits(seconds=keys.seconds, memory_mb=keys.memory_mb, processes=keys.processes),
        workers=keys.workers,
        allow_unisolated=keys.allow_unisolated,
        option="rewards.options.code.allow_unisolated=true",
    )

    def judge(completions: Sequence[Any], **columns: Any) -> list[float]:
        tests = column(columns, keys.column, "code")
        programs = [
            programs_of(text_of(completion), sample_tests, keys.partial)
            for completion, sample_tests in zip(completions, tests, strict=True)
        ]
        passes = runner.map(
            lambda program: runner.failure(program) is None, [program for each in programs for program in each]
        )
        return [sum(next(passes) for _ in each) / len(each) for each in programs]

    return judge


def programs_of(completion: str, tests: Any, partial: bool) -> list[str]:
    """What is executed for a completion: one program, or with `partial` one for each test. Raises DataError for tests
    of another form."""
    blocks = FENCE.findall(completion)
    code = blocks[-1] if blocks else completion
    parsed = _parsed(tests)
    if isinstance(parsed, Mapping):
        pairs = list(zip(*_streams(parsed), strict=True))
        pair_groups = [[pair] for pair in pairs] if partial else [pairs]
        return [
            TESTS_OF_STREAMS.format(
                code=code, inputs=[text for text, _ in group], outputs=[expected for _, expected in group]
            )
            for group in pair_groups
        ]
    groups = [[test] for test in parsed] if partial else [parsed]
    return ["\n\n".join([code, *group]) + "\n" for group in groups]


def _parsed(tests: Any) -> list[str] | Mapping[str, Any]:
    """A list of codes, or an object with inputs and outputs."""
    if isinstance(tests, str) and tests.lstrip().startswith(("{", "[")):
        # Parquet files have lists and objects of mixed types as JSON.
        try:
            tests = json.loads(tests)
        except ValueError:
            return [tests]
    if isinstance(tests, Mapping):
        return tests
    listed = [tests] if isinstance(tests, str) else tests
    if not isinstance(listed, list) or not listed or not all(isinstance(test, str) for test in listed):
        raise DataError(f"tests are code, a list of codes, or an object with inputs and outputs, not {tests!r:.80}")
    return listed


def _streams(tests: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 < len(inputs) == len(outputs):
        raise DataError('tests of streams are {"inputs": [...], "outputs": [...]} with as many texts in both')
    if not all(isinstance(text, str) for text in [*inputs, *outputs]):
        raise DataError("tests of streams are texts; calls of functions with arguments are written as code")
    return inputs, outputs
