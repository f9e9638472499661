"""Conversions into object stores and from them: file after file, a checkpoint only when all are there."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from tests.ckpt.conftest import assert_same_state, tensors_of
from tests.ckpt.convert_cases import GPT2, LLAMA
from typer.testing import CliRunner

from mt_ckpt.commands.convert import convert as convert_command
from mt_ckpt.convert import convert
from mt_ckpt.files.checksum_file import CHECKSUMS, find_changes, read_checksums
from mt_ckpt.native import read as native
from mt_ckpt.writing.output_folders import REMOTE_RECORD
from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import CheckpointError, ConfigError
from mt_core.paths import as_path

IN_SHARDS = ConvertOptions(max_shard_size=20_000)
MARKER = {"mt": "manifest.json", "hf": "model.safetensors.index.json"}
"""The file that comes last."""


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """An address where nothing is yet."""
    folder = as_path(f"memory://{uuid.uuid4()}" if request.param == "memory" else f"file://{tmp_path}/bucket")
    yield folder / "run" / "a"
    if folder.exists():
        folder.fs.rm(folder.path, recursive=True)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's temporary directory, where files are made before they are sent."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


class Sent:
    """Counts what the stores are sent; from file number `broken` on they refuse."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
        self.names: list[str] = []
        self.broken: int | None = None
        self.largest_staging = 0
        self._temporary = temporary
        for kind in (MemoryFileSystem, LocalFileSystem):
            monkeypatch.setattr(kind, "put_file", self._counted(kind.put_file))

    def _counted(self, send: Any) -> Any:
        def put_file(fs: Any, local: str, remote: str, *args: Any, **keys: Any) -> None:
            staged = [file for file in self._temporary.rglob("*") if file.is_file()]
            self.largest_staging = max(self.largest_staging, len(staged))
            if len(self.names) == self.broken:
                raise OSError(5, "the store is out of order")
            send(fs, local, remote, *args, **keys)
            self.names.append(remote.rpartition("/")[2])

        return put_file


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> Sent:
    return Sent(monkeypatch, temporary)


def names_in(folder: Any) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.parametrize("saver", ["mt", "hf"])
def test_there_and_back(make_model, host, tmp_path: Path, temporary: Path, sent: Sent, store, saver: str) -> None:
    source = make_model(**LLAMA)
    report = convert(source, str(store), saver=saver, options=IN_SHARDS, verify=True, host=host)
    assert report.verification is not None
    shards = {name for name in names_in(store) if name.endswith(".safetensors")}
    assert len(shards) > 3
    assert sorted(sent.names) == sorted(shards)
    assert sent.largest_staging == 1  # a shard at a time, whatever the model's size
    assert not list(temporary.iterdir())
    assert REMOTE_RECORD not in names_in(store)
    checksums = read_checksums(store)
    assert (checksums is None) == (saver == "mt")  # which has its own
    if checksums is not None:
        assert {*checksums.files, CHECKSUMS} == names_in(store)
        assert find_changes(checksums) == []
    assert_same_state(tensors_of(open_checkpoint(store, host)), tensors_of(native.open_checkpoint(source)))
    convert(str(store), tmp_path / "back", saver="mt", host=host)
    assert_same_state(tensors_of(native.open_checkpoint(tmp_path / "back")), tensors_of(native.open_checkpoint(source)))


@pytest.mark.parametrize("saver", ["mt", "hf"])
def test_what_was_interrupted_is_no_checkpoint_and_is_gone_on_with(
    make_model, host, sent: Sent, store, saver: str
) -> None:
    source = make_model(**LLAMA)
    sent.broken = 2
    with pytest.raises(CheckpointError, match=r"not written: the store is out of order.*run the same command again"):
        convert(source, str(store), saver=saver, options=IN_SHARDS, host=host)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        open_checkpoint(store, host)
    assert len(names_in(store)) == 3
    sent.broken, before = None, list(sent.names)
    convert(source, str(store), saver=saver, options=IN_SHARDS, host=host)
    assert not set(before) & set(sent.names[len(before) :])
    assert_same_state(tensors_of(open_checkpoint(store, host)), tensors_of(native.open_checkpoint(source)))


