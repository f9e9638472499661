"""What ONNX files are not written of. tests/peer/test_onnx.py asks onnxruntime for those that are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.ckpt.convert_cases import LLAMA

from mt_ckpt.convert import convert
from mt_ckpt.onnx import save
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import ConfigError

SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 16}
BERT = {"family": "bert", **SHAPE}


def refused(model: Path, words: str, host, tmp_path: Path, **options) -> None:
    with pytest.raises(ConfigError, match=words):
        convert(model, tmp_path / "out", saver="onnx", options=ConvertOptions(**options), host=host)
    assert not (tmp_path / "out").exists()


def test_a_model_without_encoders_is_refused(make_model, host, tmp_path: Path) -> None:
    refused(make_model(**LLAMA), "model.family=llama has no encoder .* bert and biencoder", host, tmp_path)


def test_options_that_graphs_do_not_have_are_refused(make_model, host, tmp_path: Path) -> None:
    model = make_model(**BERT)
    refused(model, "--dtype bf16: graphs are written in fp32", host, tmp_path, dtype="bf16")
    refused(model, "--target-tensor-parallel-size 2 means nothing", host, tmp_path, target_tensor_parallel_size=2)
    refused(model, "--quantize int8: the format onnx has no schemes", host, tmp_path, quantize="int8")


def test_what_is_missing_or_too_large_is_named(make_model, host, tmp_path: Path, monkeypatch) -> None:
    model = make_model(**BERT)
    monkeypatch.setattr(save, "find_spec", lambda name: None)
    refused(model, r"needs the package onnxscript; .*mt-ckpt\[onnx\]", host, tmp_path)
    monkeypatch.setattr(save, "MAX_BYTES", 1000)
    refused(model, "GB in fp32; a file of ONNX holds less", host, tmp_path)
