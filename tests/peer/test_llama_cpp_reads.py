"""llama.cpp itself: it loads our GGUF files and computes our logits, and its quantizer gives our bytes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.peer.environment import peer_with
from tests.peer.gguf_models import BESIDE_TOWERS, ENCODER_DECODERS, ENCODERS, MODELS, VOCAB, save_model

from mt_ckpt.convert import convert
from mt_ckpt.convert.reader_loss import token_inputs
from mt_ckpt.gguf.block_types import BY_NAME
from mt_ckpt.gguf.quantizers import QUANTIZERS, quantize
from mt_ckpt.model import build_model, model_config
from mt_ckpt.native.read import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.train.checkpoint.state import load_parameters

SERVER = Path(__file__).parent / "llama_cpp_process" / "server.py"
IDS = [3, 77, 12, 12, 101, 0, 64, 9, 33, 2, 5, 90]
WIDE = {"family": "llama", "num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2}
WIDE |= {"ffn_hidden_size": 512, "max_position_embeddings": 64, "vocab_size": VOCAB}
MIXTURES = ["F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ4_NL", "IQ4_XS"]


def ask(folder: Path, **job: Any) -> Any:
    """What llama.cpp answers to a job."""
    output = folder / "answer.npz"
    work = json.dumps({"output": str(output), "length": 64, **job})
    command = [str(peer_with("llama_cpp")), str(SERVER)]
    done = subprocess.run(command, input=work, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return np.load(output)


def loaded(path: Path, host: Any) -> torch.nn.Module:
    """The model of a checkpoint of mt's."""
    reader = open_checkpoint(path)
    model = build_model(model_config(reader, host), host).eval()
    load_parameters(model.named_parameters(), reader, parameter_layouts(model), "model.", ParallelContext())
    return model


def our_logits(path: Path, host: Any, ids: list[int]) -> np.ndarray:
    """[len(ids), vocabulary] of a checkpoint of mt's."""
    model = loaded(path, host)
    names = token_inputs(model, VOCAB)
    assert names is not None
    rows = next(name for name, value in names.items() if value.dtype == torch.long and value.shape[0] <= 2)
    extra = {name: torch.arange(len(ids))[None] for name in names if "position" in name}
    with torch.no_grad():
        output = model(**{rows: torch.tensor([ids]), **extra})
    logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
    return logits[0].float().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits(name: str, host: Any, tmp_path: Path) -> None:
    """In fp32; llama.cpp keeps keys and values in fp16, and has its activations from a table of fp16."""
    source = save_model(tmp_path / "source", MODELS[name], host)
    convert(source, tmp_path / "m", saver="gguf", host=host)
    theirs = ask(tmp_path, file=str(tmp_path / "m" / "m.gguf"), ids=IDS)["logits"]
    ours = our_logits(source, host, IDS)
    assert np.abs(ours - theirs).max() < 0.01 * ours.std()
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).all()


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_the_same_logits_of_a_decoder_behind_an_encoder(name: str, host: Any, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", ENCODER_DECODERS[name], host)
    convert(source, tmp_path / "m", saver="gguf", host=host)
    first, second = IDS, IDS[:7]
    theirs = ask(tmp_path, file=str(tmp_path / "m" / "m.gguf"), encoder_ids=first, ids=second)["logits"]
    with torch.no_grad():
        ours = loaded(source, host)(torch.tensor([first]), torch.tensor([second]))[0].numpy()
    assert np.abs(ours - theirs).max() < 0.01 * ours.std()
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).all()


@pytest.mark.parametrize("name", BESIDE_TOWERS)
def test_the_same_logits_of_a_decoder_beside_a_tower(name: str, host: Any, tmp_path: Path) -> None:
    """In a text all axes of a position are the same; the file has the decoder alone, and is read as one."""
    source = save_model(tmp_path / "source", BESIDE_TOWERS[name], host)
    convert(source, tmp_path / "m", saver="gguf", host=host)
    convert(tmp_path / "m", tmp_path / "back", saver="mt", host=host)
    theirs = ask(tmp_path, file=str(tmp_path / "m" / "m.gguf"), ids=IDS)["logits"]
    with torch.no_grad():
        ours = loaded(source, host)(torch.tensor([IDS]))[0].numpy()
    assert np.abs(ours - theirs).max() < 0.01 * ours.std()
    np.testing.assert_allclose(our_logits(tmp_path / "back", host, IDS), ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_the_same_states_of_an_encoder(name: str, host: Any, tmp_path: Path) -> None:
    """llama.cpp approximates gelu by tanh."""
    source = save_model(tmp_path / "source", ENCODERS[name], host)
    convert(source, tmp_path / "m", saver="gguf", host=host)
    theirs = ask(tmp_path, file=str(tmp_path / "m" / "m.gguf"), ids=IDS, encode=True)["states"]
    ours = our_logits(source, host, IDS)
    assert np.abs(ours - theirs).max() < 0.01 * ours.std()


@pytest.mark.parametrize("mixture", MIXTURES)
def test_quantized_files(mixture: str, host: Any, tmp_path: Path) -> None:
    """The logits of the dequantized weights, within the rounding of activations to 8 bits that llama.cpp multiplies."""
    source = save_model(tmp_path / "source", WIDE, host, scale=0.04)
    convert(source, tmp_path / "m", saver="gguf", options=ConvertOptions(quantize=mixture), host=host)
    convert(tmp_path / "m", tmp_path / "back", saver="mt", host=host)
    theirs = ask(tmp_path, file=str(tmp_path / "m" / "m.gguf"), ids=IDS)["logits"]
    ours = our_logits(tmp_path / "back", host, IDS)
    error = np.sqrt(np.square(ours - theirs).mean()) / ours.std()
    assert error < (0.03 if mixture.startswith(("Q", "IQ")) else 0.01)


def hard_rows() -> np.ndarray:
    """[64, 1024]: normal ones, zeros, constants, outliers, tiny ones, positive ones."""
    x = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32) * np.float32(0.02)
    x[0], x[1, :256], x[2], x[6, ::2] = 0, 0.5, np.abs(x[2]), 0
    x[3, ::7] *= 50
    x[4] *= np.float32(1e-20)
    x[5] *= np.float32(1e-9)
    return x


def test_blocks_are_those_of_its_own_quantizer(tmp_path: Path) -> None:
    """Byte for byte, with and without an importance matrix: the file that its quantizer makes of these tensors is this
    one, and so is the text."""
    x = hard_rows()
    importance = np.square(np.random.default_rng(1).standard_normal(1024)).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", x=x, importance=importance)
    kinds = {f"{name}-{int(weighted)}": (name, weighted) for name in QUANTIZERS for weighted in (False, True)}
    jobs = {
        key: [BY_NAME[name].number, BY_NAME[name].size(x.size), weighted] for key, (name, weighted) in kinds.items()
    }
    theirs = ask(tmp_path, quantize=jobs, inputs=str(tmp_path / "inputs.npz"))
    for key, (name, weighted) in kinds.items():
        ours = quantize(torch.from_numpy(x), BY_NAME[name], importance if weighted else None)
        np.testing.assert_array_equal(ours, theirs[key], err_msg=key)
