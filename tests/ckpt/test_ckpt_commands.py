"""`mt ckpt` as a user types it, and what mt-ckpt registers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from mt_ckpt import plugin
from mt_ckpt.commands.ckpt import app
from mt_ckpt.files.sizes import format_bytes
from mt_ckpt.native.save import save_checkpoint
from mt_core.errors import CheckpointError
from mt_core.plugins import Plugin, PluginHost


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def refusal(*arguments: str | Path) -> str:
    """The message of the CheckpointError that the command line shows."""
    result = run(*arguments)
    assert isinstance(result.exception, CheckpointError)
    return str(result.exception)


def test_inspect_a_checkpoint(saved: Path) -> None:
    result = run("inspect", saved)
    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines()]
    assert ["iteration", "1"] in lines
    assert ["config", "{model}"] in lines
    assert ["file", "tokenizer/vocab.json", "(800", "B)"] in lines
    elements = 6 * 128 * 128 + 33
    size = format_bytes(6 * 128 * 128 * 4 + 33 * 2).split()
    assert ["model", "7", f"{elements:,}", "BF16,", "F32", *size] in lines
    assert ["optimizer.exp_avg", "3", "3,000", "F64", "23.4", "KiB"] in lines


def test_inspect_lists_tensors(saved: Path) -> None:
    lines = [line.split()[:6] for line in run("inspect", saved, "--tensors").output.splitlines()]
    assert ["model.layers.5.weight", "F32", "128", "x", "128", "64.0"] in lines
    assert any(line[:3] == ["rng", "U8", "101"] for line in lines)


def test_inspect_shows_values_as_they_are(tmp_path: Path) -> None:
    """Square brackets are markup to the library that prints tables."""
    save_checkpoint(tmp_path / "c", [("[/bold]", torch.zeros(1))], {"note": "[red]x[/green]", "ids": [1, 2]}, {})
    output = run("inspect", tmp_path / "c", "--tensors").output
    assert "[red]x[/green]" in output
    assert "[2 values]" in output
    assert "[/bold]" in output


def test_a_run_directory_means_its_latest(saved: Path, kit) -> None:
    kit.save(saved.with_name("iter_0000002"), 2)
    (saved.parent / "latest").write_text("iter_0000002\n")
    for path in (saved.parent.parent, saved.parent):
        assert "iter_0000002: whole (11 tensors" in run("verify", path).output
    assert "iter_0000001: whole (11 tensors" in run("verify", saved).output


def test_verify_names_each_damaged_file(saved: Path) -> None:
    shards = sorted(saved.glob("*.safetensors"))
    for shard in shards[:2]:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    message = refusal("verify", saved)
    assert [line.split(":")[0] for line in message.splitlines()] == [str(shard) for shard in shards[:2]]


def test_paths_that_are_no_checkpoint(tmp_path: Path, saved: Path) -> None:
    assert refusal("verify", tmp_path / "none").endswith("none: no such file or directory")
    assert "is no complete checkpoint of a known format; loaders are" in refusal("inspect", tmp_path)
    for name in ("iter_0000007", "../checkpoints/iter_0000001"):
        (saved.parent / "latest").write_text(name)
        assert f"names '{name}', which is not a checkpoint" in refusal("inspect", saved.parent.parent)


def test_registration() -> None:
    host = PluginHost(strict=True)
    host.add(plugin, Plugin("ckpt", "mt_ckpt.plugin", "mt-ckpt", "0.1.0"))
    loader = host.registry("checkpoint_loaders").get("mt")
    assert not loader.detect.load()(Path("/nowhere"))
    assert callable(loader.open.load())
    assert callable(host.registry("checkpoint_savers").get("mt").save.load())
    assert host.registry("commands").get("ckpt").app.load() is app


def test_plugin_and_command_import_no_torch() -> None:
    code = (
        "import sys, mt_ckpt.plugin; assert 'typer' not in sys.modules; "
        "import mt_ckpt.commands.ckpt, mt_ckpt.commands.convert; "
    )
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 50, "3072.0 TiB")],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
