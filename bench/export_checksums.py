"""What it costs to compare an export's bytes with its mt-checksums.json while they are read.

    python bench/export_checksums.py [--layers 5] [--rounds 7]

A Hugging Face folder of a Llama in bf16 (the one of bench/convert.py; 5 layers are 716 MB) that `mt convert` wrote is
opened and every tensor is read, with the file of checksums and without it, in turn, from the page cache. The table has
the processor time (user and system) of both, medians over the rounds, and the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from convert import write_source

from mt_ckpt.convert import convert
from mt_ckpt.files.checksum_file import CHECKSUMS
from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.plugins import PluginHost, load_plugins


def seconds_to_read(folder: Path, host: PluginHost) -> float:
    """Of the processor. Each value is touched, since mapped pages are read when they are used."""
    began = time.process_time()
    reader = open_checkpoint(folder, host)
    for name in reader.shapes():
        reader.read(name).clone()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    host = load_plugins()
    with tempfile.TemporaryDirectory() as name:
        source, folder = Path(name) / "source", Path(name) / "export"
        source.mkdir()
        write_source(source, asked.layers)
        convert(source, folder, saver="hf", host=host)
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        seconds_to_read(folder, host)  # the page cache is filled
        with_checks, without = [], []
        for _ in range(asked.rounds):
            with_checks.append(seconds_to_read(folder, host))
            (folder / CHECKSUMS).rename(Path(name) / CHECKSUMS)
            without.append(seconds_to_read(folder, host))
            (Path(name) / CHECKSUMS).rename(folder / CHECKSUMS)
    ratio = statistics.median(a / b for a, b in zip(with_checks, without, strict=True))
    checked, plain = statistics.median(with_checks), statistics.median(without)
    print(f"{num_bytes / 1e6:.0f} MB: {checked:.3f} s with checksums, {plain:.3f} s without, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
