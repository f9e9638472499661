"""Tables with rows beyond the vocabulary: refused with both ways out, dropped when that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.ckpt.conftest import assert_same_state, tensors_of
from tests.ckpt.convert_cases import MODELS
from tests.ckpt.test_convert_command import run_convert

from mt_ckpt.convert import convert
from mt_ckpt.native.read import open_checkpoint
from mt_core.errors import CheckpointError, ConfigError

ROWS = 128


@pytest.fixture(params=["llama", "llama_tied_biased", "bert"])
def padded(request, make_model, host, tmp_path: Path) -> Path:
    """A vocabulary of 101 in tables of 128 rows."""
    convert(make_model(**MODELS[request.param]), tmp_path / "hf", saver="hf", host=host)
    (tmp_path / "hf" / "mt-checksums.json").unlink()  # tests change the files
    file = tmp_path / "hf" / "model.safetensors"
    tensors = {
        name: torch.cat([tensor, torch.full((ROWS - 101, *tensor.shape[1:]), 7.0)]) if len(tensor) == 101 else tensor
        for name, tensor in load_file(file).items()
    }
    assert any(len(tensor) == ROWS for tensor in tensors.values())
    save_file(tensors, file, {"format": "pt"})
    return tmp_path / "hf"


def test_refused_with_both_ways_out(padded: Path, host) -> None:
    with pytest.raises(CheckpointError, match=r"word_embeddings.weight has 128 rows.*vocab_size=101.*--trim-voc") as e:
        convert(padded, padded.parent / "mt", saver="mt", host=host)
    assert "set vocab_size to 128 in the checkpoint's configuration" in str(e.value)
    assert not (padded.parent / "mt").exists()


@pytest.mark.parametrize("saver", ["mt", "hf"])
def test_dropped_when_requested(padded: Path, host, saver: str) -> None:
    convert(padded, padded.parent / "first", saver=saver, trim_vocabulary=True, verify=True, host=host)
    convert(padded.parent / "first", padded.parent / "mt", saver="mt", host=host)
    expected = tensors_of(open_checkpoint(padded.parent / "source"))
    assert_same_state(tensors_of(open_checkpoint(padded.parent / "mt")), expected)


def test_kept_where_the_configuration_counts_them(padded: Path, host) -> None:
    """As Qwen's: more rows than the tokenizer has words, all of them the model's."""
    config = json.loads((padded / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps({**config, "vocab_size": ROWS}))
    convert(padded, padded.parent / "mt", saver="mt", host=host)
    shape = open_checkpoint(padded.parent / "mt").shapes()["model.embedding.word_embeddings.weight"]
    assert shape == (ROWS, 32)


def test_nothing_to_drop_is_an_error(make_model, host, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trim-vocabulary: no table has more than the model's vocab_size=101 rows"):
        convert(make_model(**MODELS["llama"]), tmp_path / "x", saver="hf", trim_vocabulary=True, host=host)


def test_too_few_rows_are_never_filled(make_model, host, tmp_path: Path) -> None:
    convert(make_model(**MODELS["llama"]), tmp_path / "hf", saver="hf", host=host)
    (tmp_path / "hf" / "mt-checksums.json").unlink()  # tests change the files
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "vocab_size": ROWS}))
    with pytest.raises(CheckpointError, match=r"word_embeddings.weight has shape \[101, 32\] in the .*\[128, 32\]"):
        convert(tmp_path / "hf", tmp_path / "mt", saver="mt", host=host)


def test_the_command_has_the_flag(padded: Path) -> None:
    result = run_convert(
        "--load-dir", padded, "--save-dir", padded.parent / "out", "--saver", "mt", "--trim-vocabulary"
    )
    assert result.exit_code == 0, result.exception
