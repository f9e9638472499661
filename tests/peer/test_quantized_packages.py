"""Weights that the packages of their formats have quantized: we read what these packages dequantize them to."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from tests.peer.environment import peer_with

from mt_ckpt.files.safetensors import SafetensorsFile
from mt_ckpt.hugging_face.tensors import TensorFiles
from mt_ckpt.quantized.methods import dequantized

PROCESS = Path(__file__).parent / "quantized_process"
FORMATS = (
    *(f"ct-pack-{bits}" for bits in (2, 3, 4, 5, 6, 7, 8)),
    *(f"ct-pack-asym-{bits}" for bits in (3, 4, 8)),
    *(f"ct-{kind}-{strategy}" for kind in ("int", "float") for strategy in ("tensor", "channel")),
    *("ct-pack-channel", "ct-float-block", "ct-naive-asym", "ct-nvfp4", "ct-mxfp4", "ct-mxfp6", "ct-mxfp8"),
    *("fp8-blocks", "fp8-ue8m0", "fp8-uint8", "mxfp8", "fp4-experts"),
    *("bnb-nf4", "bnb-nf4-nested", "bnb-fp4", "bnb-fp4-nested", "bnb-nf4-odd", "bnb-int8"),
    *("modelopt-nvfp4", "modelopt-fp8"),
    *("ao-int8", "ao-float8", "ao-int4-groups", "ao-int3-rows", "ao-nvfp4", "ao-mxfp8", "ao-mxfp4"),
    *(f"mlx-{bits}" for bits in (2, 3, 4, 5, 6, 8)),
    *("mlx-fp16", "mlx-mxfp4", "mlx-nvfp4", "mlx-mxfp8"),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the packages have written into, all formats in one process."""
    if given := os.environ.get("MT_QUANTIZED_PEER_FILES"):  # of an earlier run
        return Path(given)
    folder = tmp_path_factory.mktemp("quantized")
    python = peer_with("quantized")
    done = subprocess.run(
        [str(python), str(PROCESS / "write.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_package(written: Path, name: str) -> None:
    """Bit for bit."""
    external = json.loads((written / f"{name}.json").read_text())
    stored = TensorFiles([SafetensorsFile(written / f"{name}.safetensors")])
    expected = SafetensorsFile(written / f"{name}.expected.safetensors")
    tensors, _ = dequantized(stored, external)
    assert set(tensors.infos) == set(expected.tensors)
    for key, info in expected.tensors.items():
        value, wanted = tensors.read(key), expected.read(key)
        assert tensors.infos[key] == info
        assert value.dtype == wanted.dtype
        assert torch.equal(value, wanted), (value - wanted).abs().max()
