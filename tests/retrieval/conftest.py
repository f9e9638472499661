"""A retriever that is trained once, and the embeddings of its passages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tests.retrieval.corpus import World, write_world

from mt_core.config.loading import LoadedConfig, load_config
from mt_core.train import Trainer
from mt_core.train.callbacks import Callback
from mt_retrieval.embedding_writer import embed_evidence
from mt_retrieval.encoder import Encoder
from mt_retrieval.retriever import evidence_of

BATCH, SHARD = 16, 50


def training_config(world: World, *more: str) -> LoadedConfig:
    torch.set_num_threads(1)
    settings = [
        "model.hidden_size=32",
        "model.num_attention_heads=2",
        "model.max_position_embeddings=32",
        "model.biencoder_projection_dim=0",
        "tokenizer.tokenizer_type=BertWordPieceLowerCase",
        f"tokenizer.vocab_file={world.folder}/vocab.txt",
        "data.seq_length=16",
        f'data.train_data_path=["{world.folder}/train.json"]',
        f'data.valid_data_path=["{world.folder}/dev.json"]',
        "data.train_hard_neg=1",
        "data.val_av_rank_hard_neg=1",
        "data.val_av_rank_other_neg=2",
        "train.train_iters=150",
        "train.eval_iters=1",
        "train.eval_interval=null",
        "optimizer.lr=3e-3",
        "checkpoint.save_interval=null",
        "logging.progress=none",
    ]
    return load_config(preset="dpr-tiny", overrides=[*settings, *more])


class Evaluations(Callback):
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def on_evaluation(self, run, metrics) -> None:
        self.metrics = dict(metrics)


@dataclass(frozen=True)
class Trained:
    world: World
    run: Path
    embeddings: Path
    validation: dict[str, float]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def trained(world: World) -> Trained:
    run, evaluations = world.folder / "run", Evaluations()
    Trainer(training_config(world), run_dir=run, callbacks=[evaluations]).train()
    embed(run, world.passages, world.folder / "embeddings")
    return Trained(world, run, world.folder / "embeddings", evaluations.metrics)


def embed(run: Path, passages: Path, folder: Path, **more) -> None:
    encoder = Encoder.load(run, device="cpu")
    embed_evidence(encoder, evidence_of(str(passages), encoder), folder, shard_rows=SHARD, batch_size=BATCH, **more)


def arrays(folder: Path, names: Sequence[str] = ("embeddings", "ids")) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for name in names for path in sorted(folder.glob(f"{name}-*.npy"))}
