"""The most memory that converting a large model takes, from files whose zeros lie on no disk.

    python bench/convert_memory.py [--shape 8B|70B|671B] [--layers N] [--experts N] [--saver hf|mt] [--dtype bf16|fp32]

The source has the shapes of Llama 3 in bf16, or of DeepSeek-V3 in FP8 blocks (671B, whose largest canonical tensor is
the first matrix of a layer's 256 experts, 15 GB in bf16), a sparse file for each layer; everything of `mt convert` runs
but the writing (70B in bf16 are 141 GB). The growth is that of the resident memory (VmHWM of a forked process) from the
moment at which everything is imported. The goal is twice the largest tensor and 400 MB.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.ckpt.quantized.test_memory import DeepseekShape, write_sparse_deepseek
from tests.ckpt.test_convert_memory import growth, write_sparse_llama

from mt_core.testing import run_ranks

SHAPES = {
    "8B": {"hidden": 4096, "ffn": 14336, "layers": 32, "vocab": 128_256, "heads": 32, "groups": 8},
    "70B": {"hidden": 8192, "ffn": 28672, "layers": 80, "vocab": 128_256, "heads": 64, "groups": 8},
}


def write(folder: Path, shape: str, layers: int | None, experts: int) -> int:
    """The source; returns the bytes of its largest tensor in bf16."""
    if shape == "671B":
        sizes = DeepseekShape(7168, 2048, experts, layers or 61, 129_280, 128, 1536, 512, 128)
        return write_sparse_deepseek(folder, sizes)
    return write_sparse_llama(folder, **{**SHAPES[shape], **({"layers": layers} if layers else {})})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", choices=[*SHAPES, "671B"], default="8B")
    parser.add_argument("--layers", type=int, help="fewer than the model has: memory does not depend on them")
    parser.add_argument("--experts", type=int, default=256, help="of a layer of 671B")
    parser.add_argument("--saver", choices=("hf", "mt"), default="mt")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--folder", type=Path, help="on a file system with sparse files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "source"
        largest = write(source, options.shape, options.layers, options.experts) * (2 if options.dtype == "fp32" else 1)
        num_bytes = sum(file.stat().st_size for file in source.iterdir())
        dtype = "fp32" if options.dtype == "fp32" else None
        start = time.perf_counter()
        (grown,) = run_ranks(1, growth, source, Path(folder) / "out", options.saver, dtype, timeout=3600)
        elapsed = time.perf_counter() - start
    print(f"{options.shape}, {num_bytes / 1e9:.1f} GB, hf to {options.saver} in {options.dtype}, {elapsed:.0f} s")
    print(f"largest tensor {largest / 1e6:.0f} MB, growth {grown / 1e6:.0f} MB, goal {2 * largest / 1e6 + 400:.0f} MB")


if __name__ == "__main__":
    main()
