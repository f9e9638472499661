"""Makes the runs, draws the pictures, and asks the commands."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import scripts.wrong_runs.configured
import scripts.wrong_runs.faulty  # noqa: F401
from scripts.figures import schemes
from scripts.wrong_runs.cases import CASES, mt

PICTURES = Path(__file__).parents[2] / "docs/guides/wrong-run"
LIMIT = 60.0
"""Seconds in which a fault is to be found."""
FOUND, PARTED = 0, 1


def main(names: list[str]) -> None:
    folder = next((Path(name) for name in names if "/" in name), None)
    chosen = [name for name in names if "/" not in name] or list(CASES)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        run_cases(folder, chosen)
        return
    with TemporaryDirectory(prefix="mt-wrong-") as temporary:
        run_cases(Path(temporary), chosen)


def run_cases(folder: Path, names: list[str]) -> None:
    for name in names:
        seconds, answer = find(folder, name)
        schemes.main([str(PICTURES / f"{name}.svg")])
        print(f"\n{name}: mt {' '.join(CASES[name].command)}, {seconds:.1f} s\n{answer}", flush=True)


def find(folder: Path, name: str, pictures: Path = PICTURES) -> tuple[float, str]:
    """Trains, draws into the folder of pictures, asks. Raises AssertionError where the fault is not named in time."""
    case = CASES[name]
    case.train(folder)
    mt(folder, "plot", *case.plot, "-o", str(pictures / f"{name}.svg"))
    began = time.perf_counter()
    answer = mt(folder, *case.command, codes=(FOUND, PARTED))
    seconds = time.perf_counter() - began
    missing = [word for word in case.words if word not in answer]
    assert not missing, f"{name}: the answer lacks {missing}:\n{answer}"
    assert seconds < LIMIT, f"{name}: found in {seconds:.0f} s"
    return seconds, answer


if __name__ == "__main__":
    main(sys.argv[1:])
