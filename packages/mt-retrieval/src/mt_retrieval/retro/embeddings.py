"""The embeddings of the database's chunks: PROJECT/embeddings, float16 in blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_core.interfaces import Tokenizer
from mt_data.datasets.cache import combined
from mt_data.datasets.retro.database import ChunkDatabase
from mt_data.datasets.retro.project import MANIFEST
from mt_data.datasets.text_files import bare_encoder
from mt_data.records import Origin, Record, read_record, write_record
from mt_retrieval.encoder import Encoder
from mt_retrieval.retro.blocks import (
    BATCH_SIZE,
    Blocks,
    OnProgress,
    Share,
    ranges,
    require_same_job,
    share_of_world,
    write_blocks,
)

# -- encoders of chunks ------------------------------------------------------------------------------


class ChunkEmbedder(Protocol):
    """name: as the user gave it. fingerprint: SHA-256 of all that changes the vectors but `settings`."""

    name: str
    fingerprint: str
    settings: dict[str, int | str]
    share: Share

    def vectors(self, chunks: Sequence[NDArray[np.int64]], on_rows: Callable[[int], None]) -> NDArray[np.float32]:
        """[chunks, dim] of their tokens. Collective over the processes that share a model."""
        ...


def open_embedder(
    name: str,
    tokenizer: Tokenizer,
    *,
    batch_size: int = BATCH_SIZE,
    device: str = "auto",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> ChunkEmbedder:
    """By the name of a registered one, or a run directory or checkpoint of any format of a BERT or a biencoder.

    tokenizer: of the chunks. device, settings: as of `Encoder.load`; with "parallel" in them collective.
    Raises ConfigError for a model that embeds no text.
    """
    if name == HashedNgrams.name:
        return HashedNgrams()
    from mt_retrieval.encoder import Encoder

    encoder = Encoder.load(Path(name), device=device, settings=settings, seq_length=FRAME)
    return EncoderEmbedder(str(Path(name).absolute()), encoder, tokenizer, batch_size)


# -- feature hashing (Weinberger et al., 2009): vectors without a trained encoder --------------------

RUNS = (1, 2, 3)
"""Tokens of the runs that are counted."""
WIDTH = 512
BATCH = 1024


class HashedNgrams:
    """Each run of tokens adds 1 or -1 to a place of the vector that its hash chooses; then the signed root of each
    place is taken, so that a run that is repeated in a chunk counts less, and the vector is made of length 1.

    The nearest chunks have the most runs in common. Chunks are similar only where they have the same tokens.
    """

    name = "hashed-ngrams"
    fingerprint = sha256(f"{name} 1 {RUNS} {WIDTH}".encode()).hexdigest()

    def __init__(self) -> None:
        self.settings: dict[str, int | str] = {}
        self.share: Share = share_of_world()

    def vectors(self, chunks: Sequence[NDArray[np.int64]], on_rows: Callable[[int], None]) -> NDArray[np.float32]:
        parts = [np.zeros((0, WIDTH), np.float32)]
        for first in range(0, len(chunks), BATCH):
            parts.append(_normalized(_counts(chunks[first : first + BATCH])))
            on_rows(min(first + BATCH, len(chunks)))
        return np.concatenate(parts)


def _counts(chunks: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
    """[chunks, WIDTH]"""
    longest = max(map(len, chunks))
    tokens = np.zeros((len(chunks), longest), np.uint64)  # 0 is no token here
    for row, chunk in enumerate(chunks):
        tokens[row, : len(chunk)] = chunk + 1
    # RandomState's stream is frozen across versions of NumPy: vectors of a project are the same everywhere.
    # `fingerprint` has a version number for changes here.
    random = np.random.RandomState(0)
    # Odd factors modulo 2^64, one for each place of a run.
    factors = random.randint(0, 2**62, max(RUNS)).astype(np.uint64) * np.uint64(2) + np.uint64(1)
    counts = np.zeros(len(chunks) * WIDTH, np.float64)
    for run in (run for run in RUNS if run <= longest):
        windows = np.lib.stride_tricks.sliding_window_view(tokens, run, axis=1)
        # windows [chunks, longest - run + 1, run]. + run: equal numbers in runs of other lengths are other hashes.
        hashes = _mixed((windows * factors[:run]).sum(-1, dtype=np.uint64) + np.uint64(run))
        # Windows whose last token is padding are not in the chunk.
        rows, places = np.nonzero(windows[..., -1])
        chosen = hashes[rows, places]
        # The highest bit gives the sign, so that collisions cancel in expectation; the lowest 9 bits the place.
        signs = 1.0 - 2.0 * (chosen >> np.uint64(63)).astype(np.float64)
        # Sums of 1 and -1 in fp64 are exact in any order.
        counts += np.bincount(rows * WIDTH + (chosen % np.uint64(WIDTH)).astype(np.int64), signs, len(counts))
    return counts.reshape(len(chunks), WIDTH).astype(np.float32)


def _mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele et al., 2014): all bits depend on all bits."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def _normalized(counts: NDArray[np.float32]) -> NDArray[np.float32]:
    roots = np.sign(counts) * np.sqrt(np.abs(counts))
    norms = np.linalg.norm(roots, axis=1, keepdims=True)
    # 1e-6: a chunk whose runs cancel has the vector 0, not NaN.
    vectors: NDArray[np.float32] = roots / np.maximum(norms, np.float32(1e-6))
    return vectors


# -- BERT or a biencoder, as in Megatron's Retro -----------------------------------------------------

LONGEST = 256
"""Tokens of the encoder that a chunk is cut to; Megatron's bert-max-chunk-length."""
FRAME = 3
"""CLS, a token and SEP; the sequences are made here."""


