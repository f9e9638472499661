"""Every file of the catalogue is read, or refused with a sentence, within its seconds and its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ckpt.hostile_files import CATALOGUE, SECONDS

HARMLESS = {
    "tokenizer: counted regular expression",
    "tokenizer: padding",  # is turned off
    "safetensors: many entries of metadata",
    "gguf: alignment",  # of a file without tensors
    "gguf: arrays of nothing",
    "torch: lists",
    "torch: members",
    "sentencepiece: many entries",
    "tiktoken: many entries",
    "tiktoken: long token",
}
"""What is read: it costs no more than its size."""


COSTLY = [
    "gguf: arrays of nothing",
    "safetensors: many entries of metadata",
    "safetensors: numbers",
    "sentencepiece: many entries",
    "template: join of a text",
    "tiktoken: many entries",
    "torch: lists",
    "torch: members",
    "torch: nested lists",
    "torch: tuples",
]
"""More than a second each; others of their kinds take less."""
QUICK = [name for name in CATALOGUE if name not in COSTLY]


@pytest.mark.long
@pytest.mark.parametrize("names", [QUICK, pytest.param(COSTLY, marks=pytest.mark.exhaustive)], ids=["quick", "costly"])
def test_hostile_files_are_refused_with_a_sentence(names: list[str], tmp_path: Path) -> None:
    done = {}
    command = [sys.executable, "-m", "tests.ckpt.hostile_files", str(tmp_path), *names]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    for line in result.stdout.splitlines():
        answer = json.loads(line)
        if "name" in answer:
            done[answer["name"]] = answer
    missing = [name for name in names if name not in done]
    assert not missing, f"the process ended at {missing[0]}: {result.stderr[-2000:]}"
    wrong = {
        name: answer["outcome"]
        for name, answer in done.items()
        if answer["outcome"].startswith("traceback") or (answer["outcome"] == "read") != (name in HARMLESS)
    }
    assert wrong == {}
    slow = {name: answer["seconds"] for name, answer in done.items() if answer["seconds"] > SECONDS}
    assert slow == {}
