"""mt compare --deep of mt and the real Megatron-Core, in an environment of its own. 60 s."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.peer.environment import peer_python

from mt_cli.main import run
from mt_ops.deep.comparison import compare_models
from mt_ops.deep.other_process import recordings_of

SMALL = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "max_position_embeddings=32"]
KEYS = [*(f"model.{key}" for key in SMALL), "data.seq_length=32", "data.corpus_bytes=100000", "train.train_iters=2"]


def test_mt_and_megatron_compute_the_same(tmp_path: Path) -> None:
    settings = [part for key in [*KEYS, "train.eval_iters=0"] for part in ("--set", key)]
    assert run(["train", "--preset", "gpt-tiny", "--run-dir", str(tmp_path / "a"), *settings]) == 0
    save = ["--saver", "megatron", "--save-dir", str(tmp_path / "b")]
    assert run(["convert", "--load-dir", str(tmp_path / "a"), *save]) == 0
    other = partial(recordings_of, peer_python(), module="mt_ops.deep.megatron_child")
    compared = compare_models(tmp_path / "a", tmp_path / "b", steps=2, other=other)
    assert compared.first == []
    names = {each.name for each in compared.compared}
    assert {"logits", "decoder.layers.1.mlp.linear_fc1", "decoder.layers.0.self_attention.linear_proj"} <= names
    assert compared.step == 2