class EncoderEmbedder:
    """Chunks are decoded to text, which is encoded with the encoder's tokenizer and cut; the vector is the mean of the
    last hidden states without those of CLS and SEP. A chunk without a token has the pad token."""

    def __init__(self, name: str, encoder: Encoder, tokenizer: Tokenizer, batch_size: int) -> None:
        self.name, self._encoder, self._tokenizer = name, encoder, tokenizer
        self.fingerprint = encoder.fingerprint
        self._batch_size, self._longest = batch_size, min(LONGEST, encoder.longest)
        self._encode = bare_encoder(encoder.tokenizer)
        self.settings: dict[str, int | str] = {
            "batch_size": batch_size,
            "seq_length": self._longest,
            "precision": encoder.config.precision.dtype,
        }
        ctx = encoder.ctx
        # Replicas (dp) embed different blocks; ranks of tp compute the same ones together, and the first of them
        # writes.
        self.share = Share(ctx.dp.rank, ctx.dp.size, writes=ctx.axis("model").rank == 0)

    def vectors(self, chunks: Sequence[NDArray[np.int64]], on_rows: Callable[[int], None]) -> NDArray[np.float32]:
        """Chunks of about the same length share a batch, so that little is padding."""
        sequences = [self._sequence(chunk) for chunk in chunks]
        # Within a block, which one replica embeds as a whole: batches do not depend on the number of ranks.
        order = np.argsort([len(sequence) for sequence in sequences], kind="stable")
        parts = []
        for first in range(0, len(order), self._batch_size):
            batch = order[first : first + self._batch_size]
            parts.append(self._encoder.mean_states([sequences[number] for number in batch]))
            on_rows(first + len(batch))
        # The inverse permutation puts the vectors back into the order of the chunks.
        return np.concatenate(parts)[np.argsort(order, kind="stable")]

    def _sequence(self, chunk: NDArray[np.int64]) -> list[int]:
        pairs, eod = self._encoder.pairs, self._tokenizer.special.eod
        text = self._tokenizer.decode([token for token in chunk.tolist() if token != eod])
        # Room for CLS and SEP. The mean of no state would be NaN: the pad token stands for an empty text.
        inner = self._encode(text)[: self._longest - 2] or [pairs.pad]
        return [pairs.cls, *inner, pairs.sep]


