"""How long `mt` takes to start: `mt --help` and `mt plugins`, and `mt train` until its first optimizer step.

Bytecode is cached in a folder of this benchmark, as it is after any first run; one round, which is not counted, warms
it up. The time of `mt train` is that of a whole process with the preset gpt-tiny, stopped after its first step: it has
the checkpoint of that step and the end of the process too.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path

from mt_tools.bench.report import Case
from mt_tools.bench.timing import Call, alternating

PLAIN = "python -c pass"
IMPORT = "import typer, rich.console, rich.table"
MT = "from mt_cli.main import main; main()"
COMMANDS: Mapping[str, tuple[str, ...]] = {
    PLAIN: ("-c", "pass"),
    "imports of mt plugins": ("-c", IMPORT),
    "imports of mt --help": ("-c", f"{IMPORT}, typer.rich_utils"),  # with which typer draws the help screen
    "mt --help": ("-c", MT, "--help"),
    "mt plugins": ("-c", MT, "plugins"),
}


def startup_cases(rounds: int, train_rounds: int) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as folder:
        # Else no bytecode is written, and every start would compile all modules.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
        calls: dict[str, Call] = {name: partial(_start, arguments, environment) for name, arguments in COMMANDS.items()}
        taken = {name: statistics.median(t) for name, t in alternating(calls, rounds, warm_up=1).items()}
        yield from (command_case(name, taken) for name in ("mt --help", "mt plugins"))
        yield first_step_case(Path(folder), environment, train_rounds)


def command_case(name: str, taken: Mapping[str, float]) -> Case:
    """time_ratio: over Python with the imports. beyond_imports: what comes on top of them, in starts of Python."""
    imports = taken[f"imports of {name}"]
    return {
        "name": name,
        "seconds": taken[name],
        "python_seconds": taken[PLAIN],
        "time_ratio": taken[name] / imports,
        "beyond_imports": (taken[name] - imports + taken[PLAIN]) / taken[PLAIN],
    }


def first_step_case(folder: Path, environment: Mapping[str, str], rounds: int) -> Case:
    number = count()

    def train() -> None:
        run_dir = folder / f"run-{next(number)}"
        stopped = ("--run-dir", str(run_dir), "--set", "train.exit_iteration=1")
        _start(("-m", "mt_cli", "train", *stopped), environment)

    calls: dict[str, Call] = {"torch": partial(_start, ("-c", "import torch"), environment), "train": train}
    taken = {name: statistics.median(t) for name, t in alternating(calls, rounds, warm_up=1).items()}
    beside = taken["train"] - taken["torch"]
    return {"name": "mt train, first step", "import_torch": taken["torch"], "beside_torch": {"seconds": beside}}


def _start(arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=environment, check=True)
