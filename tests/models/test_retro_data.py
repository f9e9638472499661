"""Data sets with neighbours: which chunks are found, what a sample holds, files and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mt_core.config.loading import load_config
from mt_core.data.building import build_datasets, build_tokenizer
from mt_core.errors import ConfigError, DataError
from mt_data.datasets.retro.builtin import Chunks, chunks_of, nearest_chunks, signatures_of
from mt_data.datasets.retro.database import TokenStream
from mt_data.indexed.reader import MemoryIndexedDataset
from mt_data.indexed.writer import IndexedDatasetWriter

SMALL = [
    "model.family=retro",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.position_embedding_type=rope",
    "model.retro_cross_attention_layers=[1]",
    "train.train_iters=2",
]


def shaped(chunk: int, **keys: int) -> list[str]:
    sizes = {"retro_chunk_length": chunk} | keys
    return [f"{section}.{key}={value}" for section in ("model", "data") for key, value in sizes.items()]


def stream_of(*sequences: list[int]) -> TokenStream:
    return TokenStream(MemoryIndexedDataset.from_sequences(sequences), "a test")


# -- the stream and the rule --------------------------------------------------------------------------


def test_a_stream_reads_across_sequences() -> None:
    stream = stream_of([1, 2, 3], [], [4], [5, 6])
    assert len(stream) == 6
    for start in range(7):
        for length in range(8):
            assert stream.read(start, length).tolist() == [1, 2, 3, 4, 5, 6][start : start + length]


def test_chunks_agree_as_often_as_they_share_runs() -> None:
    """16 functions x 200 pairs of chunks that share 9 of 17 runs of four tokens (16 tokens, of which 12 are common)."""
    random = np.random.RandomState(0)
    left = random.randint(0, 1000, (200, 16))
    right = left.copy()
    right[:, 12:] = random.randint(1000, 2000, (200, 4))
    share = (signatures_of(left) == signatures_of(right)).mean()
    assert share == pytest.approx(9 / 17, abs=0.05)
    assert (signatures_of(left) == signatures_of(left[::-1])).mean() < 0.01


def test_the_nearest_chunks_agree_most() -> None:
    """All pairs compared, in plain loops; few enough agree that all are looked at."""
    random = np.random.RandomState(1)
    text, base = random.randint(0, 3, (30, 8)), random.randint(0, 3, (40, 8))
    queries, database = (chunks_of(stream_of(side.flatten().tolist()), 8, 8) for side in (text, base))
    found = nearest_chunks(queries, database, 3)
    looked_at = 0
    for query, row in zip(queries.signatures, found.tolist(), strict=True):
        agreeing = (database.signatures == query).sum(1)
        if ((database.signatures == query).sum(0) > 8).any():
            continue
        looked_at += 1
        expected = [n for n in sorted(range(40), key=lambda n: (-agreeing[n], n)) if agreeing[n]][:3]
        assert row == expected + [-1] * (3 - len(expected))
    assert looked_at > 15


def test_chunks_of_the_same_document_are_no_neighbours() -> None:
    """Of one text of three documents; chunks reach into the next document, and so does what is retrieved."""
    page = [1, 2, 3, 4, 5, 6]
    stream = stream_of([*page, *page], [*page, *page], page)
    # Chunks of 6: documents 0 0 1 1 2. Chunk 1 retrieved with 12 tokens reaches into document 1.
    found = nearest_chunks(chunks_of(stream, 6, 6), chunks_of(stream, 6, 12), 4, same_text=True)
    assert found.tolist() == [
        [2, 3, 4, -1],
        [2, 3, 4, -1],
        [0, 4, -1, -1],
        [0, 4, -1, -1],
        [0, 1, 2, -1],
    ]


def test_without_a_database_there_are_no_neighbours() -> None:
    none = Chunks(np.zeros((0, 16), np.uint64), np.zeros((0, 2), np.int64))
    assert nearest_chunks(chunks_of(stream_of([1, 2, 3]), 3, 3), none, 2).tolist() == [[-1, -1]]


# -- the built-in data set ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def builtin(host):
    options = ["data.dataset_type=builtin_retro", "data.corpus_bytes=300000", "data.seq_length=64"]
    config = load_config(overrides=[*SMALL, *options, *shaped(16)], host=host).config
    tokenizer = build_tokenizer(config, host)
    return {split: build_datasets(config, tokenizer, split, host)[split] for split in ("train", "valid")}


@pytest.mark.slow
def test_built_in_samples(builtin) -> None:
    for dataset in builtin.values():
        sample = dataset[0]
        assert sample["tokens"].shape == sample["labels"].shape == (64,)
        assert sample["neighbor_tokens"].shape == sample["neighbor_mask"].shape == (4, 2, 32)
        assert (sample["labels"][:-1] == sample["tokens"][1:]).all()
        assert sample["neighbor_mask"].sum() > 0
        assert not sample["neighbor_tokens"][sample["neighbor_mask"] == 0].any()


def test_neighbours_are_read_from_the_training_text_and_not_from_the_samples_own_documents(builtin) -> None:
    for split, dataset in builtin.items():
        retrieval, m = dataset.retrieval, dataset.retrieval.chunk_length
        assert retrieval.database.name.endswith("(train)")
        for index in range(20):
            item = int(dataset.order[index])
            for chunk, numbers in enumerate(retrieval.numbers[item * 4 : item * 4 + 4].tolist()):
                own = dataset.stream.sequences_at(np.array([(item * 4 + chunk) * m, (item * 4 + chunk + 1) * m - 1]))
                for rank, number in enumerate(numbers):
                    expected = retrieval.database.neighbor(number, 2 * m)
                    assert dataset[index]["neighbor_tokens"][chunk, rank].tolist() == expected.tolist()
                    reached = retrieval.database.stream.sequences_at(np.arange(number * m, number * m + 2 * m))
                    assert split == "valid" or not set(range(own[0], own[1] + 1)) & set(reached.tolist())


def test_neighbours_help_more_than_chance(builtin) -> None:
    """A neighbour has more of its chunk's words than a chunk of anywhere."""
    dataset = builtin["valid"]
    m = dataset.retrieval.chunk_length

    def common(shift: int) -> float:
        total = 0
        for index in range(20):
            sample = dataset[index]
            for chunk in range(4):
                own = sample["tokens"][chunk * m : chunk * m + m].tolist()
                other = dataset[(index + shift) % 20]["neighbor_tokens"][chunk, 0, :m].tolist()
                trigrams = [{tuple(t[i : i + 3]) for i in range(m - 2)} for t in (own, other)]
                total += len(trigrams[0] & trigrams[1])
        return total

    assert common(0) > 2 * common(7)


