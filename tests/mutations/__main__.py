"""Apply each known mutation to a copy of the sources, and say which of them no test notices.

uv run python -m tests.mutations                 # all; about 10 CPU seconds for each
uv run python -m tests.mutations tied dropout    # those with one of these words in their name
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.catalogue import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
FAILED, PASSED = 1, 0
"""Exit codes of pytest; others mean that no test ran."""


def main(words: Sequence[str]) -> int:
    chosen = [one for one in MUTATIONS if not words or any(word in one.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "packages", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        survived = [one.name for one in chosen if not is_found(one, Path(folder))]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutations were found")
    return 1 if survived else 0


def is_found(mutation: Mutation, packages: Path) -> bool:
    """Whether one of the mutation's tests fails. The copy is as it was afterwards."""
    file = packages / mutation.file
    source = file.read_text()
    file.write_text(source.replace(mutation.before, mutation.after))
    try:
        code, output = run_tests(mutation.tests, packages)
    finally:
        file.write_text(source)
    verdict = {FAILED: "found", PASSED: "SURVIVED"}.get(code, f"NOT TESTED: pytest ended with {code}\n{output}")
    print(f"{verdict}: {mutation.name}", flush=True)
    return code == FAILED


def run_tests(arguments: Sequence[str], packages: Path) -> tuple[int, str]:
    """pytest's exit code and output, with the packages of this folder in place of those that are installed."""
    paths = os.pathsep.join(str(path) for path in sorted(packages.glob("*/src")))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--numprocesses=0",
        "-p",
        "no:cacheprovider",
        "-m",
        "not exhaustive",
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
