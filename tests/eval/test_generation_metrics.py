"""Metrics of generated texts against values of their papers, the packages' own command, and brute force."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import TextIO

import pytest

from mt_cli.main import run
from mt_core.errors import ConfigError, DataError
from mt_core.sandbox import programs
from mt_core.sandbox.programs import Limits, ProgramRunner
from mt_eval.metrics.generation import Generation, measure_generation, pass_at_k
from mt_eval.metrics.texts import exact_match, f1


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line(*texts: str, **keys: object) -> dict[str, object]:
    return {**keys, "completions": [{"text": text} for text in texts]}


def test_short_answers() -> None:
    assert exact_match("The  Eiffel-Tower!", ["a tower", "eiffeltower"]) == 1.0
    assert exact_match("Eiffel", ["Eiffel Tower"]) == 0.0
    # Shared: "cat", "sat" once each, of 3 and 4 words.
    assert f1("the cat cat sat", ["dog", "A cat sat down here."]) == pytest.approx(2 * 2 / (3 + 4))
    assert f1("the", ["an"]) == 1.0
    assert f1("word", ["an"]) == 0.0


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one() -> None:
    for correct in range(6):
        outcomes = [True] * correct + [False] * (5 - correct)
        for k in range(1, 6):
            subsets = list(combinations(outcomes, k))
            assert pass_at_k(5, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.slow
def test_bleu_and_rouge_of_a_file(tmp_path: Path) -> None:
    """Of a text that is its reference: the most. Unigram precision 3/4 and brevity: worked out by hand."""
    lines = [
        line("the cat sat on the mat", references="the cat sat on the mat"),
        line("a b c d", "a b c d", references=["x y", "a b c e f"]),
        {"references": "x", "error": "line 3: too long"},
    ]
    task = Generation(write(tmp_path / "p.jsonl", lines), ["bleu", "rouge", "f1"])
    found = measure_generation(task, tmp_path / "r.json").tasks["generation"]
    assert (found.samples, found.not_scored) == (2, 1)
    # rouge1 of the second: 3 shared of 4 and 5 words; rouge2: 2 of 3 and 4.
    assert found.metrics["rouge1"] == pytest.approx((1 + 2 * 3 / 9) / 2)
    assert found.metrics["rouge2"] == pytest.approx((1 + 2 * 2 / 7) / 2)
    # n-grams that match, of 6+4+4, 5+3+3, 4+2+2, 3+1+1; 14 words against closest references of 6 + 5 + 5.
    precisions = (12 / 14) * (9 / 11) * (6 / 8) * (3 / 5)
    assert found.metrics["bleu"] == pytest.approx(100 * precisions**0.25 * 2.718281828 ** (1 - 16 / 14), rel=1e-4)


LIMITS = Limits(seconds=20, memory_mb=300, file_mb=1)
FAILURES = {
    "assert 1 + 1 == 3": "AssertionError",
    "import os; os._exit(0)": "ended with status 0, before its end",
    "import os; os._exit(97)": "ended with status 97, before its end",
    "raise SystemExit(97)": "ended with status 97, before its end",
    # The child reaches the end.
    "import os\nassert not os.fork() or os.wait() is None": "AssertionError",
    "def f(:": "SyntaxError",
    "a = '\ud800'": "the program is no text",
    "a = '\0'": "null bytes",
    "print(os)": "NameError",
    "x = bytearray(1 << 30)": "MemoryError",
    "open('own', 'wb').write(bytes(2 << 20))": "File too large",
    "raise BlockingIOError(11, 'as a fork that the kernel refuses')": "more than 32 processes are refused",
    # What one process may do, and all together may not.
    "import os, time\nfor _ in range(99):\n    if not os.fork(): time.sleep(99)\n"
    "time.sleep(99)": "more than 32 processes",
    "import os, time\nfor _ in range(4):\n    if not os.fork():\n        x = bytearray(b'x') * (120 << 20)\n"
    "        time.sleep(99)\ntime.sleep(99)": "more than 300 MB of memory",
}
ISOLATED_FAILURES = {
    "import socket; socket.create_connection(('127.0.0.1', 9), 1)": "unreachable",
    "for i in range(9):\n    open(f'{i}', 'wb').write(bytes(1 << 18))": "No space left",
    "open('/tmp/elsewhere', 'w')": "Read-only file system",
    "import ctypes\nassert not ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None)": "AssertionError",
    "import os; os.kill(PARENT, 0)": "ProcessLookupError",
    "open('/proc/PARENT/environ')": "FileNotFoundError",
    "import os\nwhile True: os.fork()": "more than 32 processes",
    # Which limit was exceeded is not lost among what the other processes write until they are ended.
    "import os\nfor _ in range(99):\n    if not os.fork():\n        while True: os.write(2, b'a line\\n')\n"
    "os.wait()": "more than 32 processes",
}
PASSES = (
    "assert 1 + 1 == 2\nopen('own', 'w').write('x')",
    "import os; assert not set(os.environ) - {'LC_CTYPE'}",  # Python itself sets it
    "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nassert A() == A()",
    "import os; del os.write, os.read",
    "import tempfile; tempfile.TemporaryFile()",
    "import multiprocessing; multiprocessing.Lock()",
)


@pytest.fixture(scope="module")
def runner() -> ProgramRunner:
    return ProgramRunner(LIMITS, allow_unisolated=True)


@pytest.mark.parametrize("program", FAILURES)
def test_programs_fail_that_do_not_reach_their_end(runner: ProgramRunner, program: str) -> None:
    assert FAILURES[program] in str(runner.failure(program))


@pytest.mark.parametrize("program", ISOLATED_FAILURES)
def test_isolated_programs_reach_nothing_else(runner: ProgramRunner, program: str) -> None:
    if not runner.isolates:
        pytest.skip("user namespaces are off")
    # Not in the parameter: the processes that run tests have to collect the same ones.
    assert ISOLATED_FAILURES[program] in str(runner.failure(program.replace("PARENT", str(os.getpid()))))


@pytest.mark.parametrize("program", PASSES)
def test_programs_pass_that_reach_their_end(runner: ProgramRunner, program: str) -> None:
    assert runner.failure(program) is None


def test_the_secret_is_nowhere_before_the_end(runner: ProgramRunner) -> None:
    """In no frame, constant, argument or file: whatever 32 hexadecimal digits a program finds there it would print."""
    program = """
