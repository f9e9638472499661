"""A base in nf4 is bitsandbytes': its codes, what they dequantize to, and what PEFT computes with our adapter on it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.peer.environment import python_beside_this
from tests.peer.test_peft_computes import base_folder, outcome_of_ours
from tests.tune.adapters.models import write_peft
from tests.tune.adapters.test_quantized_base import LORA, quantized_run, reader_of, started

from mt_core.checkpoint_lookup import open_checkpoint
from mt_tune.adapters.quantized_reading import DenseCheckpoint

PROCESS = Path(__file__).parent / "peft_process" / "quantized.py"
LLAMA = SimpleNamespace(
    config="LlamaConfig",
    model="LlamaForCausalLM",
    keys={
        "vocab_size": 100, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    },
)  # fmt: skip
BASES = {"double": ({"base": "nf4"}, ()), "plain": ({"base": "nf4", "base_double_quant": False}, ("plain",))}


def python() -> Path:
    given = os.environ.get("MT_QLORA_PYTHON")
    return Path(given) if given else python_beside_this("peft>=0.21,<0.22", "accelerate", "bitsandbytes>=0.50")


def ask(*arguments: object) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(python()), str(PROCESS), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", BASES)
def test_peft_on_bitsandbytes_computes_our_logits_and_gradients(host, tmp_path, name) -> None:
    keys, words = BASES[name]
    plain, folder = base_folder(tmp_path / "base", LLAMA), tmp_path / "nf4"
    ask("write", plain, folder, *words)
    reader, adapter = open_checkpoint(folder, host), {**LORA, **keys}
    # What the folder holds is kept; what is made of the unquantized folder has the same codes.
    held, config = quantized_run(host, reader, adapter)
    ours, _ = quantized_run(host, open_checkpoint(plain, host), adapter)
    codes = [part for part in held.shapes() if part.endswith(".codes")]
    assert len(codes) == 8
    assert all(torch.equal(held.read(part), ours.read(part)) for part in codes)
    dense = DenseCheckpoint(held, config, host)
    assert all(torch.equal(dense.read(weight), reader.read(weight)) for weight in reader.shapes())
    model, config = started(host, reader, adapter)
    write_peft(tmp_path / "adapter", model, config, host)
    tokens = torch.randint(1, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    (tmp_path / "tokens.json").write_text(json.dumps(tokens.tolist()))
    ask("compute", folder, tmp_path / "adapter", tmp_path / "tokens.json", tmp_path / "out")
    logits, gradients = outcome_of_ours(model, tokens)
    theirs = load_file(tmp_path / "out")
    assert (theirs.pop("logits") - logits).abs().max() < 2e-6
    assert theirs.keys() == gradients.keys()
    for key, value in gradients.items():
        assert (theirs[key] - value).abs().max() < 2e-5 * value.abs().max().clamp(min=1e-6), key
    assert reader_of(model, config).shapes().keys() >= set(codes)