# -- files --------------------------------------------------------------------------------------------


def write(prefix: Path, documents: list[list[int]]) -> str:
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for document in documents:
            writer.add_sequence(np.array(document, np.uint16))
            writer.end_document()
        writer.finish()
    return str(prefix)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A text of 41 tokens with 10 chunks of 4, a database of 10 tokens with 2 whole chunks and a half."""
    np.save(tmp_path / "near.npy", np.arange(30, dtype=np.int32).reshape(10, 3) % 3)
    return {
        "data_path": write(tmp_path / "text", [list(range(20)), list(range(20, 41))]),
        "retro_database_path": write(tmp_path / "base", [list(range(100, 107)), list(range(107, 110))]),
        "retro_neighbors_path": str(tmp_path / "near.npy"),
    }


def build(host, files: dict[str, str], *options: str, split: str = "train"):
    named = [f"data.{key}={value}" for key, value in files.items()]
    tokens = ["tokenizer.tokenizer_type=NullTokenizer", "tokenizer.vocab_size=200"]
    base = [*SMALL, "data.dataset_type=retro", "data.seq_length=8", *shaped(4), *tokens, "data.split=100,0,0"]
    config = load_config(overrides=[*base, *named, *options], host=host).config
    return build_datasets(config, build_tokenizer(config, host), split, host)


def test_samples_from_files_by_hand(host, files) -> None:
    dataset = build(host, files)["train"]
    item = int(dataset.order[0])
    sample = dataset[0]
    assert sample["tokens"].tolist() == list(range(8 * item, 8 * item + 8))
    assert sample["labels"].tolist() == list(range(8 * item + 1, 8 * item + 9))
    numbers = (np.arange(30).reshape(10, 3) % 3)[2 * item : 2 * item + 2, :2]
    for chunk in range(2):
        for rank in range(2):
            expected = list(range(100 + 4 * numbers[chunk, rank], min(100 + 4 * numbers[chunk, rank] + 8, 110)))
            tokens, mask = sample["neighbor_tokens"][chunk, rank], sample["neighbor_mask"][chunk, rank]
            assert tokens.tolist() == expected + [0] * (8 - len(expected))
            assert mask.sum() == len(expected)
    assert sorted(dataset.order[:5].tolist()) == [0, 1, 2, 3, 4]
    assert dataset.describe(0).endswith(f"tokens {8 * item}..{8 * item + 7} of the file")


def test_each_epoch_has_every_sample_once_in_its_own_order(host, files) -> None:
    order = build(host, files, "train.train_iters=12", "train.micro_batch_size=2")["train"].order.tolist()
    epochs = [order[start : start + 5] for start in range(0, len(order), 5)]
    assert len(epochs) == 5
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_minus_one_is_no_neighbour(host, files, tmp_path) -> None:
    np.save(tmp_path / "none.npy", np.full((10, 2), -1))
    sample = build(host, files | {"retro_neighbors_path": str(tmp_path / "none.npy")})["train"][0]
    assert not sample["neighbor_mask"].any()
    assert not sample["neighbor_tokens"].any()


def test_splits_are_cut_between_samples(host, files) -> None:
    options = ["data.split=60,40,0"]
    train, valid = (
        set(build(host, files, *options, split=split)[split].order.tolist()) for split in ("train", "valid")
    )
    assert (train, valid) == ({0, 1, 2}, {3, 4})
    assert build(host, files, split="valid") == {}


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((9, 2), np.int64), "has 9 rows, and data.data_path has 10 whole chunks"),
        (np.zeros((10, 1), np.int64), "has 1 neighbours of each chunk, fewer than data.retro_num_neighbors=2"),
        (np.zeros((10, 2), np.float32), r"holds float32 \[10, 2\]; it must be int32 or int64"),
        (np.zeros(10, np.int64), r"holds int64 \[10\]; it must be"),
        (np.full((10, 2), 3), "has the neighbour 3, and the database .* has 3 chunks of data.retro_chunk_length=4"),
        (np.array([[{}, {}]] * 10), "no readable .npy file"),
    ],
)
def test_neighbours_that_do_not_fit(host, files, tmp_path, array, words) -> None:
    np.save(tmp_path / "wrong.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=words):
        build(host, files | {"retro_neighbors_path": str(tmp_path / "wrong.npy")})["train"][0]


def test_files_that_are_missing(host, files, tmp_path) -> None:
    with pytest.raises(ConfigError, match='"retro" needs data.retro_neighbors_path; docs/models/retro.md has the form'):
        build(host, {"data_path": files["data_path"]})
    with pytest.raises(DataError, match="gone.npy is no readable .npy file: No such file"):
        build(host, files | {"retro_neighbors_path": str(tmp_path / "gone.npy")})
    (tmp_path / "text.npy").write_bytes(b"a text")
    with pytest.raises(DataError, match="text.npy is no readable .npy file: it is damaged or in another format; name"):
        build(host, files | {"retro_neighbors_path": str(tmp_path / "text.npy")})
    with pytest.raises(DataError, match="has no sample of data.seq_length=64"):
        build(host, files, "data.seq_length=64")


def test_ids_that_the_tokenizer_does_not_have(host, files) -> None:
    with pytest.raises(DataError, match="of the database .* has the id 100, and the tokenizer has 50 ids"):
        build(host, files, "tokenizer.vocab_size=50")["train"][0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["data.seq_length=60"], "data.seq_length=60 is not a multiple of data.retro_chunk_length=16"),
        (["data.seq_length=64", "data.reset_position_ids=true"], "data.reset_position_ids=true keeps documents apart"),
    ],
)
def test_options_that_contradict(host, options, words) -> None:
    base = ["model.family=gpt", *SMALL[1:5], "train.train_iters=1"]
    data = ["data.dataset_type=builtin_retro", "data.retro_chunk_length=16"]
    with pytest.raises(ConfigError, match=words):
        load_config(overrides=[*base, *data, *options], host=host)


def test_the_pages_example_makes_neighbours_that_the_data_set_takes(host, tmp_path, monkeypatch) -> None:
    """The Python block of docs/models/retro.md, run on a small corpus in the current folder."""
    monkeypatch.chdir(tmp_path)
    random = np.random.RandomState(0)
    write(Path("corpus_text_document"), random.randint(0, 9, (6, 200)).tolist())
    page = (Path(__file__).parents[2] / "docs/models/retro.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    exec(compile(code, "docs/models/retro.md", "exec"), {})
    named = {"data_path": "corpus_text_document", "retro_neighbors_path": "neighbors.npy"}
    sample = build(host, named, "data.seq_length=128", *shaped(64))["train"][0]
    assert sample["neighbor_tokens"].shape == (2, 2, 128)
    assert sample["neighbor_mask"].any()
