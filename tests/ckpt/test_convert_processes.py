"""`--nproc`: several processes write the bytes that one writes; their errors and exits are reported."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.ckpt.convert_cases import LLAMA, MODELS
from tests.ckpt.test_convert_engine import Killed, shards_of
from tests.covering import EXHAUSTIVE

from mt_ckpt.convert import convert
from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.native.read import open_checkpoint
from mt_ckpt.native.save import save_checkpoint
from mt_ckpt.writing.file_plans import SafetensorsFiles, _groups
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import CheckpointError, ConfigError

IN_SHARDS = ConvertOptions(max_shard_size=60_000)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_write_what_one_writes(make_model, host, tmp_path: Path, monkeypatch) -> None:
    """An MoE model, whose experts become many tensors of one: none is read twice. The first process writes until the
    other one has started."""
    source, reported, here = make_model(dtype=torch.bfloat16, **MODELS["qwen_moe"]), [], []
    write = SafetensorsFiles.write
    monkeypatch.setattr(SafetensorsFiles, "write", lambda *given: here.append(given) or write(*given))
    for nproc in (1, 2):
        here.clear()
        report = convert(
            source,
            tmp_path / str(nproc),
            saver="hf",
            options=IN_SHARDS,
            nproc=nproc,
            host=host,
            progress=lambda done, total: reported.append((done, total)),
        )
    assert contents(tmp_path / "2") == contents(tmp_path / "1")
    assert len(shards_of(tmp_path / "1")) > 1
    once, twice = reported[: len(reported) // 2], reported[len(reported) // 2 :]
    assert once[-1] == twice[-1] == (report.num_bytes, report.num_bytes)
    assert [done for done, _ in twice] == sorted(done for done, _ in twice)
    assert here  # workers are other processes, in which nothing is replaced


MEGATRON = {
    "megatron": ConvertOptions(target_tensor_parallel_size=2, target_pipeline_parallel_size=2),
    "megatron-dist": ConvertOptions(max_shard_size=60_000),
    "megatron-legacy": ConvertOptions(target_tensor_parallel_size=2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    # Files of ranks under old names are divided by the code of "megatron".
    "saver",
    ["megatron", "megatron-dist", pytest.param("megatron-legacy", marks=EXHAUSTIVE)],
)
@pytest.mark.usefixtures("forked_workers")
def test_files_for_megatron_are_divided_over_processes(make_model, host, tmp_path: Path, saver: str) -> None:
    """Each by one process: the same bytes, and a tensor is counted once, though several processes read it."""
    source, reported = make_model(**{**LLAMA, "num_layers": 4}), []
    for nproc in (1, 2):
        report = convert(
            source,
            tmp_path / str(nproc),
            saver=saver,
            options=MEGATRON[saver],
            nproc=nproc,
            host=host,
            progress=lambda done, total: reported.append((done, total)),
        )
    once = contents(tmp_path / "1")
    assert sum(name.endswith((".pt", ".distcp")) for name in once) > 1
    assert contents(tmp_path / "2") == once
    assert reported[-1] == (report.num_bytes, report.num_bytes)


@pytest.mark.long
@pytest.mark.slow
def test_killed_and_gone_on_with(make_model, host, kit, tmp_path: Path) -> None:
    """The files that were finished are kept, and nobody goes on writing after the first process has ended."""
    source, target = make_model(**LLAMA), tmp_path / "target"

    def run(progress=lambda done, total: None, nproc: int = 2, target: Path = target) -> None:
        convert(source, target, saver="mt", options=IN_SHARDS, nproc=nproc, host=host, progress=progress)

    run(nproc=1, target=tmp_path / "once")
    assert kit.in_child(lambda: run(Killed(19))) == -signal.SIGKILL
    folder = tmp_path / ".mt-convert-target"
    kept = {name for name in shards_of(folder) if f'"name": "{name}"' in (folder / "record.jsonl").read_text()}
    before = shards_of(folder)
    run()
    after = shards_of(target)
    assert kept
    assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    assert contents(target) == contents(tmp_path / "once")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_an_error_of_a_process_is_the_conversions(make_model, host, tmp_path: Path) -> None:
    reader = open_checkpoint(make_model(**LLAMA))
    tensors = {name: reader.read(name) for name in reader.shapes()}
    tensors["model.decoder.layers.2.mlp.linear_fc2.weight"][0, 0] = 1e6
    save_checkpoint(tmp_path / "large", tensors.items(), dict(reader.metadata), {})
    with pytest.raises(
        CheckpointError, match=r"layers.2.mlp.linear_fc2.weight: holds 1e\+06, which torch.float16 cannot"
    ):
        convert(
            tmp_path / "large", tmp_path / "x", saver="hf", options=ConvertOptions(dtype="fp16"), nproc=2, host=host
        )
    assert not (tmp_path / "x").exists()
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_process_that_is_killed_is_reported(make_model, host, tmp_path: Path) -> None:
    def kill_one(done: int, total: int) -> None:
        for child in multiprocessing.active_children()[:1]:
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(CheckpointError, match="a process of --nproc ended with signal 9 while it wrote model"):
        convert(make_model(**LLAMA), tmp_path / "x", saver="hf", nproc=2, host=host, progress=kill_one)
    assert multiprocessing.active_children() == []


def test_refusals(make_model, host, tmp_path: Path) -> None:
    source = make_model(**LLAMA)
    with pytest.raises(ConfigError, match="--nproc 2: one process writes the format trtllm; leave it out"):
        convert(source, tmp_path / "x", saver="trtllm", nproc=2, host=host)
    with pytest.raises(ConfigError, match="--nproc 0: at least one process has to write"):
        convert(source, tmp_path / "x", saver="hf", nproc=0, host=host)


def test_no_process_is_started_to_rehearse(make_model, host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_ckpt.convert.workers.Workers.write", None)
    convert(make_model(**LLAMA), tmp_path / "x", saver="hf", nproc=2, host=host, dry_run=True)


def test_what_is_made_of_one_tensor_stays_together() -> None:
    infos = {name: TensorInfo((4,), torch.float32) for name in ("a.0", "a.1", "a.2", "b.0", "c.0", "c.1")}
    groups = list(_groups(infos, lambda name: name[0], 32))
    assert groups == [("a.0", "a.1", "a.2"), ("b.0", "c.0", "c.1")]
    assert list(_groups({}, lambda name: name, 32)) == []