@pytest.mark.parametrize("saver", ["mt", "hf"])
def test_the_file_that_makes_it_a_checkpoint_comes_last(make_model, host, monkeypatch, store, saver: str) -> None:
    source = make_model(**LLAMA)
    order: list[str] = []
    write_bytes = type(store).write_bytes

    def recorded(path: Any, data: bytes, **keys: Any) -> Any:
        order.append(path.name)
        return write_bytes(path, data, **keys)

    monkeypatch.setattr(type(store), "write_bytes", recorded)
    convert(source, str(store), saver=saver, options=IN_SHARDS, host=host)
    assert order[-1] == MARKER[saver]
    assert REMOTE_RECORD in order


def test_other_work_begins_anew(make_model, host, sent: Sent, store) -> None:
    first, second = make_model("first", iteration=1, **LLAMA), make_model("second", iteration=2, **LLAMA)
    sent.broken = 2
    with pytest.raises(CheckpointError, match="out of order"):
        convert(first, str(store), saver="hf", options=IN_SHARDS, host=host)
    sent.broken = None
    convert(second, str(store), saver="hf", options=ConvertOptions(max_shard_size=30_000), host=host)
    assert_same_state(tensors_of(open_checkpoint(store, host)), tensors_of(native.open_checkpoint(second)))
    listed = {name for name in names_in(store) if name.endswith(".safetensors")}
    assert len({name.rpartition("-of-")[2] for name in listed}) == 1  # none of the first attempt


def test_a_file_that_was_lost_is_sent_again(make_model, host, sent: Sent, store) -> None:
    source = make_model(**LLAMA)
    sent.broken = 2
    with pytest.raises(CheckpointError, match="out of order"):
        convert(source, str(store), saver="mt", options=IN_SHARDS, host=host)
    sent.broken = None
    (store / sent.names[0]).unlink()
    (store / sent.names[1]).write_bytes(b"short")
    convert(source, str(store), saver="mt", options=IN_SHARDS, host=host)
    assert_same_state(tensors_of(open_checkpoint(store, host)), tensors_of(native.open_checkpoint(source)))


def test_a_place_that_is_taken(make_model, host, store) -> None:
    source = make_model(**LLAMA)
    store.mkdir(parents=True)
    (store / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="exists; converting replaces nothing"):
        convert(source, str(store), saver="mt", host=host)
    with pytest.raises(CheckpointError, match="exists; converting replaces nothing"):
        convert(source, str(store / "mine.txt"), saver="mt", host=host)
    assert (store / "mine.txt").read_text() == "keep"
    assert names_in(store) == {"mine.txt"}


@pytest.mark.parametrize("saver", ["trtllm", "transformers-megatron", "megatron", "megatron-dist", "megatron-legacy"])
def test_formats_for_disks(make_model, host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saver: str) -> None:
    source = make_model(**GPT2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"--save-dir memory://x/y: --saver {saver} writes local folders; copy the"):
        convert(source, "memory://x/y", saver=saver, host=host)
    assert names_in(tmp_path) == {"source"}


def test_pickled_files_are_read_from_disks(make_model, host, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    convert(make_model(**LLAMA), tmp_path / "hf", saver="hf", host=host)
    (tmp_path / "hf" / "mt-checksums.json").unlink()  # its files are replaced
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.save(model.state_dict(), tmp_path / "hf" / "pytorch_model.bin")
    (tmp_path / "hf" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: files of torch.save are read from disks only"):
        convert(f"file://{tmp_path}/hf", tmp_path / "mt", saver="mt", host=host)


def test_the_command(make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host, store) -> None:
    """An address makes no local folder of that name."""
    import typer

    app = typer.Typer()
    app.command()(convert_command)
    source = make_model(**LLAMA)
    monkeypatch.chdir(tmp_path)
    before = names_in(tmp_path)
    result = CliRunner().invoke(app, ["--load-dir", str(source), "--save-dir", str(store), "--saver", "hf", "--verify"])
    assert result.exit_code == 0, result.exception
    assert f"{store}: written as hf" in result.output.replace("\n", "")
    assert names_in(tmp_path) - before <= {"bucket"}
    assert_same_state(tensors_of(open_checkpoint(store, host)), tensors_of(native.open_checkpoint(source)))
