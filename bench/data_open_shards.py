"""How long it takes to open many indexed datasets, next to the bare system calls it needs.

Makes N small data sets in a temporary folder. Opening checks the header and both sizes. The bare loop opens each
`.idx`, reads its header and three numbers, and asks for both sizes, checking nothing; both are run in turns, from
page cache. Then one sequence of each is read.

    python bench/data_open_shards.py --shards 10000
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mt_data.indexed import IndexedDataset
from mt_tools.bench.report import as_line, conditions
from mt_tools.bench.timing import alternating, elapsed, ratio


def make_shards(folder: Path, count: int, sequences: int, length: int) -> list[str]:
    """Prefixes of `count` data sets of uint16 tokens."""
    tokens = np.zeros(sequences * length, np.uint16).tobytes()
    lengths = np.full(sequences, length, "<i4").tobytes()
    pointers = (np.arange(sequences, dtype="<i8") * length * 2).tobytes()
    documents = np.arange(sequences + 1, dtype="<i8").tobytes()
    # Megatron's index: magic, version (u64), dtype code (u8; 8 is uint16), counts of sequences and of documents + 1
    # (u64), all little-endian; then lengths (i32), byte offsets (i64) and document boundaries (i64).
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, sequences, sequences + 1) + lengths + pointers + documents
    prefixes = [str(folder / f"shard_{number:06d}") for number in range(count)]
    for prefix in prefixes:
        Path(prefix + ".bin").write_bytes(tokens)
        Path(prefix + ".idx").write_bytes(index)
    return prefixes


def bare(prefixes: list[str]) -> list[bytes]:
    """The system calls alone."""
    return [read_bare(prefix) for prefix in prefixes]


def read_bare(prefix: str) -> bytes:
    descriptor = os.open(prefix + ".idx", os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        parts = [os.pread(descriptor, 34, 0), *(os.pread(descriptor, 8, size - 8 * back) for back in (1, 2, 3))]
    finally:
        os.close(descriptor)
    os.stat(prefix + ".bin")
    return b"".join(parts)


def seconds(function: Callable[[], object]) -> float:
    gc.collect()
    kept: list[object] = []  # closing what was opened is not timed
    return elapsed(lambda: kept.append(function()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefixes = make_shards(Path(folder), options.shards, options.sequences, options.length)
        calls = {"ours": lambda: [IndexedDataset(prefix) for prefix in prefixes], "bare": lambda: bare(prefixes)}
        times = alternating(calls, options.repeats, measure=seconds, warm_up=0)
        shards = [IndexedDataset(prefix) for prefix in prefixes]
        opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else -1
        reading = seconds(lambda: [shard[0] for shard in shards])
    ours, theirs = (statistics.median(times[name]) for name in ("ours", "bare"))
    print(as_line(conditions(numpy=np.__version__, shards=options.shards)))
    print(
        f"open:            {ours:.2f} s   (bare system calls {theirs:.2f} s, ratio {ratio(times, 'ours', 'bare'):.1f})"
    )
    print(f"first sequences: {reading:.2f} s   (maps .idx and .bin of each)")
    print(f"descriptors open: {opened}, peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")


if __name__ == "__main__":
    main()
