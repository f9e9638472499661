"""Tokens a second that the training loop's reader delivers from preprocessed files in the page cache.

    uv run python bench/data_loader.py [--seconds 3]

One process, no threads: `BatchReader` over the `gpt` data set at sequence 4096, micro-batches of 8. The corpus is
random ids in documents of about 1,000 tokens; two sizes show that the rate does not depend on the size. What comparing
checksums costs is measured in CPU time of one epoch, in which each block is read for the first time, with and without
in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mt_core.data.loader import BatchReader
from mt_core.interfaces import Dataset, SplitRequest
from mt_core.plugins import load_plugins
from mt_core.specs import DATASETS, TOKENIZERS
from mt_data.indexed import IndexedDatasetWriter

SEQUENCE, MICRO_BATCH = 4096, 8
GOAL = 20e6


def write_corpus(prefix: Path, documents: int) -> None:
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in rng.integers(500, 1500, documents):
            ids = rng.integers(0, 50000, length).astype(np.uint16)
            writer.add_document(ids, [len(ids)])
        writer.finish()


def open_dataset(prefix: Path, verify_checksums: bool = True) -> Dataset:
    host = load_plugins()
    tokenizer_spec, dataset_spec = host[TOKENIZERS].get("NullTokenizer"), host[DATASETS].get("gpt")
    tokenizer = tokenizer_spec.build.load()(tokenizer_spec.config_type.load()(vocab_size=50001))
    config = dataset_spec.config_type.load()(
        data_path=[str(prefix)], seq_length=SEQUENCE, split="100,0,0", verify_checksums=verify_checksums
    )
    built = dataset_spec.build.load()(config, tokenizer, SplitRequest("train", None, SEQUENCE, 1))
    assert built is not None
    return built["train"] if isinstance(built, Mapping) else built


def epoch_seconds(prefix: Path, verify_checksums: bool) -> float:
    """CPU seconds of reading every sample once."""
    dataset = open_dataset(prefix, verify_checksums)
    size = len(dataset) // MICRO_BATCH * MICRO_BATCH
    started = time.process_time()
    for _ in BatchReader(dataset, ((n, MICRO_BATCH) for n in range(0, size, MICRO_BATCH)), micro_size=MICRO_BATCH):
        pass
    return time.process_time() - started


def rate(prefix: Path, seconds: float) -> float:
    """Tokens a second of wall-clock time."""
    dataset = open_dataset(prefix)
    size = min(len(dataset) // MICRO_BATCH * MICRO_BATCH, 10**6)
    steps = ((first, MICRO_BATCH) for _ in range(10**6) for first in range(0, size, MICRO_BATCH))
    started, tokens = time.perf_counter(), 0
    for _ in BatchReader(dataset, steps, micro_size=MICRO_BATCH):
        tokens += MICRO_BATCH * SEQUENCE
        if time.perf_counter() - started > seconds:
            break
    return tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        for documents in (5_000, 100_000):
            prefix = Path(folder) / f"corpus{documents}"
            write_corpus(prefix, documents)
            rate(prefix, 0.5)  # fills the page cache
            found = rate(prefix, seconds)
            size = documents * 1000 / 1e6
            print(f"{size:6.0f} M tokens of corpus: {found / 1e6:6.1f} M tokens/s ({found / GOAL:.1f}x the goal)")
            pairs = [(epoch_seconds(prefix, True), epoch_seconds(prefix, False)) for _ in range(5)]
            cost = statistics.median(checked / unchecked for checked, unchecked in pairs) - 1
            extra = statistics.median(checked - unchecked for checked, unchecked in pairs) / size * 1000
            print(
                f"         comparing checksums: {cost:+.1%} CPU in the first epoch ({extra:+.2f} ms a million tokens)"
            )


if __name__ == "__main__":
    main()
