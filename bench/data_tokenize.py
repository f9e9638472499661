"""How much of bare tiktoken's speed our GPT-2 tokenizer keeps, on one thread of one process.

    python bench/data_tokenize.py [--vocab-file F --merge-file F] [--rounds N]

Both encode the same documents (source files of Python's standard library, about 8 MB) with the same vocabulary
in turn, in CPU time; the ratio is the median over the rounds of (bare seconds / our seconds). `tokenizers` is
timed once for comparison. Without files it takes GPT-2's from $MT_GOLDEN, or trains a small vocabulary.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tiktoken

from mt_data.tokenizers.engines import PATTERNS
from mt_data.tokenizers.gpt2_bpe import GPT2BPEConfig, build_gpt2_bpe
from mt_data.tokenizers.merges import parse_vocab_and_merges
from mt_data.tokenizers.training import TrainOptions, train
from mt_tools.bench.report import as_line, conditions
from mt_tools.bench.timing import Call, alternating, elapsed, ratio


def documents(megabytes: float) -> list[str]:
    """Source files of the standard library, in order, until there is enough text."""
    texts, left = [], megabytes * 1e6
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if left <= 0 or "site-packages" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        texts.append(text)
        left -= len(text)
    return texts


def vocabulary(arguments: argparse.Namespace, texts: list[str], folder: Path) -> tuple[str, str, str]:
    """Paths of vocab.json and merges.txt, and where they come from."""
    if arguments.vocab_file and arguments.merge_file:
        return arguments.vocab_file, arguments.merge_file, "given"
    if golden := os.environ.get("MT_GOLDEN"):
        gpt2 = Path(golden) / "data" / "gpt2"
        return str(gpt2 / "encoder.json"), str(gpt2 / "vocab.bpe"), "GPT-2's"
    trained = train(texts[:50], TrainOptions(kind="bpe", format="gpt2", vocab_size=8000))
    for name, data in trained.files.items():
        (folder / name).write_bytes(data)
    return str(folder / "vocab.json"), str(folder / "merges.txt"), "8000 tokens, trained on a part of the text"


def bare_tiktoken(vocab_file: str, merge_file: str) -> tiktoken.Encoding:
    data = Path(vocab_file).read_bytes(), Path(merge_file).read_bytes()
    ranks = parse_vocab_and_merges(*data, vocab_file, merge_file).ids_by_bytes
    return tiktoken.Encoding("bare", pat_str=PATTERNS["gpt2"], mergeable_ranks=ranks, special_tokens={})


def tokenizers_engine(vocab_file: str, merge_file: str) -> Any:
    from tokenizers import ByteLevelBPETokenizer

    return ByteLevelBPETokenizer.from_file(vocab_file, merge_file)


def encoding(encode: Callable[[str], Any], texts: Iterable[str]) -> Call:
    """Encodes all texts."""

    def run() -> None:
        for text in texts:
            encode(text)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-file")
    parser.add_argument("--merge-file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=8)
    arguments = parser.parse_args()
    texts = documents(arguments.megabytes)
    with tempfile.TemporaryDirectory() as folder:
        vocab_file, merge_file, source = vocabulary(arguments, texts, Path(folder))
        ours = build_gpt2_bpe(GPT2BPEConfig(vocab_file=vocab_file, merge_file=merge_file))
        bare = bare_tiktoken(vocab_file, merge_file)
        slow = tokenizers_engine(vocab_file, merge_file)
    tokens = sum(len(bare.encode_ordinary(text)) for text in texts)
    if tokens != sum(len(ours.encode_array(text)) for text in texts):
        sys.exit("the two do not give the same number of tokens: the text holds special tokens")
    cpu = partial(elapsed, clock=time.process_time)
    calls = {"bare": encoding(bare.encode_ordinary, texts), "ours": encoding(ours.encode_array, texts)}
    times = alternating(calls, arguments.rounds, measure=cpu, warm_up=0)
    slow_seconds = cpu(encoding(slow.encode, texts))
    mine = statistics.median(times["ours"])
    print(f"vocabulary: {source} ({ours.vocab_size} ids)")
    print(f"text: {len(texts)} files, {sum(map(len, texts)) / 1e6:.1f} M characters, {tokens / 1e6:.2f} M tokens")
    print(f"tiktoken {version('tiktoken')}, tokenizers {version('tokenizers')}, one thread, CPU time")
    rate = ratio(times, "bare", "ours")
    print(as_line(conditions()))
    print(f"ours: {tokens / mine / 1e6:.2f} M tokens/s")
    print(f"ours / bare tiktoken: {rate:.2f} (goal 0.85; {arguments.rounds} interleaved rounds, median)")
    print(f"ours / tokenizers one at a time: {slow_seconds / mine:.1f}")


if __name__ == "__main__":
    main()
