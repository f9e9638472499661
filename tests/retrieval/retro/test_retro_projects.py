"""Retro projects: the chunks by hand, neighbours by brute force, kills, ranks, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from tests.retrieval.retro.project import (
    CHUNK,
    EOD,
    OPTIONS,
    SAMPLE,
    StoppedError,
    StoppingBars,
    build,
    build_on_rank,
    contents,
    random_documents,
    write_text,
)

from mt_core.config.loading import load_config
from mt_core.data.building import build_datasets, build_tokenizer
from mt_core.errors import ConfigError, DataError, MtError
from mt_core.plugins import PluginHost, load_plugins
from mt_core.testing import run_ranks
from mt_data.datasets.retro.project import read_neighbors
from mt_retrieval.retro.database import BLANK, ChunkCutter, build_database, database_tokenizer, open_database
from mt_retrieval.retro.embeddings import HashedNgrams
from mt_retrieval.retro.index import add_to_index, train_index
from mt_retrieval.retro.query import find_neighbors
from mt_retrieval.retro.verify import verify_project

HELD_OUT = [30, 31, 32, 33]
DOCUMENTS = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9],
    [5, 6, 7, 8, 20, 21],
    [40, 41, 42, 43, *HELD_OUT],
    [],
    [44, 45],
    [*HELD_OUT, 50],
    [60],
]


def test_a_text_without_a_manifest_has_the_named_tokenizer(texts, project, tmp_path: Path) -> None:
    prefix = unrecorded(tmp_path, texts)
    named = {"tokenizer_type": "NullTokenizer", "tokenizer_entries": {"vocab_size": EOD + 1}}
    build_database(tmp_path, [texts[0], prefix], **OPTIONS, **named)
    assert open_database(tmp_path).rows[:].tolist() == open_database(project).rows[:].tolist()
    assert database_tokenizer(tmp_path).decode([3, 7]) == "3 7"


@pytest.mark.parametrize("deduplicate", [False, True])
def test_documents_are_cut_and_held_out_contents_left_out(tmp_path: Path, deduplicate: bool) -> None:
    prefix = write_text(tmp_path / "text", DOCUMENTS)
    manifest = build_database(
        tmp_path, [prefix], split="5,1,1", chunk_length=4, deduplicate=deduplicate, block_documents=2
    )
    expected = [[0, 0, 0, 4], [0, 0, 4, 4], [0, 0, 8, 1], [0, 1, 0, 4], [0, 1, 4, 2], [0, 2, 0, 4], [0, 4, 0, 2]]
    if deduplicate:
        del expected[3]
    database = open_database(tmp_path)
    assert database.rows[:].tolist() == expected
    counts = manifest.counts
    assert (counts.cut, counts.held_out, counts.also_held_out, counts.blank) == (11, 3, 1, 0)
    assert (counts.duplicates, counts.kept) == (int(deduplicate), len(expected))
    assert database.tokens(2).tolist() == [9]
    assert database.neighbor(0, 8).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert database.neighbor(1, 8).tolist() == [5, 6, 7, 8, 9], "no further than the document"
    assert database.neighbor(expected.index([0, 2, 0, 4]), 8).tolist() == [40, 41, 42, 43], "nor to what is held out"


def test_a_chunk_of_white_space_is_blank() -> None:
    words = {0: "a", 1: " ", 2: "\n", 3: "<eod>"}
    tokenizer = SimpleNamespace(special=SimpleNamespace(eod=3), decode=lambda ids: "".join(words[id] for id in ids))
    source = SimpleNamespace(read=lambda document: np.array([1, 2, 3, 1, 0, 2, 1, 3]))
    rows = ChunkCutter(tokenizer, 3).cut(source, 5, range(8, 9), lambda count: None)  # type: ignore[arg-type]
    assert rows[:, :4].tolist() == [[5, 8, 0, 3], [5, 8, 3, 3], [5, 8, 6, 1]]
    assert (rows[:, 4] == BLANK).tolist() == [True, False, True]


def test_hashed_ngrams_measure_common_runs() -> None:
    """The inner product is near the share of common runs; an order of tokens counts."""
    random = np.random.RandomState(0)
    left = random.randint(0, 10**6, (200, 64))
    right = left.copy()
    right[:, 32:] = random.randint(0, 10**6, (200, 32))
    vectors = [HashedNgrams().vectors(list(side), lambda count: None) for side in (left, right, left[:, ::-1])]
    assert np.linalg.norm(vectors[0], axis=1) == pytest.approx(np.ones(200), abs=1e-5)
    runs = [63 + 1, 63, 62]  # of one, two and three tokens, of which those within the first 32 are common
    assert (vectors[0] * vectors[1]).sum(1).mean() == pytest.approx(93 / sum(runs), abs=0.05)
    assert (vectors[0] * vectors[2]).sum(1).mean() == pytest.approx(64 / sum(runs), abs=0.05)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("texts")
    return write_text(folder / "a", random_documents(40, 0)), write_text(folder / "b", random_documents(20, 1))


@pytest.fixture(scope="module")
def project(texts: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    build(folder, *texts)
    return folder


def copied(project: Path, folder: Path) -> Path:
    shutil.copytree(project, folder / "copy")
    return folder / "copy"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "parameters", "seq_length"),
    [("exact", None, SAMPLE), ("exact", None, None), ("Flat", None, SAMPLE), ("IVF3,Flat", "nprobe=3", SAMPLE)],
)
def test_neighbours_are_the_nearest_of_other_documents(texts, project, tmp_path, index, parameters, seq_length) -> None:
    """All distances in plain loops. Of equal distances any chunk may come first."""
    if index != "exact":
        pytest.importorskip("faiss")
        build(tmp_path, *texts, index=index, search_parameters=parameters)
        project = tmp_path
    elif seq_length is None:
        project = copied(project, tmp_path)
        shutil.rmtree(project / "query")
        for text in texts:
            find_neighbors(
                project, text, HashedNgrams(), seq_length=None, num_neighbors=3, num_neighbors_query=500, block_rows=16
            )
    database, embedder = open_database(project), HashedNgrams()
    chunks = [database.tokens(number) for number in range(len(database))]
    table = embedder.vectors(chunks, lambda count: None).astype(np.float16).astype(np.float64)
    checked = 0
    for number, text in enumerate(database.texts):
        folder = next(project.glob(f"query/{'ab'[number]}_*"))
        found = np.load(folder / "neighbors.npy")
        owners = np.repeat(np.arange(len(text.sequence_lengths)), text.sequence_lengths)
        tokens = np.concatenate([text.read(document) for document in range(len(text.sequence_lengths))])
        assert len(found) == len(tokens) // CHUNK
        sample = seq_length or CHUNK
        for chunk in range(0, len(found), 7):
            first = chunk * CHUNK // sample * sample
            own = {(number, document) for document in owners[first : first + sample].tolist()}
            query = tokens[chunk * CHUNK : (chunk + 1) * CHUNK].astype(np.int64)
            vector = embedder.vectors([query], lambda count: None)[0].astype(np.float64)
            allowed = [row for row, (t, d, *_) in enumerate(database.rows[:].tolist()) if (t, d) not in own]
            distances = ((table - vector) ** 2).sum(1)
            assert set(found[chunk].tolist()) <= set(allowed)
            np.testing.assert_allclose(distances[found[chunk]], np.sort(distances[allowed])[:3], atol=1e-3)
            checked += 1
    assert checked > 20


def test_where_fewer_are_found_there_is_minus_one(texts, project, tmp_path) -> None:
    project = copied(project, tmp_path)
    shutil.rmtree(project / "query")
    find_neighbors(project, texts[0], HashedNgrams(), seq_length=SAMPLE, num_neighbors=6, num_neighbors_query=6)
    found = np.load(next(project.glob("query/a_*/neighbors.npy")))
    none = found < 0
    assert none.any(), "some of the nearest six are of the sample's own documents"
    assert (none[:, 1:] >= none[:, :-1]).all(), "at the end"


@pytest.mark.slow
def test_killed_at_any_step_it_resumes_to_the_same_bytes(texts, project, tmp_path) -> None:
    stopped: list[str] = []
    while True:
        try:
            build(tmp_path / "project", *texts, bars=StoppingBars(len(stopped) * 3 + 2))
            break
        except StoppedError as at:
            stopped.append(str(at))
            for block in (tmp_path / "project").glob("embeddings/*-00001.json"):
                block.unlink()
                block.with_name(".embeddings-00001.npy.1").write_bytes(b"killed")
    steps = ("cutting documents", "embedding chunks", "finding neighbours of a")
    assert set(steps) <= set(stopped)
    assert contents(tmp_path / "project") == contents(project)


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_write_the_same_bytes(texts, tmp_path) -> None:
    """Of an inverted file the ranks share the encoding."""
    pytest.importorskip("faiss")
    build(tmp_path / "1", *texts, index="IVF3,Flat")
    run_ranks(2, build_on_rank, tmp_path / "2", texts, "IVF3,Flat")
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_an_index_that_faiss_refuses_is_replaced_by_another(project, tmp_path) -> None:
    pytest.importorskip("faiss")
    project = copied(project, tmp_path)
    shutil.rmtree(project / "index")
    with pytest.raises(ConfigError, match=r"faiss cannot make the index PQ5 of .* choose another --index"):
        train_index(project, HashedNgrams(), factory="PQ5", block_rows=16)
    train_index(project, HashedNgrams(), factory="Flat", block_rows=16)
    assert add_to_index(project, HashedNgrams()).added is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"embedder": "none"}, "none"),
        ({"num_neighbors": 501}, "--num-neighbors-query 500 is fewer than --num-neighbors 501"),
        ({"search_parameters": "nprobe=2"}, "is searched exactly"),
        ({"index": "IVF"}, "faiss cannot make the index IVF"),
        ({"index": "IVF3,Flat", "search_parameters": "efSearch=2"}, "--search-parameters efSearch=2: the index IVF3"),
    ],
)
def test_arguments_are_refused_before_documents_are_cut(texts, tmp_path, options, words) -> None:
    if "index" in options:
        pytest.importorskip("faiss")
    with pytest.raises(MtError, match=words):
        build(tmp_path / "project", *texts, **options)
    assert not (tmp_path / "project").exists()


def damage(project: Path, pattern: str) -> Path:
    path = next(project.glob(pattern))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return project


def verified(project: Path, fraction: float = 0.0) -> list[str]:
    return verify_project(project, fraction=fraction, device="cpu")


def test_a_whole_project_is_verified(project) -> None:
    assert [line.split(":")[0].split("_")[0] for line in verified(project, 1.0)] == [
        "database",
        "embeddings",
        "index",
        "neighbours of a",
        "neighbours of b",
    ]


def replaced_with_its_record(project: Path) -> Path:
    """Neighbours that nobody found, under the right hash."""
    from mt_data.records import blocked_file, write_array, write_record

    folder = next(project.glob("query/a_*"))
    array = np.load(folder / "neighbors.npy")[::-1].copy()
    write_array(folder, "neighbors.npy", array)
    stored = {"neighbors": blocked_file(folder / "neighbors.npy")}
    write_record(folder / "manifest.json", read_neighbors(folder).model_copy(update=stored))
    return project


def other_embedder() -> HashedNgrams:
    embedder = HashedNgrams()
    embedder.name, embedder.fingerprint = "other", "0" * 64
    return embedder


def unrecorded(project: Path, texts: tuple[str, str], fingerprint: str | None = None) -> str:
    """A text as Megatron writes it, or of another tokenizer."""
    path = project / "text"
    for suffix in (".bin", ".idx"):
        shutil.copy(texts[1] + suffix, f"{path}{suffix}")
    if fingerprint is not None:
        manifest = Path(f"{texts[1]}.manifest.json").read_text()
        recorded = json.loads(manifest)["tokenizer"]["fingerprint"]
        Path(f"{path}.manifest.json").write_text(manifest.replace(recorded, fingerprint))
    return str(path)


def with_file(project: Path, name: str) -> Path:
    """A file where a folder is expected."""
    shutil.rmtree(project / name)
    (project / name).touch()
    return project


def of_another_database(project: Path, texts: tuple[str, str]) -> None:
    shutil.rmtree(project / "db")
    build_database(project, texts[:1], **OPTIONS)
    add_to_index(project, HashedNgrams())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p, t: verified(damage(p, "db/chunks.npy")), DataError, "chunks.npy is damaged: its SHA-256"),
        (lambda p, t: verified(damage(p, "db/blocks/*1.npy")), DataError, "chunks-00001.npy is damaged"),
        (lambda p, t: verified(damage(p, "embeddings/*2.npy")), DataError, "embeddings-00002.npy is damaged"),
        (lambda p, t: verified(damage(p, "query/b_*/*.npy")), DataError, "neighbors.npy is damaged"),
        (lambda p, t: verified(replaced_with_its_record(p), 1.0), DataError, "block 0 of neighbours is not what is"),
        (lambda p, t: build_database(p, t[:1], **OPTIONS), ConfigError, "db is of another job .texts: "),
        (
            lambda p, t: build_database(p / "db" / "chunks.npy", t, **OPTIONS),
            ConfigError,
            "PROJECT .*db/chunks.npy cannot be written: Not a directory",
        ),
        (
            lambda p, t: train_index(with_file(p, "embeddings"), HashedNgrams()),
            ConfigError,
            "PROJECT .* cannot be written: File exists",
        ),
        (
            lambda p, t: find_neighbors(with_file(p, "query"), t[0], HashedNgrams(), seq_length=SAMPLE),
            ConfigError,
            "PROJECT .* cannot be written: Not a directory",
        ),
        (lambda p, t: build_database(p / "new", [t[0], t[0]]), ConfigError, "are the same text; give each text"),
        (lambda p, t: build_database(p / "new", [unrecorded(p, t)]), ConfigError, "name it with --tokenizer-type and"),
        (lambda p, t: build_database(p / "new", [t[0], unrecorded(p, t, "f" * 64)]), DataError, "has one tokenizer"),
        (
            lambda p, t: find_neighbors(p, unrecorded(p, t, "f" * 64), HashedNgrams(), seq_length=SAMPLE),
            DataError,
            "was made with the tokenizer ffffffffffffffff.*, and .* with .*; make the text with the tokenizer of",
        ),
        (lambda p, t: open_database(p / "none"), DataError, "none holds no Retro database: .*; run mt retro db build"),
        (lambda p, t: build_database(p / "new", t, split="0,1,1"), DataError, "no chunk is left to search"),
        (lambda p, t: train_index(p, other_embedder()), ConfigError, "embeddings is of another job .embedder: "),
        (lambda p, t: add_to_index(p, other_embedder()), ConfigError, "index is of another embedder: SHA-256 .* other"),
        (lambda p, t: of_another_database(p, t), DataError, "index is of another database: .* is .*train another"),
        (
            lambda p, t: find_neighbors(p, t[0], HashedNgrams(), seq_length=SAMPLE + 1),
            ConfigError,
            "--seq-length 17 is not a multiple of the database's chunks of 4",
        ),
        (
            lambda p, t: find_neighbors(p, t[0], HashedNgrams(), seq_length=SAMPLE, num_neighbors_query=2),
            ConfigError,
            "--num-neighbors-query 2 is fewer than --num-neighbors 20",
        ),
        (
            lambda p, t: find_neighbors(p, t[0], HashedNgrams(), seq_length=SAMPLE * 2),
            ConfigError,
            "of another job .exclude_sequence_length: 16 there, 32 now",
        ),
        (
            lambda p, t: find_neighbors(p, t[0], HashedNgrams(), seq_length=16, search_parameters="nprobe=2"),
            ConfigError,
            "is searched exactly",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    texts, project, tmp_path, call: Callable[[Path, tuple[str, str]], object], error: type[MtError], words: str
) -> None:
    with pytest.raises(error, match=words):
        call(copied(project, tmp_path), texts)


# -- what training reads ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return load_plugins()


def dataset(host, *options: str, split: str = "train"):
    model = ["num_layers=1", "hidden_size=16", "num_attention_heads=2", "position_embedding_type=rope"]
    base = ["model.family=retro", *(f"model.{key}" for key in model), "model.retro_cross_attention_layers=[1]"]
    chunks = [f"{section}.retro_chunk_length={CHUNK}" for section in ("model", "data")]
    tokens = ["tokenizer.tokenizer_type=NullTokenizer", f"tokenizer.vocab_size={EOD + 1}"]
    data = ["data.dataset_type=retro", f"data.seq_length={SAMPLE}", "train.train_iters=2"]
    config = load_config(overrides=[*base, *chunks, *tokens, *data, *options], host=host).config
    return build_datasets(config, build_tokenizer(config, host), split, host)[split]


def test_samples_have_neighbours_within_their_documents_and_splits_are_of_documents(host, texts, project) -> None:
    named = [f"data.retro_project_dir={project}", f"data.data_path={texts[1]}"]
    database = open_database(project)
    source = database.texts[1]
    owners = np.repeat(np.arange(20), source.sequence_lengths)
    numbers = np.load(next(project.glob("query/b_*/neighbors.npy")))
    for split, documents in (("train", range(14)), ("valid", range(14, 18))):
        data = dataset(host, *named, split=split)
        items = sorted(set(data.order.tolist()))
        inside = [
            item
            for item in range(len(owners) // SAMPLE)
            if set(owners[item * SAMPLE : (item + 1) * SAMPLE + 1].tolist()) <= set(documents)
        ]
        assert [item for item in items if item not in inside] == []
        assert len(inside) - len(items) <= 1, "the last may have no label"
        item, sample = int(data.order[0]), data[0]
        for chunk in range(SAMPLE // CHUNK):
            for rank in range(2):
                number = numbers[item * SAMPLE // CHUNK + chunk, rank]
                text, document, first, _ = database.rows[:][number].tolist()
                chunks = {(t, d, f): length for t, d, f, length in database.rows[:].tolist()}
                length = chunks[text, document, first] + chunks.get((text, document, first + CHUNK), 0)
                expected = database.texts[text].read(document)[first : first + length].tolist()
                assert sample["neighbor_tokens"][chunk, rank][: len(expected)].tolist() == expected
                assert sample["neighbor_mask"][chunk, rank].sum() == len(expected)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ("data.retro_project_dir={p}", ConfigError, "has 2 texts; name one of them as data.data_path: .*/a, .*/b"),
        (
            "data.retro_project_dir={p} data.data_path={a} data.retro_neighbors_path=x",
            ConfigError,
            "names data.retro_neighbors_path too; leave out one",
        ),
        (
            "data.retro_project_dir={p} data.data_path={c}",
            DataError,
            r"has no neighbours of .*/c with the content .* \(it has: a_.*, b_.*\); run mt retro query .* --text",
        ),
        (
            "data.data_path={a} data.retro_database_path={p}/db data.retro_neighbors_path={b_neighbors}",
            DataError,
            "has the neighbours of another text: of .*/b with the content .*, and .*/a has",
        ),
        (
            "data.data_path={a} data.retro_database_path={other}/db data.retro_neighbors_path={a_neighbors}",
            DataError,
            "has neighbours in another database: .*, and .*other/db is .*; run mt retro query",
        ),
        (
            "data.data_path={a} data.retro_neighbors_path={a_neighbors}",
            DataError,
            "has neighbours in a folder of mt retro db build, and data.retro_database_path=None is none",
        ),
        (
            "data.retro_project_dir={p} data.data_path={a} data.seq_length=12",
            DataError,
            "has neighbours for samples of 16 tokens, .*data.seq_length=12 does not divide them",
        ),
        (
            "data.retro_project_dir={p} data.data_path={a} model.retro_chunk_length=8 data.retro_chunk_length=8",
            DataError,
            "has chunks of 4 tokens, and data.retro_chunk_length=8",
        ),
        (
            "data.retro_project_dir={p} data.data_path={a} data.split=9,1,0",
            ConfigError,
            'data.split="9,1,0" is not the split of the database .*, "70,20,10"',
        ),
    ],
)
def test_neighbours_of_something_else_are_refused(host, texts, project, other, options, error, words) -> None:
    named = {"p": project, "a": texts[0], "b": texts[1], "c": other / "c", "other": other}
    for text in "ab":
        named[f"{text}_neighbors"] = next(project.glob(f"query/{text}_*"))
    with pytest.raises(error, match=words):
        dataset(host, *options.format(**named).split())


@pytest.mark.parametrize(
    ("pattern", "cure"), [("db/chunks.npy", "build the database"), ("query/b_*/*.npy", "run mt retro query")]
)
def test_damage_is_found_where_it_is_read(host, texts, project, tmp_path, pattern: str, cure: str) -> None:
    project = damage(copied(project, tmp_path), pattern)
    named = [f"data.retro_project_dir={project}", f"data.data_path={texts[1]}"]
    with pytest.raises(DataError, match=rf"npy is damaged: bytes 0 to .*manifest.json records; .*{cure} again"):
        dataset(host, *named)[0]
    assert "neighbor_tokens" in dataset(host, *named, "data.verify_checksums=false")[0]


@pytest.fixture(scope="module")
def other(texts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another database, and a text that is in none."""
    folder = tmp_path_factory.mktemp("many") / "other"
    build_database(folder, texts[:1], **OPTIONS)
    write_text(folder / "c", random_documents(5, 9))
    return folder
