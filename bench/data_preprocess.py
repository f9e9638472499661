"""Rate of `mt data preprocess` per CPU-second, as a ratio to tiktoken encoding the same texts bare.

    python bench/data_preprocess.py --vocab-file vocab.json --merge-file merges.txt [--mb 100] [--workers 1 2]

Theirs: CPU time of `tiktoken.Encoding.encode_ordinary` over texts that are already parsed, in one process.
Ours: CPU time of the whole command and all its workers: start, imports, reading, JSON, encoding, writing, joining.
Starting (imports, building the tokenizer in each process) takes the same time for any corpus. So a corpus of a
quarter of --mb is done as well, and three ratios are printed: the whole command at --mb, at a quarter, and the
difference of the two, which is what a corpus that takes hours comes to. Runs alternate; medians are taken.

The corpus is Python's standard library in documents of --document-characters, again and again up to --mb.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import tiktoken

from mt_data.tokenizers.gpt2_bpe import END_OF_TEXT
from mt_data.tokenizers.merges import parse_vocab_and_merges
from mt_data.tokenizers.patterns import PATTERNS

COMMAND = """
import sys
import typer
from mt_data.commands.preprocess import PreprocessCommand, preprocess
if __name__ == "__main__":
    app = typer.Typer()
    app.command(cls=PreprocessCommand)(preprocess)
    app()
"""


def documents(characters: int) -> Iterator[str]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    for file in cycle(file for file in files if "site-packages" not in file.parts):
        text = file.read_text(encoding="utf-8", errors="ignore")
        yield from (text[begin : begin + characters] for begin in range(0, len(text), characters))


def write_corpus(path: Path, characters: int, size: float) -> list[str]:
    texts, written = [], 0
    with open(path, "w", encoding="utf-8") as file:
        for text in documents(characters):
            file.write(json.dumps({"text": text}) + "\n")
            texts.append(text)
            written += len(text)
            if written >= size:
                return texts
    return texts


def tiktoken_encoding(vocab: Path, merges: Path) -> tiktoken.Encoding:
    pairs = parse_vocab_and_merges(vocab.read_bytes(), merges.read_bytes(), str(vocab), str(merges))
    ranks = {token: number for token, number in pairs.ids_by_bytes.items() if token != END_OF_TEXT.encode()}
    return tiktoken.Encoding("gpt2", pat_str=PATTERNS["gpt2"], mergeable_ranks=ranks, special_tokens={})


def bare(encoding: tiktoken.Encoding, texts: list[str]) -> tuple[float, int]:
    """(CPU seconds, tokens)."""
    started, tokens = time.process_time(), 0
    for text in texts:
        tokens += len(encoding.encode_ordinary(text))
    return time.process_time() - started, tokens


def ours(corpus: Path, folder: Path, arguments: argparse.Namespace, workers: int) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of the command and all its processes."""
    script = folder / "command.py"
    script.write_text(COMMAND)
    options = ["--input", corpus, "--output-prefix", folder / "out", "--overwrite", "--workers", workers]
    options += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
    options += ["--vocab-file", arguments.vocab_file, "--merge-file", arguments.merge_file]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, script, *map(str, options)], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, time.perf_counter() - started


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-file", type=Path, required=True)
    parser.add_argument("--merge-file", type=Path, required=True)
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--document-characters", type=int, default=2000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    encoding = tiktoken_encoding(arguments.vocab_file, arguments.merge_file)
    ratios: dict[int, list[tuple[float, float, float]]] = {workers: [] for workers in arguments.workers}
    rates: dict[int, list[float]] = {workers: [] for workers in arguments.workers}
    bare_rates = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large, small = folder / "large.jsonl", folder / "small.jsonl"
        texts = write_corpus(large, arguments.document_characters, arguments.mb * 1e6)
        few = write_corpus(small, arguments.document_characters, arguments.mb * 1e6 / 4)
        for _ in range(arguments.repeats):
            for workers in arguments.workers:
                their_small, _ = bare(encoding, few)
                our_small, _ = ours(small, folder, arguments, workers)
                their_large, tokens = bare(encoding, texts)
                our_large, wall = ours(large, folder, arguments, workers)
                difference = (their_large - their_small) / (our_large - our_small)
                ratios[workers].append((their_large / our_large, their_small / our_small, difference))
                rates[workers].append(tokens / wall / 1e6)
                bare_rates.append(tokens / their_large / 1e6)
    print(f"{sum(map(len, texts)) / 1e6:.0f} MB of text, {len(texts):,} documents, {tokens:,} tokens")
    print(f"tiktoken {tiktoken.__version__}: {statistics.median(bare_rates):.2f} M tokens/CPU-s")
    for workers, found in ratios.items():
        whole, quarter, difference = (statistics.median(values) for values in zip(*found, strict=True))
        print(
            f"workers {workers}: ratio per CPU-second {difference:.3f} (without starting), {whole:.3f} (all of "
            f"{arguments.mb:.0f} MB), {quarter:.3f} (all of a quarter); "
            f"{statistics.median(rates[workers]):.2f} M tokens/s of wall time"
        )
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()}")


if __name__ == "__main__":
    main()
