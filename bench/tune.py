"""Steps of fine-tuning by mt against TRL with PEFT on one model and the same records.

    uv venv --python 3.11 PEERS
    uv pip install --python PEERS/bin/python "trl>=1.16,<1.17" peft accelerate datasets torch transformers
    uv run python bench/tune.py --peer-python PEERS/bin/python [--rounds 7] [--threads 1] [--case lora]

fp32 on a CPU, the same threads, no gradient checkpointing on either side. Each side is a process of its own
(bench/tune_steps); a round is one step of each, in turn and alone. Steps differ in what they pack: a ratio is the
median over rounds of the tokens a second of mt over those of TRL within a round (of grpo the completions), where
padding is no token. Above 1, mt is faster. Processor time is less noisy than wall time where others use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CASES = {"sft": 1.3, "lora": 1.2, "dpo": 1.3, "dpo_model": 1.3, "grpo": 1.5}
"""Case -> goal. sft: packed answers; lora: the same with LoRA of rank 16 on all linear layers; dpo: with a reference
whose log-probabilities are computed before the first step; dpo_model: by a second model at each step; grpo: completions
of 64 tokens drawn, judged and trained on, counted in completions."""
SIDES = ("mt_side", "trl_side")
WARM_UP = 2
Step = dict[str, float]


class Side:
    def __init__(self, name: str, case: str, folder: Path, arguments: argparse.Namespace) -> None:
        python = arguments.peer_python if name == "trl_side" else Path(sys.executable)
        command = [python, Path(__file__).parent / "tune_steps/run_side.py", name, case, folder, arguments.threads]
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


def measure(case: str, folder: Path, arguments: argparse.Namespace) -> dict[str, list[Step]]:
    """Steps by side. Every other round goes backwards."""
    sides = [Side(name, case, folder, arguments) for name in SIDES]
    try:
        for number in range(WARM_UP + arguments.rounds):
            for side in sides if number % 2 else reversed(sides):
                side.steps.append(side.step())
        return {side.name: side.steps[WARM_UP:] for side in sides}
    finally:
        for side in sides:
            side.close()


def show(case: str, steps: dict[str, list[Step]]) -> None:
    ours, theirs = (steps[name] for name in SIDES)
    peaks = [found[-1]["peak_mib"] for found in (ours, theirs)]
    unit = "samples" if case == "grpo" else "tokens"
    rate = statistics.median(step["tokens"] / step["wall"] for step in ours)
    print(
        f"{case}: {ratios(ours, theirs, 'wall')} of wall time, {ratios(ours, theirs, 'processor')} of processor time "
        f"(goal {CASES[case]}), {rate:,.1f} {unit}/s; peak {peaks[0]:,.0f} MiB to {peaks[1]:,.0f}, "
        f"{peaks[0] / peaks[1]:.2f} (goal 0.80); last loss {ours[-1]['loss']:.3f}",
        flush=True,
    )


def ratios(ours: list[Step], theirs: list[Step], key: str) -> str:
    found = [a["tokens"] / a[key] / (b["tokens"] / b[key]) for a, b in zip(ours, theirs, strict=True)]
    lower, middle, upper = statistics.quantiles(found, n=4)
    return f"{middle:.2f} ({lower:.2f} to {upper:.2f})"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--log-dir", type=Path, default=Path("."), help="Of what the sides print.")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    print(f"{arguments.rounds} rounds, {arguments.threads} threads, fp32, {platform.machine()}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = Path(__file__).parent / "tune_steps/run_side.py"
        subprocess.run([str(arguments.peer_python), str(steps), "material", "-", name, "1"], check=True)
        for case in arguments.case or CASES:
            print(f"load {os.getloadavg()[0]:.1f}; ", end="")
            show(case, measure(case, folder, arguments))
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
