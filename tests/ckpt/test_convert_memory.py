"""Converting holds a tensor or two, whatever the model's size. Files are sparse: their bytes are zeros on no disk."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from mt_ckpt.convert import convert
from mt_ckpt.files import safetensors
from mt_ckpt.native import convert as native
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import CheckpointError
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks

pytestmark = pytest.mark.slow


class Sink(safetensors.SafetensorsWriter):
    """Everything but the writing."""

    def _write(self, data: memoryview) -> tuple[int, str]:
        return len(data), "0" * 32


def memory(key: str) -> int:
    """Of this process, in bytes: ru_maxrss would count the process that it was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def growth(rank: int, world: int, source: Path, target: Path, saver: str, dtype: str | None) -> int:
    """Bytes by which the peak of a conversion is above what the process had before; it ends with the test."""
    for module in (safetensors, native):
        vars(module)["SafetensorsWriter"] = Sink
    host = load_plugins()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = memory("VmRSS")
    # What was not written cannot be opened, if the saver does open it.
    end = pytest.raises(CheckpointError, match="truncated|0 bytes") if saver == "hf" else nullcontext()
    with end:
        convert(source, target, saver=saver, options=ConvertOptions(dtype=dtype), host=host)
    return memory("VmHWM") - before


def write_sparse_llama(folder: Path, *, hidden: int, ffn: int, layers: int, vocab: int, heads: int, groups: int) -> int:
    """A Llama in bf16, all zeros, a file for each layer. Returns the bytes of its largest canonical tensor."""
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers}
    config |= {"num_attention_heads": heads, "num_key_value_heads": groups, "intermediate_size": ffn}
    (folder / "config.json").write_text(json.dumps(config))
    keys = hidden // heads * groups
    shapes = {
        "self_attn.q_proj": [hidden, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, hidden],
        "mlp.gate_proj": [ffn, hidden],
        "mlp.up_proj": [ffn, hidden],
        "mlp.down_proj": [hidden, ffn],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    files = {f"{i}": {f"model.layers.{i}.{n}.weight": s for n, s in shapes.items()} for i in range(layers)}
    ends = {
        "model.embed_tokens.weight": [vocab, hidden],
        "model.norm.weight": [hidden],
        "lm_head.weight": [vocab, hidden],
    }
    files["ends"] = ends
    names: dict[str, str] = {}
    for file, tensors in files.items():
        names |= dict.fromkeys(tensors, f"model-{file}.safetensors")
        write_sparse(folder / f"model-{file}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return 2 * hidden * max(2 * ffn, vocab)


def write_sparse(file: Path, tensors: dict[str, list[int]]) -> None:
    header, position = {}, 0
    for name, shape in tensors.items():
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + position)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with /proc")
@pytest.mark.parametrize(("saver", "dtype"), [("hf", None), ("mt", None), ("hf", "fp32")])
def test_peak_memory_of_many_layers(tmp_path: Path, saver: str, dtype: str | None) -> None:
    """0.7 GB in 32 layers; in fp32, where the largest tensor is that of the output, 1 GB in 20."""
    layers = 20 if dtype else 32
    largest = write_sparse_llama(tmp_path / "m", hidden=1024, ffn=2048, layers=layers, vocab=32_000, heads=16, groups=8)
    (grown,) = run_ranks(1, growth, tmp_path / "m", tmp_path / "out", saver, dtype)
    assert grown < 2 * largest * (2 if dtype else 1) + 400 * 10**6
    assert grown > largest  # so that something was measured
