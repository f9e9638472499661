"""Megatron-Core 0.12 loads what is written for it, strictly, and computes our logits from it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from tests.ckpt.megatron.test_megatron_versions import MODELS
from tests.ckpt.scaled_weights import ScaledWeights
from tests.peer.environment import older_megatron, peer_python
from tests.peer.our_outputs import inputs_of, logits_of

from mt_ckpt.megatron.folder import find_iteration
from mt_ckpt.model import model_config
from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, ConvertOptions
from mt_core.plugins import PluginHost

SCRIPT = Path(__file__).parent / "megatron_process" / "older_version.py"
VERSION = "0.12.2"
"""The newest whose wheel installs below Python 3.12. It has no `megatron.training`."""


@pytest.mark.parametrize("model", ["gpt", "llama", "qwen3", "mixtral"])
def test_an_older_version_computes_our_logits(model: str, host: PluginHost, tmp_path: Path) -> None:
    source = ScaledWeights(MODELS[model], host)
    options = ConvertOptions(target_megatron_version=VERSION, target_transformer_impl="local")
    host[CHECKPOINT_SAVERS].get("megatron-dist").convert.load()(tmp_path / "run", source, options, host)
    inputs = inputs_of(MODELS[model]["family"], MODELS[model]["vocab_size"])
    request = {
        "model": model,
        "norm_epsilon": model_config(source, host).model.norm_epsilon,
        "checkpoint": str(find_iteration(tmp_path / "run")),
        "tokens": inputs["tokens"],
    }
    torch.save(request, tmp_path / "request.pt")
    command = [peer_python(), SCRIPT, older_megatron(VERSION), tmp_path / "request.pt", tmp_path / "answer.pt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    logits = torch.load(tmp_path / "answer.pt")[..., : MODELS[model]["vocab_size"]]
    torch.testing.assert_close(logits, logits_of(source, inputs, host), rtol=0, atol=5e-6)
