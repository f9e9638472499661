"""What transformers with compressed-tensors computes from folders that `mt calibrate` has written."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.peer.environment import peer_with
from tests.tools.calibration.models import calibrated, save_model

from mt_core.plugins import PluginHost
from mt_core.train.trained_model import load_trained_model
from mt_tools.calibration.options import CalibrationOptions, Method

CASES: dict[str, tuple[str, tuple[Method, ...]]] = {
    "gptq": ("w4a16-g16", ("mse", "gptq")),
    "gptq-max": ("w4a16-g16", ("max", "gptq")),
    "asymmetric": ("w4a16-asym-g16", ("gptq",)),
    "awq-factors": ("w4a16-g16", ("awq", "mse")),
    "rotated": ("w8a16-g16", ("rotate", "rotate-values", "mse")),
    "smooth-int8": ("int8", ("smoothquant", "gptq")),
    "fp8": ("fp8", ("mse",)),
}
"""Folder -> scheme, methods. Rotations and factors are folded into weights beside those that are rounded."""
PROCESS = Path(__file__).parent / "quantized_process" / "logits.py"
IDS = torch.arange(1, 25)[None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    source = save_model(folder / "source", untie_embeddings_and_output_weights=True)
    for name, (scheme, methods) in CASES.items():
        calibrated(source, folder / "out" / name, CalibrationOptions(scheme, methods))
    return folder / "out"


@pytest.fixture(scope="module")
def theirs(folders: Path) -> dict[str, torch.Tensor]:
    done = subprocess.run(
        [str(peer_with("quantized")), str(PROCESS), str(folders / "logits.safetensors"), *map(str, folders.iterdir())],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return load_file(folders / "logits.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_the_folder_has_our_logits(folders: Path, theirs: dict[str, torch.Tensor], name: str, host: PluginHost) -> None:
    """Ours are those of mt's own model with the weights of the folder, in fp32."""
    trained = load_trained_model(folders / name, host, device="cpu")
    with torch.no_grad():
        ours = trained.model.float().eval()(IDS)
    assert (ours - theirs[name]).abs().max() < 1e-4 * ours.abs().max()