class EmbeddingsJob(Record):
    """What the vectors depend on: fingerprints of the database and the embedder, and its settings."""

    database: str
    embedder: str
    settings: dict[str, int | str]
    count: int
    block_rows: int


class EmbeddingsManifest(Record):
    """embedder: what it was and where."""

    format: Literal["mt-retro-embeddings"] = "mt-retro-embeddings"
    version: Literal[1] = 1
    job: EmbeddingsJob
    embedder: Origin


class ChunkEmbeddings:
    """Block n has the vectors of chunks n block_rows ... of the database: float16 [rows, dim]."""

    def __init__(self, project: Path) -> None:
        self.folder = project / "embeddings"
        self.manifest = read_record(self.folder / MANIFEST, EmbeddingsManifest)
        self.rows = ranges(self.manifest.job.count, self.manifest.job.block_rows)
        self.files = Blocks(self.folder, "embeddings", "run mt retro index add again, which replaces it")

    def write(
        self, database: ChunkDatabase, embedder: ChunkEmbedder, chosen: Sequence[int], on_progress: OnProgress
    ) -> None:
        """The chosen blocks that are not there. Collective."""

        def compute(number: int, on_rows: Callable[[int], None]) -> NDArray[np.float16]:
            return self.compute(database, embedder, number, on_rows)

        write_blocks(self.files, list(map(len, self.rows)), chosen, compute, embedder.share, on_progress)

    def compute(
        self, database: ChunkDatabase, embedder: ChunkEmbedder, number: int, on_rows: Callable[[int], None]
    ) -> NDArray[np.float16]:
        """Raises DataError for vectors that fp16 cannot hold."""
        chunks = [database.tokens(row) for row in self.rows[number]]
        # An overflow gives inf, which the check below finds.
        with np.errstate(over="ignore"):
            vectors = embedder.vectors(chunks, on_rows).astype(np.float16)
        if not np.isfinite(vectors).all():
            raise DataError(
                f"block {number} has embeddings that are not finite in fp16 (of at most 65504); the weights of "
                f"{embedder.name} are damaged"
            )
        return vectors

    def matrices(self) -> list[NDArray[np.float16]]:
        """All blocks, mapped into memory. Raises DataError where one is missing or damaged."""
        return [np.asarray(self.files.read(number)) for number in range(len(self.rows))]

    def fingerprint(self) -> str:
        """SHA-256 of all vectors."""
        return combined([self.files.record(number).sha256 for number in range(len(self.rows))])


def begin_embeddings(project: Path, database: ChunkDatabase, embedder: ChunkEmbedder, block_rows: int) -> None:
    """Make the folder, or check that what is in it belongs to the same job. Raises ConfigError if it does not."""
    job = EmbeddingsJob(
        database=database.manifest.fingerprint,
        embedder=embedder.fingerprint,
        settings=embedder.settings,
        count=len(database),
        block_rows=block_rows,
    )
    path = project / "embeddings" / MANIFEST
    if path.exists():
        require_same_job(path.parent, read_record(path, EmbeddingsManifest).job, job)
    write_record(path, EmbeddingsManifest(job=job, embedder=Origin(sha256=embedder.fingerprint, path=embedder.name)))


def recorded_embedder(
    project: Path,
    tokenizer: Tokenizer,
    *,
    name: str | None = None,
    device: str = "auto",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> ChunkEmbedder:
    """That of the project's embeddings, with the batch size that made them. name: where it is now, if it has moved.

    Raises DataError for a project whose index is not trained.
    """
    manifest = read_record(project / "embeddings" / MANIFEST, EmbeddingsManifest)
    # The batch size changes the padding, and with it the last bits of a vector.
    batch_size = int(manifest.job.settings.get("batch_size", BATCH_SIZE))
    return open_embedder(
        name or manifest.embedder.path, tokenizer, batch_size=batch_size, device=device, settings=settings
    )
