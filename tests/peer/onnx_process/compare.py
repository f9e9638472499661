"""Writes encoders as ONNX with mt and runs them with onnxruntime, beside mt's own modules.

    python compare.py FOLDER

Prints as JSON for each file and output the largest difference over tokens, and what the files say of themselves.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from mt_ckpt.convert import convert
from mt_ckpt.model import expected_parameters
from mt_ckpt.native.save import save_checkpoint
from mt_core.config.loading import config_from_dict
from mt_core.plugins import load_plugins
from mt_core.train.trained_model import load_trained_model

SHAPE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64,
    "max_position_embeddings": 64, "vocab_size": 100,
}  # fmt: skip
MODELS = {
    "bert": {"family": "bert"},
    "bert-pre": {"family": "bert", "layernorm_placement": "pre", "num_tokentypes": 0, "bert_binary_head": False},
    "biencoder": {"family": "biencoder", "biencoder_projection_dim": 16},
    "biencoder-shared": {"family": "biencoder", "biencoder_shared_query_context_model": True},
}


def save_model(path: Path, model: dict[str, Any]) -> Path:
    """With random weights of a size that outputs depend on."""
    host, tokenizer = load_plugins(), {"tokenizer_type": "NullTokenizer", "vocab_size": 100}
    config = config_from_dict({"model": model, "tokenizer": tokenizer}, host)
    generator = torch.Generator().manual_seed(1)
    shapes = {name: layout.shape for name, layout in expected_parameters(config, host).items()}
    state = {f"model.{name}": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_checkpoint(path, state.items(), {"iteration": 1, "config": config.to_dict()}, {})
    return path


def inputs(names: set[str], texts: int, length: int) -> dict[str, np.ndarray]:
    """Texts of several lengths, padded behind."""
    drawn = np.random.default_rng(texts)
    mask = (np.arange(length) < drawn.integers(2, length + 1, (texts, 1))).astype(np.int64)
    found = {"input_ids": drawn.integers(0, 50, (texts, length)), "attention_mask": mask}
    if "token_type_ids" in names:
        found["token_type_ids"] = drawn.integers(0, 2, (texts, length))
    return found


def differences(file: Path, encoder: torch.nn.Module) -> dict[str, float]:
    session = onnxruntime.InferenceSession(file)
    outputs = [output.name for output in session.get_outputs()]
    worst = dict.fromkeys(outputs, 0.0)
    for texts, length in ((1, 5), (3, 23), (2, 64)):
        given = inputs({entry.name for entry in session.get_inputs()}, texts, length)
        theirs = dict(zip(outputs, session.run(None, given), strict=True))
        ids, mask = torch.from_numpy(given["input_ids"]), torch.from_numpy(given["attention_mask"])
        types = torch.from_numpy(given["token_type_ids"]) if "token_type_ids" in given else None
        with torch.no_grad():
            ours = encoder(ids, types, mask)
        named = {"sentence_embedding": ours} if isinstance(ours, torch.Tensor) else ours._asdict()
        for name, values in theirs.items():
            own = named[name].numpy()
            off = np.abs(own - values)
            # What stands at padding is nobody's.
            off = off * mask.numpy()[..., None] if off.ndim == 3 else off
            worst[name] = max(worst[name], float(off.max() / np.abs(own).max()))
    return worst


def main(folder: Path) -> None:
    host, found = load_plugins(), {}
    for name, keys in MODELS.items():
        source = save_model(folder / name, {**SHAPE, **keys})
        convert(source, folder / f"{name}-onnx", saver="onnx", host=host)
        loaded = load_trained_model(source, host, device="cpu").model.eval()
        for part, encoder in loaded.encoders().items():
            found[f"{name} {part}"] = differences(folder / f"{name}-onnx" / f"{part}.onnx", encoder)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
