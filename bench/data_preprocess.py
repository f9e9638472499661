"""Rate of `mt data preprocess` per CPU-second, as a ratio to tiktoken encoding the same texts bare.

    python bench/data_preprocess.py --vocab-file vocab.json --merge-file merges.txt [--mb 48] [--workers 1 2]

Theirs: user and system time of `tiktoken.Encoding.encode_ordinary` over texts that are already parsed, in one
process, and in as many processes as we have workers: two processes on the two threads of a core take more
CPU-seconds than one alone, for the same work, whoever they are.
Ours: user and system time of the whole command and all its workers: start, imports, reading, JSON, encoding,
writing, joining. Starting (imports, building the tokenizer) takes the same time for any corpus. So a corpus of a
quarter of --mb is done as well, and the difference of the two is what a corpus that takes hours comes to; a corpus
of a few words, a shard for each worker, gives the start by itself. Runs alternate; medians are taken.

The corpus is Python's standard library in documents of --document-characters, again and again up to --mb.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
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
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import tiktoken

from mt_data.tokenizers.engines import PATTERNS
from mt_data.tokenizers.gpt2_bpe import END_OF_TEXT
from mt_data.tokenizers.merges import parse_vocab_and_merges

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


def bare_beside(encoding: tiktoken.Encoding, texts: list[str], processes: int) -> float:
    """CPU seconds of `bare` in forked processes at once, each with its share of the texts."""
    with multiprocessing.get_context("fork").Pool(processes, initializer=_keep, initargs=(encoding, texts)) as pool:
        return sum(pool.map(_bare_share, [(number, processes) for number in range(processes)], chunksize=1))


_kept: list[tuple[tiktoken.Encoding, list[str]]] = []


def _keep(encoding: tiktoken.Encoding, texts: list[str]) -> None:
    _kept.append((encoding, texts))


def _bare_share(share: tuple[int, int]) -> float:
    encoding, texts = _kept[0]
    return bare(encoding, texts[share[0] :: share[1]])[0]


def ours(
    corpus: Path, folder: Path, arguments: argparse.Namespace, workers: int, shard_mb: float | None = None
) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of the command and all its processes."""
    script = folder / "command.py"
    script.write_text(COMMAND)
    options = ["--input", corpus, "--output-prefix", folder / "out", "--overwrite", "--workers", workers]
    options += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
    options += ["--vocab-file", arguments.vocab_file, "--merge-file", arguments.merge_file]
    options += [] if shard_mb is None else ["--shard-mb", shard_mb]
    # RUSAGE_CHILDREN grows when a child has been waited for, with all of its own children.
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, script, *map(str, options)], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, time.perf_counter() - started


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-file", type=Path, required=True)
    parser.add_argument("--merge-file", type=Path, required=True)
    parser.add_argument("--mb", type=float, default=48)
    parser.add_argument("--document-characters", type=int, default=2000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


@dataclass
class Round:
    """CPU seconds of one round with some number of workers; `wall` is of our large run."""

    start: float
    small: float
    large: float
    bare_small: float
    bare_large: float
    beside: float
    wall: float

    @property
    def whole(self) -> float:
        return self.bare_large / self.large

    @property
    def without_start(self) -> float:
        return (self.bare_large - self.bare_small) / (self.large - self.small)

    @property
    def without_start_beside(self) -> float:
        return self.without_start * self.beside / self.bare_large


def main() -> None:
    arguments = parse_arguments()
    encoding = tiktoken_encoding(arguments.vocab_file, arguments.merge_file)
    rounds: dict[int, list[Round]] = {workers: [] for workers in arguments.workers}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large, small, tiny = (folder / f"{size}.jsonl" for size in ("large", "small", "tiny"))
        texts = write_corpus(large, arguments.document_characters, arguments.mb * 1e6)
        few = write_corpus(small, arguments.document_characters, arguments.mb * 1e6 / 4)
        write_corpus(tiny, 100, 6400)
        for _ in range(arguments.repeats):
            for workers in arguments.workers:
                bare_small, _ = bare(encoding, few)
                our_small, _ = ours(small, folder, arguments, workers)
                bare_large, tokens = bare(encoding, texts)
                our_large, wall = ours(large, folder, arguments, workers)
                beside = bare_beside(encoding, texts, workers)
                start, _ = ours(tiny, folder, arguments, workers, shard_mb=0.001)
                rounds[workers].append(Round(start, our_small, our_large, bare_small, bare_large, beside, wall))
    print(f"{sum(map(len, texts)) / 1e6:.0f} MB of text, {len(texts):,} documents, {tokens:,} tokens")
    rate = tokens / statistics.median(one.bare_large for found in rounds.values() for one in found) / 1e6
    print(f"tiktoken {tiktoken.__version__}: {rate:.2f} M tokens/CPU-s")
    for workers, found in rounds.items():
        show(workers, found, tokens)
    cached = "not cached (PYTHONDONTWRITEBYTECODE)" if sys.dont_write_bytecode else "cached"
    print(f"Python {platform.python_version()}, bytecode {cached}, {os.cpu_count()} cores, load {os.getloadavg()}")


def show(workers: int, found: list[Round], tokens: int) -> None:
    def median(name: str) -> float:
        return statistics.median(getattr(one, name) for one in found)

    lowest, highest = (pick(one.without_start for one in found) for pick in (min, max))
    print(
        f"workers {workers}: per CPU-second {median('without_start'):.3f} without the start ({lowest:.2f} to "
        f"{highest:.2f}), {median('without_start_beside'):.3f} of tiktoken in {workers} processes; "
        f"{median('whole'):.3f} with it; start {median('start'):.2f} s of CPU; "
        f"{tokens / median('wall') / 1e6:.2f} M tokens/s of wall time"
    )


if __name__ == "__main__":
    main()
