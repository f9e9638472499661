"""Damage inside `.bin` and `.idx` that only checksums find, at the moment it would reach a model."""

from __future__ import annotations

import base64
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_core.errors import DataError
from mt_core.interfaces import SplitRequest
from mt_core.plugins import load_plugins
from mt_core.specs import DATASETS, TOKENIZERS
from mt_data.indexed import IndexedDataset, IndexedDatasetWriter, verify
from mt_data.indexed.manifest import BLOCK_BYTES, BlockChecksummer, manifest_path

SEQUENCES = 20
LENGTH = 5000
"""Tokens of two bytes: a block ends within a sequence."""


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """100,000 tokens in 4 blocks, the last of them not full."""
    name = str(tmp_path / "data")
    with IndexedDatasetWriter(name, np.uint16) as writer:
        for number in range(SEQUENCES):
            writer.add_document(np.arange(number * LENGTH, (number + 1) * LENGTH) % 60000, [LENGTH])
        writer.finish()
    return name


def erase(prefix: str, offset: int) -> None:
    """What a file system leaves of a page that it lost."""
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(offset)
        file.write(bytes(64))


@pytest.mark.parametrize("sizes", [[], [1], [BLOCK_BYTES], [3 * BLOCK_BYTES + 5], [7, BLOCK_BYTES - 7, 0, 1, 200_000]])
def test_checksums_do_not_depend_on_the_pieces(sizes: list[int]) -> None:
    data = np.random.default_rng(len(sizes)).bytes(sum(sizes))
    summer, start = BlockChecksummer(), 0
    for size in sizes:
        summer.update(memoryview(data)[start : start + size])
        start += size
    expected = [zlib.crc32(data[begin : begin + BLOCK_BYTES]) for begin in range(0, len(data), BLOCK_BYTES)]
    assert summer.record().values("manifest", len(data)).tolist() == expected


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("use", ["get", "read"])
def test_a_damaged_block_is_found_at_its_first_use(prefix: str, mmap: bool, use: str) -> None:
    erase(prefix, BLOCK_BYTES + 100)
    data = IndexedDataset(prefix, mmap=mmap, verify_checksums=True)
    assert getattr(data, use)(0).tolist() == list(range(LENGTH))  # another block
    with pytest.raises(DataError, match=r"data\.bin is damaged: bytes 65536 to 131071 do not .*data.verify_checksums"):
        getattr(data, use)(BLOCK_BYTES // (2 * LENGTH))
    with pytest.raises(DataError, match="bytes 65536 to 131071"):  # also the next time
        getattr(data, use)(BLOCK_BYTES // (2 * LENGTH))
    assert IndexedDataset(prefix, mmap=mmap)[6].tolist().count(0) > 1


def test_all_tokens_are_what_was_written(prefix: str) -> None:
    checked = pickle.loads(pickle.dumps(IndexedDataset(prefix, verify_checksums=True)))
    tokens = np.concatenate([checked.read(number) for number in range(SEQUENCES)])
    assert np.array_equal(tokens, np.arange(SEQUENCES * LENGTH) % 60000)
    assert checked.read(SEQUENCES - 1, LENGTH, 0).tolist() == []


def test_each_block_is_read_whole_once(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mt_data.indexed.storage import PlainFile

    asked: list[tuple[int, int]] = []
    read = PlainFile.read

    def counting(self: PlainFile, offset: int, count: int) -> memoryview | bytes:
        if self.path.endswith(".bin"):
            asked.append((offset, count))
        return read(self, offset, count)

    monkeypatch.setattr(PlainFile, "read", counting)
    data = IndexedDataset(prefix, mmap=False, verify_checksums=True)
    data.read(0, 0, 10)
    data.read(0, 10, 10)
    assert asked == [(0, BLOCK_BYTES), (20, 20)]


def test_files_without_recorded_checksums_are_read(prefix: str) -> None:
    path = Path(manifest_path(prefix))
    manifest = IndexedDataset(prefix).manifest()
    assert manifest is not None
    path.write_bytes(manifest.model_copy(update={"bin_blocks": None}).to_json())  # as an older release wrote it
    assert IndexedDataset(prefix, verify_checksums=True).read(1)[0] == LENGTH
    path.unlink()  # as Megatron
    assert IndexedDataset(prefix, verify_checksums=True).read(1)[0] == LENGTH


def test_checksums_of_another_file_are_refused(prefix: str) -> None:
    manifest = IndexedDataset(prefix).manifest()
    assert manifest is not None
    assert manifest.bin_blocks is not None
    short = base64.b64encode(bytes(8)).decode()
    blocks = manifest.bin_blocks.model_copy(update={"checksums": short})
    Path(manifest_path(prefix)).write_bytes(manifest.model_copy(update={"bin_blocks": blocks}).to_json())
    with pytest.raises(DataError, match=r"manifest\.json: 2 checksums of 65536 bytes do not fit 200000 bytes"):
        IndexedDataset(prefix, verify_checksums=True).read(0)


def test_the_fingerprint_is_of_the_index_that_was_read(prefix: str) -> None:
    whole = IndexedDataset(prefix, verify_checksums=True).fingerprint()
    assert whole == IndexedDataset(prefix).fingerprint()
    index = Path(f"{prefix}.idx")
    content = bytearray(index.read_bytes())
    content[-16] = 3  # a document begins elsewhere
    index.write_bytes(content)
    with pytest.raises(DataError, match=r"data\.idx is damaged: its SHA-256 is .*manifest\.json says"):
        IndexedDataset(prefix, verify_checksums=True).fingerprint()
    assert not verify(prefix).ok


def build(prefix: str, **keys: Any) -> Any:
    host = load_plugins()
    spec, tokenizer = host[DATASETS].get("gpt"), host[TOKENIZERS].get("NullTokenizer")
    config = spec.config_type.load()(data_path=[prefix], split="1,0,0", seq_length=512, **keys)
    null = tokenizer.build.load()(tokenizer.config_type.load()(vocab_size=60001))
    return spec.build.load()(config, null, SplitRequest("train", None, 512, 1))


def test_a_damaged_block_does_not_reach_training(prefix: str) -> None:
    erase(prefix, 2 * BLOCK_BYTES)
    dataset = build(prefix)
    with pytest.raises(DataError, match=r"data\.bin is damaged: bytes 131072 to 196607"):
        list(map(dataset.__getitem__, range(len(dataset))))
    unchecked = build(prefix, verify_checksums=False)
    assert sum(int((unchecked[number]["tokens"] == 0).sum()) for number in range(len(unchecked))) > 30
