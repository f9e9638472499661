"""The engine: going on after a kill, rehearsing, refusing, noticing what a saver loses, verifying."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ckpt.conftest import assert_same_state, tensors_of
from tests.ckpt.convert_cases import GPT2, LLAMA
from tests.covering import covering

from mt_ckpt.convert import convert
from mt_ckpt.files.checksum import checksum
from mt_ckpt.native.read import open_checkpoint
from mt_ckpt.writing.resumable import ResumableFolder
from mt_core.checkpoint_lookup import open_with
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, CHECKPOINT_SAVERS, CheckpointSaverSpec, ConvertOptions
from mt_core.errors import CheckpointError, ConfigError, PluginError
from mt_core.kinds import Lazy
from mt_core.plugins import Plugin, load_plugins

SMALL_SHARDS = ConvertOptions(max_shard_size=15_000)


class Killed:
    """Kills the process when so many tensors have been read."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, done: int, total: int) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def count_reads() -> tuple[list[int], object]:
    reads: list[int] = []
    return reads, lambda done, total: reads.append(done)


def shards_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("saver", ["megatron", "megatron-legacy", "transformers-megatron"])
def test_killed_between_the_files_of_ranks(make_model, host, kit, tmp_path: Path, saver: str, cut: int) -> None:
    """The second run gives the same bits, in files that `--loader` reads, as one that was never killed."""
    keys, target = {**GPT2, "num_layers": 4}, tmp_path / "target"
    source = make_model(**keys)
    asked = ConvertOptions(target_tensor_parallel_size=2, target_pipeline_parallel_size=2)

    def run(progress) -> None:
        convert(source, target, saver=saver, options=asked, host=host, progress=progress)

    total, progress = count_reads()
    convert(source, tmp_path / "fresh", saver=saver, options=asked, host=host, progress=progress)
    assert kit.in_child(lambda: run(Killed(len(total) * cut // 3))) == -signal.SIGKILL
    assert not target.exists()
    run(lambda done, total: None)
    assert not (tmp_path / ".mt-convert-target").exists()
    loader = host[CHECKPOINT_LOADERS].get(saver)
    found = {name: x for name, x in tensors_of(open_with(loader, target, host)).items() if name.startswith("model.")}
    assert_same_state(tensors_of(open_checkpoint(source)), found)


@pytest.mark.parametrize(("after", "saver"), covering([6, 12, 20], ["hf", "mt"]))
def test_killed_and_gone_on_with(make_model, host, kit, tmp_path: Path, saver: str, after: int) -> None:
    source, target = make_model(**LLAMA), tmp_path / "target"

    def run(progress) -> None:
        convert(source, target, saver=saver, options=SMALL_SHARDS, host=host, progress=progress)

    assert kit.in_child(lambda: run(Killed(after))) == -signal.SIGKILL
    assert not target.exists()
    begun = shards_of(tmp_path / ".mt-convert-target")
    reads, progress = count_reads()
    run(progress)
    finished = {name for name, stat in shards_of(target).items() if begun.get(name) == stat}
    assert len(finished) >= len(begun) - 1
    fresh, progress = count_reads()
    convert(source, tmp_path / "fresh", saver=saver, options=SMALL_SHARDS, host=host, progress=progress)
    assert len(reads) < len(fresh)
    assert not (tmp_path / ".mt-convert-target").exists()
    convert(target, tmp_path / "back", saver="mt", host=host)
    assert_same_state(tensors_of(open_checkpoint(source)), tensors_of(open_checkpoint(tmp_path / "back")))


def interrupt(source: Path, target: Path, host, kit, after: int = 15) -> Path:
    """A conversion to hf killed in its middle; the folder that it left."""

    def run() -> None:
        convert(source, target, saver="hf", options=SMALL_SHARDS, host=host, progress=Killed(after))

    assert kit.in_child(run) == -signal.SIGKILL
    return target.with_name(f".mt-convert-{target.name}")


def test_a_damaged_finished_file_is_written_again(make_model, host, kit, tmp_path: Path) -> None:
    source, target = make_model(**LLAMA), tmp_path / "target"
    left = interrupt(source, target, host, kit)
    shard = sorted((left / "content").glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    report = convert(source, target, saver="hf", options=SMALL_SHARDS, host=host, verify=True)
    assert report.verification is not None


@pytest.mark.slow
def test_another_source_or_other_options_begin_anew(make_model, host, kit, tmp_path: Path) -> None:
    """The same shapes from another place must not be mixed with what was begun."""
    first, second = make_model("first", iteration=1, **LLAMA), make_model("second", iteration=2, **LLAMA)
    target = tmp_path / "target"
    interrupt(first, target, host, kit)
    reads, progress = count_reads()
    convert(second, target, saver="hf", options=SMALL_SHARDS, host=host, progress=progress, verify=True)
    assert len(reads) >= 21
    again = tmp_path / "again"
    interrupt(first, again, host, kit)
    convert(first, again, saver="hf", options=replace(SMALL_SHARDS, dtype="bf16"), host=host, verify=True)


def test_a_half_written_line_of_the_record(make_model, host, kit, tmp_path: Path) -> None:
    source, target = make_model(**LLAMA), tmp_path / "target"
    left = interrupt(source, target, host, kit)
    with (left / "record.jsonl").open("a") as stream:
        stream.write('{"name": "model-00003-of')
    interrupt(source, target, host, kit, after=4)
    entries = [json.loads(line) for line in (left / "record.jsonl").read_text().splitlines()]
    assert len(entries) > 2
    convert(source, target, saver="hf", options=SMALL_SHARDS, host=host, verify=True)


@pytest.mark.parametrize("call", ["io.open", "os.fsync", "os.replace"])
def test_a_kill_while_the_record_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Where a file is opened for writing, synced or renamed."""
    begun = ResumableFolder(tmp_path / "target", "key")
    (begun.content / "a").write_bytes(b"abc")
    begun.finish("a", [(3, checksum(b"abc"))], {"shapes": 1})
    begun.close()
    module, _, name = call.partition(".")
    real = getattr(sys.modules[module], name)

    def killed(*args: Any, **kwargs: Any) -> Any:
        if call == "io.open" and args[1] == "r":
            return real(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(call, killed)
    with pytest.raises(KeyboardInterrupt):
        ResumableFolder(tmp_path / "target", "key")
    monkeypatch.undo()
    resumed = ResumableFolder(tmp_path / "target", "key")
    assert resumed.finished("a") == {"shapes": 1}
    resumed.close()


def test_two_processes_at_one_place(make_model, host, tmp_path: Path) -> None:
    source, target = make_model(**LLAMA), tmp_path / "target"
    errors = []

    def second(done: int, total: int) -> None:
        if not errors:
            with pytest.raises(CheckpointError) as caught:
                convert(source, target, saver="hf", host=host)
            errors.append(str(caught.value))

    convert(source, target, saver="hf", host=host, progress=second)
    assert "another process is converting to the same place" in errors[0]


def test_dry_run_checks_and_writes_nothing(make_model, host, tmp_path: Path) -> None:
    source = make_model(**LLAMA)
    before = sorted(tmp_path.iterdir())
    report = convert(source, tmp_path / "target", saver="hf", dry_run=True, host=host)
    assert (report.family, report.num_tensors) == ("llama", 21)
    assert report.num_bytes == 4 * report.num_parameters
    with pytest.raises(ConfigError, match="transformers-megatron holds GPT-2 only"):
        convert(source, tmp_path / "target", saver="transformers-megatron", dry_run=True, host=host)
    assert sorted(tmp_path.iterdir()) == before


def test_progress_ends_with_all_bytes(make_model, host, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = convert(
        make_model(optimizer=True, **LLAMA), tmp_path / "hf", saver="hf", host=host, progress=lambda *x: calls.append(x)
    )
    assert calls[-1] == (report.num_bytes, report.num_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (ConvertOptions(target_tensor_parallel_size=2), "--target-tensor-parallel-size 2"),
        (ConvertOptions(target_pipeline_parallel_size=2), "--target-pipeline-parallel-size 2"),
        (ConvertOptions(target_virtual_pipeline_parallel_size=2), "--target-virtual-pipeline-parallel-size 2"),
        (ConvertOptions(target_expert_parallel_size=2), "--target-expert-parallel-size 2"),
        (ConvertOptions(target_expert_tensor_parallel_size=1), "--target-expert-tensor-parallel-size 1"),
        (ConvertOptions(make_vocab_size_divisible_by=64), "--make-vocab-size-divisible-by 64"),
    ],
)
@pytest.mark.parametrize("saver", ["hf", "mt"])
def test_options_that_mean_nothing(make_model, host, tmp_path: Path, saver: str, options, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} means nothing to the format {saver}"):
        convert(make_model(**LLAMA), tmp_path / "target", saver=saver, options=options, host=host)
    assert not (tmp_path / "target").exists()


def test_names_and_places(make_model, host, tmp_path: Path) -> None:
    source = make_model(**LLAMA)
    with pytest.raises(PluginError, match=r"--saver=hugging .* installed plugins register .*hf"):
        convert(source, tmp_path / "x", saver="hugging", host=host)
    with pytest.raises(PluginError, match="--loader=safetensors"):
        convert(source, tmp_path / "x", loader="safetensors", saver="hf", host=host)
    with pytest.raises(PluginError, match="--verify after --saver trtllm"):
        convert(source, tmp_path / "x", saver="trtllm", verify=True, host=host)
    with pytest.raises(CheckpointError, match="none: no such file or directory"):
        convert(tmp_path / "none", tmp_path / "x", saver="hf", host=host)
    with pytest.raises(ConfigError, match="--dtype int8: not a dtype of weights; it can be fp32, bf16, fp16"):
        convert(source, tmp_path / "x", saver="hf", options=ConvertOptions(dtype="int8"), host=host)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose")
    with pytest.raises(CheckpointError, match=r"mine: exists; converting replaces nothing"):
        convert(source, tmp_path / "mine", saver="hf", host=host)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_granularity_is_that_of_experts(make_model, host, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--granularity 2 .* --upcycle-experts .*; give that too, or leave it out"):
        convert(make_model(**LLAMA), tmp_path / "x", saver="mt", options=ConvertOptions(granularity=2), host=host)
    assert not (tmp_path / "x").exists()


def test_a_value_that_the_number_format_cannot_hold(make_model, host, tmp_path: Path) -> None:
    from mt_ckpt.native.save import save_checkpoint

    reader = open_checkpoint(make_model(**LLAMA))
    state = tensors_of(reader)
    state["model.decoder.final_layernorm.weight"][3] = 70_000.0
    save_checkpoint(tmp_path / "large", state.items(), reader.metadata, {})
    with pytest.raises(CheckpointError, match=r"final_layernorm.weight: holds 70000, which torch.float16 cannot"):
        convert(tmp_path / "large", tmp_path / "x", saver="hf", options=ConvertOptions(dtype="fp16"), host=host)


def test_a_damaged_source_is_named(make_model, host, tmp_path: Path) -> None:
    source = make_model(**LLAMA)
    shard = next(source.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{shard.name}: damaged: the checksum of tensor model"):
        convert(source, tmp_path / "x", saver="hf", host=host)
    assert not (tmp_path / "x").exists()


def test_a_source_that_is_not_its_configuration(make_model, host, tmp_path: Path) -> None:
    from mt_ckpt.native.save import save_checkpoint

    reader = open_checkpoint(make_model(**LLAMA))
    state = tensors_of(reader)
    state["model.surplus"] = torch.zeros(2)
    del state["model.decoder.layers.1.mlp.linear_fc1.weight"]
    save_checkpoint(tmp_path / "other", state.items(), reader.metadata, {})
    with pytest.raises(
        CheckpointError, match=r"layers.1.mlp.linear_fc1.weight is missing; surplus is in the checkpoint"
    ):
        convert(tmp_path / "other", tmp_path / "x", saver="hf", host=host)
    save_checkpoint(tmp_path / "bare", state.items(), {"iteration": 1}, {})
    with pytest.raises(CheckpointError, match=r"no config.model.family"):
        convert(tmp_path / "bare", tmp_path / "x", saver="hf", host=host)


# -- other people's savers --------------------------------------------------------------------------


def write_all(path, source, options, host) -> None:
    path.mkdir()
    for name in source.shapes():
        (path / name).write_bytes(source.read(name).numpy().tobytes())


def write_some(path, source, options, host) -> None:
    path.mkdir()
    for name in list(source.shapes())[:-2]:
        source.read(name)


def write_damaged(path, source, options, host) -> None:
    """mt's own format, with one bit of one weight changed."""
    from mt_ckpt.native.save import save_checkpoint

    state = tensors_of(source)
    state["model.decoder.layers.2.mlp.linear_fc2.weight"].view(torch.int32)[1, 2] ^= 1
    save_checkpoint(path, state.items(), source.metadata, {})


def write_other_settings(path, source, options, host) -> None:
    """mt's own format; every weight is right, and the model computes something else."""
    from mt_ckpt.native.save import save_checkpoint

    config = {**source.metadata["config"]}
    config["model"] = {**config["model"], "rotary_base": 500.0}
    save_checkpoint(path, tensors_of(source).items(), {**source.metadata, "config": config}, {})


def with_saver(name: str, function, monkeypatch: pytest.MonkeyPatch):
    host = load_plugins()
    monkeypatch.setattr(Lazy, "load", lambda self, load=Lazy.load: function if self.reference == "t:f" else load(self))
    spec = CheckpointSaverSpec(name=name, doc="of a test", convert=Lazy("t:f"))
    if name == "mt":  # in the place of the real one
        others = [entry for entry in host[CHECKPOINT_SAVERS].registrations if entry.spec.name != "mt"]
        host[CHECKPOINT_SAVERS].registrations[:] = others
    host[CHECKPOINT_SAVERS].registrations.append(
        replace(host[CHECKPOINT_SAVERS].registrations[0], spec=spec, plugin=Plugin("t", "t", "t", "1"))
    )
    return host


def test_a_saver_of_another_plugin(make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_model(**GPT2)
    report = convert(source, tmp_path / "x", saver="raw", host=with_saver("raw", write_all, monkeypatch))
    assert len(list((tmp_path / "x").iterdir())) == report.num_tensors


def test_a_saver_that_loses_tensors(make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"the saver raw left out .*final_layernorm"):
        convert(make_model(**GPT2), tmp_path / "x", saver="raw", host=with_saver("raw", write_some, monkeypatch))


def test_verify_names_the_tensor(make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = with_saver("mt", write_damaged, monkeypatch)
    with pytest.raises(CheckpointError, match=r"layers.2.mlp.linear_fc2.weight \(1 of \d+ bytes differ\)"):
        convert(make_model(**LLAMA), tmp_path / "x", saver="mt", verify=True, host=host)


class Broken(torch.nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        raise IndexError(f"broken at {list(tokens.shape)}")


def test_verify_lets_an_error_of_the_model_through(
    make_model, host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for a model that needs other inputs, whose outputs are not compared."""
    monkeypatch.setattr("mt_ckpt.convert.verify.build_model", lambda config, host: Broken())
    with pytest.raises(IndexError, match=r"broken at \[1, 8\]"):
        convert(make_model(**LLAMA), tmp_path / "x", saver="hf", verify=True, host=host)


def test_verify_shows_no_default_as_a_change(make_model, host, tmp_path: Path) -> None:
    """hf writes out the sizes that follow from others; this Llama sets none of them."""
    keys = {key: LLAMA[key] for key in ("family", "num_layers", "hidden_size", "num_attention_heads", "vocab_size")}
    report = convert(make_model(**keys), tmp_path / "hf", saver="hf", verify=True, host=host)
    assert report.verification is not None
    assert report.verification.changed_settings == {}


def test_verify_names_the_first_layer(make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = with_saver("mt", write_other_settings, monkeypatch)
    with pytest.raises(CheckpointError) as caught:
        convert(make_model(**LLAMA), tmp_path / "x", saver="mt", verify=True, host=host)
    assert "the first output that differs is that of decoder.layers.0" in str(caught.value)
    assert "model.rotary_base: 10000.0 -> 500.0" in str(caught.value)
