"""How long `mt --help` and `mt plugins` take, against Python itself and the import of typer and rich.

    python bench/startup.py [--rounds 21]

Runs are interleaved, medians are printed. Bytecode is cached in a folder of this benchmark, as it is after any
first run; one round warms it up. Two ratios are printed: the time against three times (python -c pass + imports),
and, stricter, against three times python -c pass, plus the imports once.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distributions, version
from statistics import median

IMPORT = "import typer, rich.console, rich.table"
HELP_IMPORT = f"{IMPORT}, typer.rich_utils"
"""typer draws the help screen with this module of its own."""
MT = "from mt_cli.main import main; main()"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import typer, rich": ["-c", IMPORT],
    "import typer, rich, typer.rich_utils": ["-c", HELP_IMPORT],
    "mt --help": ["-c", MT, "--help"],
    "mt plugins": ["-c", MT, "plugins"],
}
NEEDS = {"mt --help": "import typer, rich, typer.rich_utils", "mt plugins": "import typer, rich"}
LIMIT = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as cache:
        times = measure(rounds, cache)
    middle = {name: median(values) for name, values in times.items()}
    print(conditions(rounds))
    for name, seconds in middle.items():
        print(f"{name:<38}{seconds * 1e3:8.1f} ms   (fastest {min(times[name]) * 1e3:.1f})")
    for name, imports in NEEDS.items():
        print(verdict(name, middle[name], middle["python -c pass"], middle[imports]))


def measure(rounds: int, cache: str) -> dict[str, list[float]]:
    """Seconds of each command in each round, after one round that is not counted."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=environment, check=True)
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def verdict(name: str, seconds: float, plain: float, imported: float) -> str:
    """`imported` includes the start of Python."""
    imports = imported - plain
    loose, strict = seconds / imported, (seconds - imports) / plain
    return (
        f"{name}: {loose:.2f}x (python -c pass + imports), limit {LIMIT:.0f}x; "
        f"beyond the imports {strict:.2f}x python -c pass"
    )


def conditions(rounds: int) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("typer", "rich", "pluggy"))
    found = sum(1 for _ in distributions())
    return (
        f"Python {platform.python_version()}, {packages}, {found} distributions installed, {os.cpu_count()} cores "
        f"(load {os.getloadavg()[0]:.1f}), medians of {rounds} interleaved rounds"
    )


if __name__ == "__main__":
    main()
