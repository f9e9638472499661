"""Killed at random moments, what keeps something on a disk goes on to the bytes of a run that nobody disturbed, and
takes no half file for a whole one: fifty kills of a merge, of index caches, and of the commands that build corpora.
(For `mt data preprocess` see its own tests.)
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.small_process import in_small_process

from mt_core.interfaces import SplitRequest
from mt_data.corpora.clean_options import preset
from mt_data.corpora.cleaning import clean
from mt_data.corpora.decontamination import decontaminate
from mt_data.corpora.deduplication import dedup
from mt_data.corpora.options import DedupOptions, OverlapOptions
from mt_data.corpora.running import RunOptions
from mt_data.datasets.bert import BertDataConfig, build_bert
from mt_data.datasets.gpt import GPTDataConfig, build_gpt
from mt_data.datasets.raw_text import RawTextOptions, tokenized
from mt_data.indexed import IndexedDatasetWriter, verify
from mt_data.indexed.merging import merge
from mt_data.tokenizers.byte_level import ByteLevelTokenizer

pytestmark = pytest.mark.slow

Work = Callable[[], object]
Look = Callable[[], object]


def killed_at_a_random_moment(work: Work, longest: float, dice: random.Random) -> bool:
    """Run `work` in a process of its own and kill it; False when it was done before."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(dice.uniform(0, longest))
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def kill_often(kills: int, work: Work, look: Look, folder: Path, check_between: Work = lambda: None) -> None:
    """`work` writes into `folder`; `look` says what is there when it is done. Every fifth killed run or so, and the
    last, is followed by one that is let through; the others are followed by the next one that is killed. What was done
    before the kill is removed, or the next runs would have nothing left to be killed at.
    """
    work()  # once before it is timed: some modules are imported when they are first needed
    expected = look()
    clear(folder)
    started = time.monotonic()
    work()
    longest = time.monotonic() - started
    clear(folder)
    dice, done = random.Random(0), 0
    while done < kills:
        killed = killed_at_a_random_moment(work, longest, dice)
        done += killed
        check_between()
        if not killed or dice.random() < 0.2 or done == kills:
            work()
            assert look() == expected
            clear(folder)


def clear(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def bytes_below(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    """The files of a folder by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob(pattern) if path.is_file()}


def write_tokens(prefix: Path, documents: int, sentences: int = 1) -> str:
    rng = np.random.default_rng(documents)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            for _ in range(sentences):
                writer.add_sequence(rng.integers(0, 256, rng.integers(1, 20)).astype(np.uint16))
            writer.end_document()
        writer.finish()
    return str(prefix)


def test_merge(tmp_path: Path) -> None:
    in_small_process(kill_merges, tmp_path)


def kill_merges(tmp_path: Path) -> None:
    parts = [write_tokens(tmp_path / name, documents) for name, documents in (("a", 4_000), ("b", 1_500))]
    output = tmp_path / "out"
    output.mkdir()

    def all_or_nothing() -> None:
        if (output / "merged.idx").exists():
            assert verify(output / "merged").ok

    kill_often(50, lambda: merge(parts, str(output / "merged")), lambda: bytes_below(output), output, all_or_nothing)


def sample_sums(dataset: Any) -> list[int]:
    assert dataset is not None
    return [int(dataset[k]["tokens"].astype(np.int64).sum()) for k in range(min(50, len(dataset)))]


def arrays_below(folder: Path) -> dict[str, bytes]:
    """What whole entries of a cache hold; what killed jobs began lies beside them under other names."""
    found = bytes_below(folder)
    return {name: data for name, data in found.items() if ".tmp-" not in name and not name.endswith(".lock")}


def gpt_job(tmp_path: Path) -> Callable[[], list[int]]:
    """A blend of two data sets: document, sample and shuffle indices of each, and the blend's own."""
    prefixes = [write_tokens(tmp_path / name, documents) for name, documents in (("a", 3_000), ("b", 2_000))]
    blend: Any = [{"prefix": prefix, "weight": weight} for prefix, weight in zip(prefixes, (3, 1), strict=True)]
    config = GPTDataConfig(data_path=blend, split="90,10", data_cache_path=str(tmp_path / "cache"))
    request = SplitRequest("train", 3_000, 16, 1)
    return lambda: sample_sums(build_gpt(config, ByteLevelTokenizer(), request))


def bert_job(tmp_path: Path) -> Callable[[], list[int]]:
    prefix: Any = write_tokens(tmp_path / "a", 1_000, sentences=4)
    cache = str(tmp_path / "cache")
    config = BertDataConfig(data_path=[prefix], split="90,10", data_cache_path=cache, masking_do_full_word=False)
    request = SplitRequest("train", 1_500, 64, 1)
    return lambda: sample_sums(build_bert(config, ByteLevelTokenizer(), request))


def raw_text_job(tmp_path: Path) -> Callable[[], list[int]]:
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps({"text": f"document {n} of some"}) + "\n" for n in range(800)))
    tokenizer = ByteLevelTokenizer()

    def work() -> list[int]:
        prefix = tokenized(str(raw), RawTextOptions(workers=1), tokenizer, tmp_path / "cache")
        report = verify(prefix)
        assert report.ok, report.problems
        return []

    return work


