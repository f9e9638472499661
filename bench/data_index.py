"""Time of building the GPT index, as a ratio to a plain loop in C with NumPy's shuffles.

    python bench/data_index.py [--documents 20000000] [--repeats 5]

The reference walks the documents one by one in C (compiled here with `cc -O3`), as Megatron's helper does,
and shuffles with numpy.random.RandomState. All build the same arrays, which is checked. The runs alternate;
medians of wall and processor time are printed for data.index_engine=numpy and, where it is installed, numba,
and medians of their ratios to the reference. The start of numba is printed apart.
"""

from __future__ import annotations

import argparse
import ctypes
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mt_data.datasets.gpt import IndexEngine, build_index
from mt_data.datasets.gpt_index import GPTIndex, GPTIndexPlan
from mt_tools.bench.report import as_line, conditions

SOURCE = r"""
#include <stdint.h>
void sample_index(const int32_t *lengths, const int32_t *documents, int64_t samples, int32_t sequence, int32_t *out) {
    int64_t at = 0;
    int32_t offset = 0;
    out[0] = 0; out[1] = 0;
    for (int64_t sample = 1; sample <= samples; ++sample) {
        int32_t remaining = sequence + 1;
        while (remaining != 0) {
            int32_t length = lengths[documents[at]] - offset;
            remaining -= length;
            if (remaining <= 0) {
                offset += remaining + length - 1;
                remaining = 0;
            } else {
                ++at;
                offset = 0;
            }
        }
        out[2 * sample] = (int32_t) at;
        out[2 * sample + 1] = offset;
    }
}
"""


def compile_reference(folder: Path) -> ctypes.CDLL:
    source, library = folder / "reference.c", folder / "reference.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def reference(library: ctypes.CDLL, lengths: np.ndarray, plan: GPTIndexPlan) -> list[np.ndarray]:
    random = np.random.RandomState(plan.seed)
    documents = np.arange(len(lengths), dtype=np.int32)
    random.shuffle(documents)
    samples = np.empty((plan.samples + 1, 2), np.int32)
    pointer = ctypes.POINTER(ctypes.c_int32)
    library.sample_index(
        lengths.ctypes.data_as(pointer),
        documents.ctypes.data_as(pointer),
        ctypes.c_int64(plan.samples),
        ctypes.c_int32(plan.sequence_length),
        samples.ctypes.data_as(pointer),
    )
    order = np.arange(plan.samples, dtype=np.uint32)
    random.shuffle(order)
    return [documents, samples, order]


@dataclass(frozen=True)
class Times:
    """Seconds of wall and processor time, one of each for every repetition."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def of(self, function: Callable[[], Any]) -> Any:
        wall, processor = time.perf_counter(), time.process_time()
        result = function()
        self.wall.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)
        return result

    def __str__(self) -> str:
        return f"wall {statistics.median(self.wall):.3f} s, processor {statistics.median(self.processor):.3f} s"


def engines() -> list[IndexEngine]:
    """Those that are installed; the compiled one is started here, and the time that takes is printed."""
    if find_spec("numba") is None:
        print("numba is not installed (mt-data[fast])")
        return ["numpy"]
    start = time.perf_counter()
    build_index("numba", range(100), np.full(100, 50, np.int32), GPTIndexPlan(5000, 7, None, 1))
    print(f"importing numba and compiling, or loading what was compiled before: {time.perf_counter() - start:.2f} s")
    return ["numpy", "numba"]


def check_equal(index: GPTIndex, expected: list[np.ndarray]) -> None:
    for mine, true in zip(index.arrays().values(), expected, strict=True):
        if mine.dtype != true.dtype or not np.array_equal(mine, true):
            raise SystemExit("the arrays differ from the reference's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000_000)
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    lengths = np.random.default_rng(0).integers(1, 2000, arguments.documents).astype(np.int32)
    plan = GPTIndexPlan(int(lengths.sum(dtype=np.int64)), arguments.sequence_length, None, 1234)
    theirs, ours = Times(), {engine: Times() for engine in engines()}
    with tempfile.TemporaryDirectory() as folder:
        library = compile_reference(Path(folder))
        for _ in range(arguments.repeats):
            expected = theirs.of(lambda: reference(library, lengths, plan))
            for engine, times in ours.items():
                build = partial(build_index, engine, range(len(lengths)), lengths, plan)
                # After each build, outside of the time.
                check_equal(times.of(build), expected)
    print(f"{len(lengths)} documents, {plan.tokens_per_epoch} tokens, sequence {plan.sequence_length}; arrays equal")
    print(f"reference: {theirs}")
    for engine, times in ours.items():
        wall = [mine / true for mine, true in zip(times.wall, theirs.wall, strict=True)]
        processor = [mine / true for mine, true in zip(times.processor, theirs.processor, strict=True)]
        print(f"{engine}: {times}")
        print(f"  ratio to the reference: wall {statistics.median(wall):.3f} of {[round(r, 3) for r in wall]}")
        print(f"  ratio to the reference: processor {statistics.median(processor):.3f}")
    print(f"peak memory of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    print(as_line(conditions(numpy=np.__version__)))


if __name__ == "__main__":
    main()
