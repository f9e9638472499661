"""The process of `mt_retrieval.refresh`. Arguments: checkpoint, evidence, questions, output, negatives, device."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from mt_core.errors import MtError
from mt_retrieval.embedding_writer import embed_evidence
from mt_retrieval.embeddings import BATCH_SIZE, SHARD_ROWS
from mt_retrieval.encoder import Encoder
from mt_retrieval.index import ExactIndex
from mt_retrieval.mining import mine_negatives
from mt_retrieval.retriever import Retriever, evidence_of


def mine(checkpoint: str, evidence: str, questions: str, output: str, negatives: str, device: str) -> None:
    """The embeddings are removed afterwards."""
    encoder = Encoder.load(checkpoint, device=device)
    passages = evidence_of(evidence, encoder)
    folder = Path(f"{output}.embeddings")
    embed_evidence(encoder, passages, folder, shard_rows=SHARD_ROWS, batch_size=BATCH_SIZE)
    # Exact: no index to train, for embeddings that serve one search.
    retriever = Retriever(encoder, ExactIndex.of_embeddings(folder), passages)
    mine_negatives(retriever, Path(questions), Path(output), int(negatives))
    shutil.rmtree(folder)


if __name__ == "__main__":
    try:
        mine(*sys.argv[1:])
    except MtError as error:
        sys.exit(str(error))
