"""Deduplication against brute force, datasketch's own table, and its stated memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_core.errors import ConfigError
from mt_data.corpora.deduplication import Signer, band_keys, dedup, mark_exact, mark_near, shingles, table_shape
from mt_data.corpora.grouping import RowFiles
from mt_data.corpora.options import DedupOptions


def rows_on_disk(folder: Path, name: str, rows: np.ndarray, files: int = 2) -> RowFiles:
    """The rows in several files, one of them empty."""
    parts = [*np.array_split(rows, files), rows[:0]]
    paths = tuple(folder / f"{name}{number}" for number in range(len(parts)))
    for path, part in zip(paths, parts, strict=True):
        part.tofile(path)
    return RowFiles(paths, rows.dtype.str, rows.shape[1])


def components(count: int, edges: set[tuple[int, int]]) -> list[int]:
    """For each item the first of its connected component, -1 for the first itself."""
    first = list(range(count))
    for one, other in edges:
        low, high = sorted((first[one], first[other]))
        first = [low if label == high else label for label in first]
    return [-1 if label == item else label for item, label in enumerate(first)]


def jaccard(one: set[Any], other: set[Any]) -> float:
    return len(one & other) / len(one | other)


@given(st.lists(st.integers(0, 8), max_size=30), st.booleans())
@settings(max_examples=30, deadline=None)
def test_exact_marks_every_repetition(tmp_path_factory: Any, values: list[int], little_memory: bool) -> None:
    rows = np.random.default_rng(0).integers(0, 2**63, (9, 2), np.uint64)[np.array(values, int)].reshape(-1, 2)
    original = np.full(len(rows), -1, np.int64)
    mark_exact(
        rows_on_disk(tmp_path_factory.mktemp("rows"), "digests", rows), original, 200 if little_memory else 2**20
    )
    assert original.tolist() == [-1 if values.index(v) == i else values.index(v) for i, v in enumerate(values)]


@pytest.mark.slow
@pytest.mark.parametrize("verify", [True, False])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_clusters_are_the_components_of_candidate_pairs(tmp_path_factory: Any, verify: bool, seed: int) -> None:
    options = DedupOptions(threshold=0.5, num_perm=24, bands=6, rows=3, verify=verify)
    signatures = np.random.default_rng(seed).integers(0, 3, (60, 24), np.uint32)
    signatures[30:] = np.where(np.random.default_rng(seed + 1).random((30, 24)) < 0.7, signatures[:30], signatures[30:])
    folder = tmp_path_factory.mktemp("rows")
    keys = rows_on_disk(folder, "keys", band_keys(signatures, 6, 3))
    original = np.full(60, -1, np.int64)
    assert mark_near(keys, rows_on_disk(folder, "signatures", signatures, 3), original, options) == 0

    def candidates(one: np.ndarray, other: np.ndarray) -> bool:
        same_band = any((one[b : b + 3] == other[b : b + 3]).all() for b in range(0, 18, 3))
        return same_band and (not verify or (one == other).mean() >= 0.5)

    edges = {(i, j) for i, j in combinations(range(60), 2) if candidates(signatures[i], signatures[j])}
    assert original.tolist() == components(60, edges)


def test_candidates_are_those_of_datasketch() -> None:
    import datasketch  # with scipy: 1 s in each worker that collects this module

    options = DedupOptions(threshold=0.6, ngram=2)
    signer, (bands, rows) = Signer(options), table_shape(options)
    texts = near_texts(random.Random(5), 40)
    signatures = np.stack([signer(text) for text in texts])
    table = datasketch.MinHashLSH(num_perm=128, params=(bands, rows))
    sketches = [datasketch.MinHash(num_perm=128, seed=1, hashvalues=row, scheme="affine32") for row in signatures]
    for number, sketch in enumerate(sketches):
        table.insert(number, sketch)
    keys = band_keys(signatures, bands, rows)
    for number, sketch in enumerate(sketches):
        assert set(table.query(sketch)) == set(np.flatnonzero((keys == keys[number]).any(axis=1)).tolist())


def near_texts(source: random.Random, count: int) -> list[str]:
    """Texts in pairs, the second with some words of the first replaced."""
    texts = []
    for number in range(count // 2):
        words = [f"w{source.randrange(2000)}" for _ in range(150)]
        other = [f"v{source.randrange(2000)}" if source.random() < number / count / 3 else word for word in words]
        texts += [" ".join(words), " ".join(other)]
    return texts


def test_near_duplicates_agree_with_brute_force_jaccard(
    write_jsonl: Any, run: Any, tmp_path: Path, texts_of: Any
) -> None:
    texts = near_texts(random.Random(3), 120)
    path = write_jsonl("a.jsonl", [{"id": number, "text": text} for number, text in enumerate(texts)])
    dedup([path], DedupOptions(threshold=0.7, ngram=3, num_perm=256), run())
    kept = {json.loads(line)["id"] for line in (tmp_path / "out/a.jsonl").open()}
    sets = [set(zip(*(text.split()[i:] for i in range(3)), strict=False)) for text in texts]
    similarities = [jaccard(sets[i], sets[i + 1]) for i in range(0, 120, 2)]
    assert min(similarities) < 0.55
    assert sum(similarity > 0.85 for similarity in similarities) > 5
    for number, similarity in enumerate(similarities):
        assert 2 * number in kept
        if similarity > 0.82:
            assert 2 * number + 1 not in kept
        if similarity < 0.58:
            assert 2 * number + 1 in kept


def test_tables_find_what_the_documentation_says() -> None:
    bands, rows = table_shape(DedupOptions())
    shares = [1 - (1 - similarity**rows) ** bands for similarity in (0.8, 0.85, 0.9)]
    assert shares == pytest.approx([0.87, 0.97, 0.999], abs=0.006)


def test_the_estimate_is_unbiased() -> None:
    signer = Signer(DedupOptions(num_perm=2048, ngram=1))
    one, other = " ".join(f"w{i}" for i in range(300)), " ".join(f"w{i}" for i in range(100, 400))
    assert (signer(one) == signer(other)).mean() == pytest.approx(0.5, abs=4 * (0.25 / 2048) ** 0.5)


def test_long_texts_are_signed_in_parts() -> None:
    words = [f"w{i}" for i in range(40_000)]
    signer = Signer(DedupOptions(num_perm=16, ngram=1))
    parts = [signer(" ".join(words[start : start + 10_000])) for start in range(0, 40_000, 10_000)]
    assert np.array_equal(signer(" ".join(words)), np.minimum.reduce(parts))


@pytest.mark.parametrize(
    ("normalize", "kept"),
    [("none", [0, 1, 2, 3, 5]), ("blanks", [0, 2, 3, 5]), ("words", [0, 3, 5])],
)
def test_exact_ignores_what_its_options_name(
    normalize: str, kept: list[int], write_jsonl: Any, run: Any, tmp_path: Path, texts_of: Any
) -> None:
    texts = ["One two.", "One  two.", "one TWO", "!!", "One two.", "??"]
    report = dedup([write_jsonl("a.jsonl", texts)], DedupOptions(method="exact", normalize=normalize), run())  # type: ignore[arg-type]
    assert texts_of(tmp_path / "out/a.jsonl") == [texts[i] for i in kept]
    assert report.total.dropped["exact_duplicate"].count == 6 - len(kept)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "workers"), [("exact", 2), ("minhash", 1)])
def test_the_first_over_all_files_stays_and_is_named(
    method: Any, workers: int, write_jsonl: Any, run: Any, tmp_path: Path, texts_of: Any
) -> None:
    long = "a text of several words that stands in two files of the corpus"
    one = tmp_path / "a.jsonl"
    one.write_text('{"text": "other words stand here"}\n\n{"text": "' + long + '"}\n')
    two = write_jsonl("b.jsonl", [long, "and here are some more of them"])
    report = dedup([one, two], DedupOptions(method=method), run(workers=workers))
    assert len(texts_of(tmp_path / "out/a.jsonl")) == 2
    assert texts_of(tmp_path / "out/b.jsonl") == ["and here are some more of them"]
    (reason,) = report.total.dropped
    assert report.total.dropped[reason].examples == [f"{two}:1: of {one}:3"]
    assert not (tmp_path / "out/.state/work").exists()


def test_what_repeats_depends_on_all_inputs(write_jsonl: Any, run: Any) -> None:
    one, two = write_jsonl("a.jsonl", ["x"]), write_jsonl("b.jsonl", ["x", "y"])
    dedup([one, two], DedupOptions(method="exact"), run())
    again = dedup([one, two], DedupOptions(method="exact"), run())
    assert [file["reused"] for file in again.files] == [True, True]
    with pytest.raises(ConfigError, match="made with inputs="):
        dedup([two, one], DedupOptions(method="exact"), run())


def test_a_rerun_that_finds_all_finished_gives_the_same_report(write_jsonl: Any, run: Any) -> None:
    path = write_jsonl("a.jsonl", near_texts(random.Random(1), 10))
    first, second = (dedup([path], DedupOptions(), run()) for _ in range(2))
    assert first.notes == second.notes
    assert first.notes["table"] == "14 bands of 9 rows"
    assert first.total == second.total


def test_no_documents_at_all(write_jsonl: Any, run: Any) -> None:
    assert dedup([write_jsonl("a.jsonl", [])], DedupOptions(), run()).total.read == 0


def test_short_texts_are_one_shingle_and_differ_by_their_marks_alone() -> None:
    assert len(shingles("two words", 5, "word")) == len(shingles("", 5, "word")) == 1
    assert shingles("!!", 5, "word") != shingles("??", 5, "word")
    assert len(shingles("abcdef", 5, "char")) == 2


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"threshold": 1.0}, "between 0 and 1"),
        ({"method": "fuzzy"}, "give exact, minhash"),
        ({"bands": 3}, "give both or neither"),
        ({"bands": 20, "rows": 20}, "at most --num-perm 128"),
    ],
)
def test_impossible_options_say_what_is_allowed(given_options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DedupOptions(**given_options)


MEMORY = """
import sys
from pathlib import Path
import numpy as np
from mt_data.corpora.deduplication import _new_originals
from mt_data.corpora.deduplication import mark_exact
from mt_data.corpora.deduplication import mark_near
from mt_data.corpora.options import DedupOptions
from mt_data.corpora.grouping import RowFiles

