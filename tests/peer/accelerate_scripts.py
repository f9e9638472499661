"""Runs scripts for Accelerate under Accelerate and under mt: one process for a session, whose forks are the ranks."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.peer.accelerate_process.tiny_model import TEXTS, write_classifier, write_gpt2, write_llama
from tests.peer.environment import installed_alone, python_beside_this

SERVER = Path(__file__).parent / "accelerate_process" / "server.py"
JOB_SECONDS = 300.0
CURRENT = "accelerate>=1.15"


@dataclass(frozen=True)
class Found:
    """losses: given to `backward`, as means over ranks. metrics: of each evaluation."""

    losses: list[float]
    metrics: list[float]


class Scripts:
    """A started process with datasets, evaluate and transformers. files: name in a job's folder -> file or folder.
    packages: requirements beside what the environment of the tests has."""

    def __init__(self, files: Mapping[str, Path], *packages: str) -> None:
        self.files = files
        self._process = subprocess.Popen(
            [str(python_beside_this("datasets", "evaluate", *packages)), str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "ACCELERATE_USE_CPU": "true",
                "HF_HUB_OFFLINE": "1",
                "WANDB_MODE": "offline",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def run(
        self,
        package: str,
        script: Path,
        folder: Path,
        arguments: Sequence[str] = (),
        *,
        world: int = 1,
        variables: Mapping[str, str] | None = None,
        version: str = CURRENT,
        text: str = "mrpc",
        libraries: Sequence[str] = (),
        replaced: Mapping[str, str] | None = None,
    ) -> Found:
        """version: requirement on Accelerate, whose scripts may import its test utilities. libraries: requirements of
        distributions that import Accelerate, and of what they need. replaced: words of the script by others.
        Raises AssertionError with the end of the first rank's output that failed."""
        folder.mkdir(parents=True)
        for name, source in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, folder / name)
        job = {
            "path": [str(installed_alone(one)) for one in (version, *libraries)],
            "library": bool(libraries),
            "package": package,
            "script": str(script),
            "arguments": list(arguments),
            "folder": str(folder),
            "variables": {"HF_HOME": str(folder / "hub"), **(variables or {})},
            "world": world,
            "text": text,
            "replaced": dict(replaced or {}),
        }
        codes = self._ask(job)
        for rank, code in enumerate(codes):
            assert code == 0, f"rank {rank}: {(folder / f'output.{rank}').read_text(encoding='utf-8')[-3000:]}"
        return Found(**json.loads((folder / "found.0.json").read_text(encoding="utf-8")))

    def _ask(self, job: Mapping[str, object]) -> list[int]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps(job), file=stdin, flush=True)
        ready, _, _ = select.select([stdout], [], [], JOB_SECONDS)
        line = stdout.readline() if ready else ""
        if not line:
            self._process.kill()
            pytest.fail(f"{job['script']} under {job['package']}: no answer within {JOB_SECONDS:.0f} s")
        return list(json.loads(line))


def write_files(folder: Path) -> dict[str, Path]:
    """Small models under the names that the scripts ask the hub for, and text."""
    write_classifier(folder / "bert")
    write_llama(folder / "llama")
    write_gpt2(folder / "gpt2")
    # 96 and 16 samples of 16 tokens, pairs in eights: with Megatron-LM a batch that is not full is filled up.
    for name, count in (("train.txt", 210), ("valid.txt", 36)):
        lines = [f"{TEXTS[number % 6]} {TEXTS[(5 * number + 2) % 6]}" for number in range(count)]
        (folder / name).write_text("\n".join(lines), encoding="utf-8")
        pairs = [
            {"sentence1": line, "sentence2": TEXTS[number % 5], "label": len(line) % 2}
            for number, line in enumerate(lines[: count // 8 * 8])
        ]
        (folder / name).with_suffix(".json").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    for name in ("pictures/train/ants", "pictures/train/bees", "pictures/val"):  # names of classes; files are generated
        (folder / name).mkdir(parents=True)
    models = {
        "bert-base-cased": folder / "bert",
        "HuggingFaceTB/SmolLM-360M": folder / "llama",
        "gpt2": folder / "gpt2",
        "pictures": folder / "pictures",
    }
    return {**models, **{path.name: path for path in folder.iterdir() if path.is_file()}}
