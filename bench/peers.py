"""A training step of mt against megatron-core, transformers' Trainer, a plain torch loop and bare matrix products.

    uv venv --python 3.12 PEERS
    uv pip install --python PEERS/bin/python "megatron-core>=0.19,<0.20" torch transformers accelerate numpy einops \
        pybind11 psutil packaging regex
    uv run python bench/peers.py --peer-python PEERS/bin/python [--rounds 9] [--threads 1] [--case GPT]

fp32 on a CPU, the same threads. Each contender is a process of its own (bench/peer_steps); a round is one step of each,
in turn and alone. A ratio is the median over rounds of (time of the other) / (time of mt) within a round: above 1, mt
is faster. Processor time is less noisy than wall time where others use the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peer_steps"))
from cases import CASES, Case

OURS = "mt_trainer"
OTHERS = ("plain_torch", "transformers_trainer", "megatron_core", "bare_products")
OF_PEERS = ("transformers_trainer", "megatron_core")
WARM_UP = 2

Step = dict[str, float]


class Contender:
    def __init__(self, name: str, case: str, arguments: argparse.Namespace) -> None:
        python = arguments.peer_python if name in OF_PEERS else Path(sys.executable)
        command = [python, Path(__file__).parent / "peer_steps", name, case, str(arguments.threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
        self.name, self.steps = name, list[Step]()
        self.log = open(arguments.log_dir / f"{name}.log", "w")  # noqa: SIM115
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        self.process = subprocess.Popen([str(word) for word in command], env=environment, **pipes)

    def step(self) -> Step:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended; see {self.log.name}")
        return dict(json.loads(answer))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


def measure(case: str, arguments: argparse.Namespace) -> dict[str, list[Step]]:
    """Steps by contender. Every other round goes backwards."""
    contenders = [Contender(name, case, arguments) for name in (OURS, *arguments.against)]
    try:
        for number in range(WARM_UP + arguments.rounds):
            # So that no contender always runs after the same one, in what that has left in the processor's caches.
            for contender in contenders if number % 2 else reversed(contenders):
                contender.steps.append(contender.step())
        return {contender.name: contender.steps[WARM_UP:] for contender in contenders}
    finally:
        for contender in contenders:
            contender.close()


def show(name: str, case: Case, steps: dict[str, list[Step]]) -> None:
    print(f"\n{name}")
    for other, found in steps.items():
        losses = [step["loss"] for step in found if not math.isnan(step["loss"])]
        wall = statistics.median(step["wall"] for step in found)
        loss = f", last loss {losses[-1]:.3f}" if losses and other != "bare_products" else ""
        print(
            f"  {other}: {case.tokens / wall:,.0f} tokens/s, {ratios(found, steps[OURS], 'wall')} of wall time, "
            f"{ratios(found, steps[OURS], 'processor')} of processor time, peak {found[-1]['peak_mib']:,.0f} MiB{loss}"
        )


def ratios(theirs: list[Step], ours: list[Step], key: str) -> str:
    found = [a[key] / b[key] for a, b in zip(theirs, ours, strict=True)]
    lower, middle, upper = statistics.quantiles(found, n=4)
    return f"{middle:.3f} ({lower:.2f} to {upper:.2f})"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--against", choices=OTHERS, nargs="+", default=OTHERS)
    parser.add_argument("--log-dir", type=Path, default=Path("."), help="Of what contenders print.")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    machine = f"{platform.machine()}, load {os.getloadavg()[0]:.1f}"
    print(f"{arguments.rounds} rounds, {arguments.threads} threads, fp32, {machine}")
    for name in arguments.case or CASES:
        show(name, CASES[name], measure(name, arguments))
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