folder, method, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def rows(name, dtype, width):
    path = folder / f"{name}{count}"
    with open(path, "wb") as stream:
        for part in range(count // PART):
            random = np.random.default_rng(part * PART % (count - PART))  # the last part repeats the first
            bits = 8 * np.dtype(dtype).itemsize
            stream.write(random.integers(0, 2**bits, (PART, width), np.uint64).astype(dtype).tobytes())
    return RowFiles((path,), dtype, width)

PART = 10_000
original = _new_originals(folder / f"originals{count}", count)
memory = 16 * 2**20
if method == "exact":
    mark_exact(rows("digests", "<u8", 2), original, memory)
else:
    options = DedupOptions(num_perm=2, bands=2, rows=1, memory_mb=memory >> 20)
    mark_near(rows("keys", "<u8", 2), rows("signatures", "<u4", 2), original, options)
assert int((original >= 0).sum()) == PART
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak.split()[1]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "bytes_per_document"), [("exact", 12), ("minhash", 28)])
def test_memory_per_document_is_as_stated(method: str, bytes_per_document: float, tmp_path: Path) -> None:
    """Stated: 8 mapped bytes a document (the result on disk), for minhash 8 more, and what sorting is given."""

    def peak(count: int) -> int:
        command = [sys.executable, "-c", MEMORY, str(tmp_path), method, str(count)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    small, large = 600_000, 1_800_000
    growth = []
    # Where memory is scarce the system takes mapped pages away, from either run: what is measured then is too much.
    while len(growth) < 3 and not (growth and growth[-1] < bytes_per_document):
        growth.append((peak(large) - peak(small)) / (large - small))
    assert growth[-1] < bytes_per_document, growth