import re, sys
found = []
frame = sys._getframe()
while frame:
    found += [repr(frame.f_locals), repr(frame.f_globals), repr(frame.f_code.co_consts)]
    frame = frame.f_back
found += [open("/proc/self/cmdline").read(), open("/proc/self/environ").read(), open(__file__).read()]
assert not re.search("(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", " ".join(found)), "found"
"""
    assert runner.failure(program) is None


def test_programs_that_cannot_be_isolated_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "ISOLATED", ("unshare-that-nobody-has",))
    with pytest.raises(ConfigError, match="programs cannot be isolated on this machine .* --allow-unisolated"):
        ProgramRunner(LIMITS)
    allowed = ProgramRunner(LIMITS, allow_unisolated=True)
    assert not allowed.isolates
    assert allowed.failure("assert 1 + 1 == 2") is None
    many = "import os, time\nfor _ in range(100):\n    if not os.fork(): time.sleep(99)\ntime.sleep(99)"
    assert "more than 32 processes" in str(allowed.failure(many))


def test_several_programs_run_at_a_time() -> None:
    """Four calls that wait for one another; results are in the order of the programs."""
    runner = ProgramRunner(Limits(seconds=60), workers=4, allow_unisolated=True)
    meeting = threading.Barrier(4, timeout=60)

    def failure(program: str) -> str | None:
        meeting.wait()
        return runner.failure(program)

    found = list(runner.map(failure, ["assert 1", "assert 0", "assert 1", "import os; os._exit(97)"]))
    assert found == [None, "AssertionError", None, "ended with status 97, before its end"]


def test_a_program_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    """The child holds a lock while it lives, and lives longer than the test waits."""
    held = tmp_path / "held"
    held.touch()
    child = f"import fcntl, time; file = open({str(held)!r}); fcntl.flock(file, fcntl.LOCK_EX); time.sleep(600)"
    program = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(600)"
    was_held = False
    with held.open() as file, ThreadPoolExecutor(1) as pool:
        for seconds in (1, 5, 25):  # a slow machine needs more than one for three starts of Python
            runner = ProgramRunner(Limits(seconds=seconds), allow_unisolated=True)
            outcome = pool.submit(runner.failure, program)
            while not outcome.done():
                was_held = was_held or not is_free(file, seconds=0.02)
                time.sleep(0.02)
            assert outcome.result() == f"did not end within {seconds} s"
            if was_held:
                break
        assert was_held
        assert is_free(file, seconds=60)


def is_free(file: TextIO, seconds: float) -> bool:
    """Whether nobody holds a lock on the file; waits for that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            fcntl.flock(file, fcntl.LOCK_UN)
            return True
    return False


