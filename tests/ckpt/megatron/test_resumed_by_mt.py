"""`checkpoint.resume_from` with a checkpoint of Megatron's formats: weights, optimizer and counters go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from mt_ckpt.convert import convert
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.config.loading import load_config
from mt_core.train import Trainer

KEYS = (
    *("model.family=llama", "model.num_layers=2", "model.hidden_size=16", "model.num_attention_heads=2"),
    *("model.ffn_hidden_size=32", "model.max_position_embeddings=64"),
    *("data.dataset_type=mock", "data.seq_length=16", "tokenizer.tokenizer_type=NullTokenizer"),
    *("tokenizer.vocab_size=64", "train.micro_batch_size=2", "train.global_batch_size=2", "train.train_iters=6"),
    *("train.eval_interval=null", "train.eval_iters=0", "train.num_threads=1", "data.num_workers=0"),
    *("logging.progress=none", "logging.log_interval=1", "optimizer.lr=0.01", "lr_schedule.lr_warmup_iters=1"),
)


DTYPES = {"fp32": (), "fp16": ("precision.dtype=fp16", "precision.loss_scale=8")}


def trained(folder: Path, host, *more: str) -> list[float]:
    """Losses of the steps that this process makes."""
    Trainer(load_config(overrides=[*KEYS, *more], host=host), run_dir=folder, host=host).train()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


Runs = Mapping[str, tuple[list[float], Path]]


@pytest.fixture(scope="module")
def runs(host, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """dtype -> losses of an undisturbed run, and the folder of one that stopped half-way."""
    folder, by_dtype = tmp_path_factory.mktemp("runs"), {}
    for dtype, keys in DTYPES.items():
        losses = trained(folder / dtype, host, *keys)
        trained(folder / f"first-{dtype}", host, *keys, "train.exit_iteration=3")
        by_dtype[dtype] = losses, folder / f"first-{dtype}"
    return by_dtype


@pytest.mark.parametrize(
    ("saver", "optimizer", "dtype"),
    [
        ("megatron-dist", "plain", "fp32"),
        ("megatron-dist", "plain", "fp16"),
        ("megatron-dist", "fully_reshardable", "fp32"),
        ("megatron-dist", "dp_reshardable", "fp32"),
        ("megatron", None, "fp32"),
    ],
)
def test_training_goes_on(saver: str, optimizer: str | None, dtype: str, runs: Runs, tmp_path: Path, host) -> None:
    """The same bits as without the way through the other format; the loss, which Megatron does not name, is the
    family's own. It was a KeyError."""
    undisturbed, first = runs[dtype]
    options = ConvertOptions() if optimizer is None else ConvertOptions(target_optimizer_format=optimizer)
    convert(first, tmp_path / "megatron", saver=saver, options=options, host=host)
    resumed = trained(tmp_path / "next", host, *DTYPES[dtype], f"checkpoint.resume_from={tmp_path / 'megatron'}")
    assert resumed == undisturbed[3:]
    said = (tmp_path / "next" / "log.txt").read_text()
    assert ("has no loss scale" in said) == (dtype == "fp16")
