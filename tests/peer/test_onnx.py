"""ONNX files of `mt convert --saver onnx` in onnxruntime."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.peer.environment import python_beside_this

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "onnx_process" / "compare.py"
OUTPUTS = {
    "bert model": {"hidden_states", "pooled", "binary_logits"},
    "bert-pre model": {"hidden_states"},
    "biencoder query": {"sentence_embedding"},
    "biencoder context": {"sentence_embedding"},
    "biencoder-shared model": {"sentence_embedding"},
}


def test_onnxruntime_computes_what_the_encoders_do(tmp_path: Path) -> None:
    """Any number of texts of any length, with padding; a minute and a half."""
    python = python_beside_this("onnxscript>=0.5", "onnx", "onnxruntime>=1.23")
    done = subprocess.run(
        [str(python), str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: set(outputs) for name, outputs in found.items()} == OUTPUTS
    worst = {f"{name} {output}": off for name, outputs in found.items() for output, off in outputs.items()}
    assert max(worst.values()) < 1e-5, worst