@pytest.mark.parametrize(("job", "kills"), [(gpt_job, 50), (bert_job, 15), (raw_text_job, 15)])
def test_caches(tmp_path: Path, job: Callable[[Path], Callable[[], list[int]]], kills: int) -> None:
    in_small_process(kill_caching, tmp_path, job, kills)


def kill_caching(tmp_path: Path, job: Callable[[Path], Callable[[], list[int]]], kills: int) -> None:
    work, cache = job(tmp_path), tmp_path / "cache"
    kill_often(kills, work, lambda: (work(), arrays_below(cache)), cache)


def corpus(folder: Path) -> list[str]:
    """Files of short pages, some of them alike."""
    rng = random.Random(0)
    words = [f"word{n}" for n in range(300)]
    pages = [" ".join(rng.choices(words, k=rng.randrange(3, 60))) for _ in range(70)]
    for number in range(3):
        chosen = rng.choices(pages, k=40)
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
    (folder / "eval.json").write_text(json.dumps({"text": pages[7]}))
    return [str(folder / f"{number}.jsonl") for number in range(3)]


def clean_job(inputs: list[str], run: RunOptions) -> object:
    return clean(inputs, preset("none").replace(["min_words=20"]), run)


def exact_job(inputs: list[str], run: RunOptions) -> object:
    return dedup(inputs, DedupOptions(method="exact"), run)


def minhash_job(inputs: list[str], run: RunOptions) -> object:
    return dedup(inputs, DedupOptions(method="minhash"), run)


def decontaminate_job(inputs: list[str], run: RunOptions) -> object:
    return decontaminate(inputs, [Path(inputs[0]).with_name("eval.json")], ["text"], OverlapOptions(), run)


@pytest.mark.parametrize("job", [clean_job, exact_job, minhash_job, decontaminate_job])
def test_building_corpora(tmp_path: Path, job: Callable[[list[str], RunOptions], object]) -> None:
    in_small_process(kill_building, tmp_path, job)


def kill_building(tmp_path: Path, job: Callable[[list[str], RunOptions], object]) -> None:
    inputs, output = corpus(tmp_path), tmp_path / "out"
    run = RunOptions(output, dropped=tmp_path / "out" / "dropped")

    def look() -> tuple[dict[str, bytes], Any]:
        report = json.loads((output / "report.json").read_bytes())
        files = {name: data for name, data in bytes_below(output, "*.jsonl").items() if not name.startswith(".state")}
        return files, [report[key] for key in ("documents", "dropped", "changed")]

    kill_often(13, lambda: job(inputs, run), look, output)
