"""The inverse cloze task from text to a measured result: blocks as evidence, and sentences as questions."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.retrieval.corpus import WORDS, World

from mt_core.config.loading import load_config
from mt_core.train import Trainer
from mt_data.indexed.writer import IndexedDatasetWriter
from mt_data.tokenizers.bert_wordpiece import BertWordPieceConfig, build_bert_wordpiece
from mt_retrieval.embedding_writer import embed_evidence
from mt_retrieval.encoder import Encoder
from mt_retrieval.index import ExactIndex
from mt_retrieval.retriever import Retriever, evidence_of

DOCUMENTS, TRAINED = 160, 120
"""Blocks of the first TRAINED documents are trained on."""


def write_documents(world: World, folder: Path, count: int) -> list[list[str]]:
    """Documents of three sentences about six words; each sentence has four of them, the title one."""
    draw, documents = random.Random(3), []
    tokenizer = build_bert_wordpiece(BertWordPieceConfig(vocab_file=str(world.folder / "vocab.txt")))
    text, title = (
        IndexedDatasetWriter(str(folder / name), np.uint16) for name in ("all_text_sentence", "all_title_document")
    )
    with text, title:
        for _ in range(count):
            topic = draw.sample(WORDS, 6)
            documents.append([" ".join(draw.sample(topic, 4)) for _ in range(3)])
            for sentence in documents[-1]:
                text.add_sequence(tokenizer.encode(sentence))
            title.add_sequence(tokenizer.encode(topic[0]))
            text.end_document()
            title.end_document()
        text.finish()
        title.finish()
    return documents


@pytest.mark.slow
def test_sentences_find_the_blocks_that_they_come_from(world: World, tmp_path: Path) -> None:
    """Of documents that were not trained on. By chance recall@1 is 1 / 160."""
    documents = write_documents(world, tmp_path, DOCUMENTS)
    torch.set_num_threads(1)
    settings = [
        "model.hidden_size=32",
        "model.num_attention_heads=2",
        "model.max_position_embeddings=32",
        "tokenizer.tokenizer_type=BertWordPieceLowerCase",
        f"tokenizer.vocab_file={world.folder}/vocab.txt",
        "data.seq_length=24",
        f'data.data_path=["{tmp_path}/all_text_sentence"]',
        f'data.split="{TRAINED},{DOCUMENTS - TRAINED},0"',
        "data.query_in_block_prob=0.1",
        "train.train_iters=100",
        "train.eval_interval=null",
        "train.eval_iters=1",
        "optimizer.lr=3e-3",
        "checkpoint.save_interval=null",
        "logging.progress=none",
    ]
    trainer = Trainer(load_config(preset="ict-tiny", overrides=settings), run_dir=tmp_path / "run")
    trainer.train()
    encoder = Encoder.load(tmp_path / "run", device="cpu")
    evidence = evidence_of(str(tmp_path / "all_text_sentence"), encoder)
    assert len(evidence) == DOCUMENTS
    assert [evidence.passage(row).text for row in (0, 150)] == [" ".join(documents[row]) for row in (0, 150)]
    embed_evidence(encoder, evidence, tmp_path / "embeddings", shard_rows=100, batch_size=32)
    retriever = Retriever(encoder, ExactIndex.of_embeddings(tmp_path / "embeddings"), evidence)
    unseen = range(TRAINED, DOCUMENTS)
    found = retriever.search([documents[number][1] for number in unseen], 1)
    assert np.mean([one[0].row == number for one, number in zip(found, unseen, strict=True)]) > 0.5