@pytest.mark.slow
def test_pass_at_k_of_a_file_goes_on(tmp_path: Path) -> None:
    """A HumanEval-shaped line: prompt + text + test, of which `check` is called."""
    given = {"prompt": "def add(a, b):\n", "test": "def check(f):\n    assert f(1, 2) == 3\n", "entry_point": "add"}
    lines = [
        line("    return a + b\n", "    return a - b\n", "    return 3\n", **given),
        line(*["    return a\n"] * 3, **given),
    ]
    path, output = write(tmp_path / "p.jsonl", lines), tmp_path / "r.json"
    task = Generation(path, ["pass@k"], k=(1, 2), runner=ProgramRunner(Limits(), allow_unisolated=True))
    found = measure_generation(task, output).tasks["generation"]
    assert found.metrics == pytest.approx({"pass@1": (2 / 3 + 0) / 2, "pass@2": (1 + 0) / 2})
    samples = output.with_suffix(".samples.jsonl")
    whole = samples.read_text()
    samples.write_text("".join(whole.splitlines(keepends=True)[:2]) + '{"task": "gen')
    done: list[int] = []
    assert measure_generation(task, output, lambda one, total: done.append(one)).tasks["generation"] == found
    assert (done, samples.read_text()) == ([2], whole)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "p.jsonl", [line("Paris.", answer=["paris"]), line("Rome", answer=["Bern"])])
    given = ["eval", "generation", str(path), "--metric", "exact_match", "--reference-key", "answer"]
    assert run([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"]["generation"]["metrics"] == {"exact_match": 0.5}
    assert run([*given, "--output", str(path / "r.json")]) == 2
    assert "p.jsonl/r.samples.jsonl cannot be written: " in " ".join(capsys.readouterr().err.split())
    assert run(["eval", "generation", str(path), "--metric", "pass@k"]) == 2
    assert "--allow-code-execution" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "metrics", "error", "message"),
    [
        ([line("x", references="y")], ["rogue"], ConfigError, "it can be exact_match"),
        ([line("x", answer="y")], ["f1"], DataError, r'no list of texts under "references"; its keys are answer'),
        ([line("x", references=[1])], ["f1"], DataError, "line 1: no text"),
        ([line("x")], ["pass@k"], DataError, 'no program under "test"'),
        ([line("x", test="")], ["pass@k"], DataError, r"has 1 texts; pass@2 needs as many"),
        ([{"references": "y", "text": "x"}], ["f1"], DataError, 'p.jsonl, line 1: no "completions"'),
        ([], ["f1"], DataError, "no sample could be scored"),
    ],
)
def test_bad_input(
    tmp_path: Path, lines: list[dict[str, object]], metrics: list[str], error: type[Exception], message: str
) -> None:
    path = write(tmp_path / "p.jsonl", lines)
    with pytest.raises(error, match=message):
        measure_generation(Generation(path, metrics, k=(1, 2), runner=ProgramRunner(Limits(), allow_unisolated=True)))
