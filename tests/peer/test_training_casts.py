"""The casts of training in MXFP8 and NVFP4 beside torchao's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.peer.environment import peer_with

from mt_core.nn.kernels.reference.microscaling import cast_mx, cast_nvfp4

SCRIPT = Path(__file__).parent / "quantized_process" / "training_casts.py"


def test_casts_are_those_of_torchao(tmp_path: Path) -> None:
    """MXFP8 bit for bit. In NVFP4 torchao divides where NVIDIA's reference multiplies: numbers may differ by
    rounding."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.exp2(torch.randint(-20, 12, (256, 1), generator=generator).float())
    x = (torch.randn(256, 512, generator=generator) * spread).bfloat16()
    save_file({"x": x}, tmp_path / "x.safetensors")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(peer_with("quantized")), str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    theirs = load_file(tmp_path / "casts.safetensors")
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        mine = cast_mx(x, dtype)
        assert torch.equal(mine.data.view(torch.uint8), theirs[f"{name}.data"])
        assert torch.equal(mine.scale.view(torch.uint8), theirs[f"{name}.scale"])
    four = cast_nvfp4(x, x.abs().max().float())
    # torchao takes the smallest normal number of e4m3 for every scale below it.
    is_served = four.scale.float() >= 2.0**-6
    assert is_served.float().mean() > 0.4
    equal = four.scale.view(torch.uint8) == theirs["e2m1.scale"]
    assert equal[is_served].float().mean() > 0.999
    same = (four.data == theirs["e2m1.data"]).view(256, -1, 8)
    assert same[is_served & equal].float().mean() > 0.99
