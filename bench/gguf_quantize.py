"""Speed of quantization to GGUF types, beside llama.cpp's own quantizer where its wheel (xllamacpp) is installed.

    uv run python bench/gguf_quantize.py --threads 1 --million 8 --peer .../site-packages

A row: type, million weights a second of ours and of ggml_quantize_chunk on as many threads, and how many times longer
ours takes, by the clock and in CPU time (which other work on the machine disturbs less). Without --peer only our own
numbers are shown. Q4_K_M of a Llama is about 85 % Q4_K and 15 % Q6_K.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mt_ckpt.gguf.block_types import BY_NAME, BlockType
from mt_ckpt.gguf.quantizers import quantize

WIDTH = 4096
TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "MXFP4")


def best_of(function: Callable[[], object], runs: int) -> tuple[float, float]:
    """Seconds by the clock and in CPU time, each of the fastest run."""
    clock, cpu = [], []
    for _ in range(runs):
        start, begun = time.perf_counter(), time.process_time()
        function()
        clock.append(time.perf_counter() - start)
        cpu.append(time.process_time() - begun)
    return min(clock), min(cpu)


def peer_quantizer(folder: Path, x: np.ndarray, threads: int) -> Callable[[BlockType], None]:
    library = ctypes.CDLL(str(next(folder.glob("xllamacpp/*.so"))))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    rows = len(x) // threads

    def run(type_: BlockType) -> None:
        out = np.empty(type_.size(x.size), np.uint8)

        def part(number: int) -> None:
            start = number * rows * WIDTH
            library.ggml_quantize_chunk(type_.number, x.ctypes.data, out.ctypes.data, start, rows, WIDTH, None)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, range(threads)))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--million", type=int, default=8, help="weights")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer", type=Path, help="the site-packages that has xllamacpp")
    parser.add_argument("--types", nargs="*", default=TYPES)
    options = parser.parse_args()
    rows = options.million * 2**20 // WIDTH // options.threads * options.threads
    x = np.random.default_rng(0).standard_normal((rows, WIDTH)).astype(np.float32) * np.float32(0.02)
    theirs = peer_quantizer(options.peer, x, options.threads) if options.peer else None
    tensor = torch.from_numpy(x)
    for name in options.types:
        type_ = BY_NAME[name]
        own, own_cpu = best_of(partial(quantize, tensor, type_, None, options.threads), options.runs)
        line = f"{name:8} {x.size / own / 1e6:8.1f} M/s"
        if theirs is not None:
            other, other_cpu = best_of(partial(theirs, type_), options.runs)
            line += f" {x.size / other / 1e6:8.1f} M/s  ratio {own / other:.2f}, in CPU time {own_cpu / other_cpu:.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
