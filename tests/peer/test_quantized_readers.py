"""What transformers with compressed-tensors, and mlx-lm, compute from folders of `mt convert --quantize`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.peer.environment import peer_with

from mt_ckpt.convert import convert
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.plugins import PluginHost

SHAPE = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
IDS = torch.arange(1, 25)[None]
EXACT = ("fp8-blocks", "fp8-blocks-ue8m0", "fp8", "int8", "nvfp4", "mxfp4", "mxfp8", "w4a16", "w4a16-asym", "w8a16")
CLOSE = {"mlx-3bit": 1e-5, "mlx-4bit": 1e-5, "mlx-8bit": 1e-5, "awq": 1e-2}
"""mlx multiplies quantized matrices in an order of its own, and those of AWQ in fp16."""
PROCESS = Path(__file__).parent / "quantized_process" / "logits.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, host: PluginHost) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("written")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder / "source")
    for scheme in (*EXACT, *CLOSE):
        options = ConvertOptions(quantize=scheme)
        convert(folder / "source", folder / "quantized" / scheme, saver="hf", options=options, host=host)
        convert(folder / "quantized" / scheme, folder / "read" / scheme, saver="hf", host=host)
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, torch.Tensor]:
    return logits_of(folder, sorted((folder / "quantized").iterdir()))


def logits_of(folder: Path, folders: list[Path]) -> dict[str, torch.Tensor]:
    """By name of the folder; the file with all of them goes to `folder`."""
    done = subprocess.run(
        [str(peer_with("quantized")), str(PROCESS), str(folder / "logits.safetensors"), *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder / "logits.safetensors")


def ours(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits


@pytest.mark.parametrize("scheme", EXACT)
def test_transformers_computes_the_same_bits(folder: Path, theirs: dict[str, torch.Tensor], scheme: str) -> None:
    assert torch.equal(ours(folder / "read" / scheme), theirs[scheme])


@pytest.mark.parametrize("scheme", CLOSE)
def test_mlx_computes_the_same(folder: Path, theirs: dict[str, torch.Tensor], scheme: str) -> None:
    expected = ours(folder / "read" / scheme)
    assert (expected - theirs[scheme]).abs().max() < CLOSE[scheme] * expected.abs().max()


def test_transformers_reads_experts_of_gpt_oss(tmp_path: Path, host: PluginHost) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    shape = {**SHAPE, "intermediate_size": 64, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = GptOssForCausalLM(
        GptOssConfig(**shape, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    )
    model.bfloat16().save_pretrained(tmp_path / "source")
    packed, read = tmp_path / "packed", tmp_path / "read"
    options = ConvertOptions(quantize="mxfp4-experts")
    convert(tmp_path / "source", packed, saver="hf", options=options, host=host)
    convert(packed, read, saver="hf", host=host)
    theirs = logits_of(tmp_path, [packed])["packed"]
    assert (ours(read) - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert (ours(tmp_path / "source") - theirs).abs().max() > 1e-3 * theirs.abs().max()
