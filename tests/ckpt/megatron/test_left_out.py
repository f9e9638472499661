"""What `mt convert` leaves out and says so: optimizers that are not read, histories of FP8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer
from tests.ckpt.megatron.conftest import LLAMA, RandomCheckpoint, assert_same_tensors
from tests.ckpt.megatron.handmade import arguments, gpt, save_rank
from tests.ckpt.megatron.test_round_trip import options, through
from typer.testing import CliRunner

from mt_ckpt.commands.convert import convert as command
from mt_ckpt.convert import convert
from mt_core.checkpoint_lookup import open_checkpoint, open_with
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS
from mt_core.config.loading import load_config
from mt_core.train import Trainer
from mt_core.train.checkpoint.run_directory import RunDirectory

TRAINED = (
    "train.train_iters=2",
    "train.eval_interval=null",
    "train.sample_prompt=null",
    "train.num_threads=1",
    "logging.progress=none",
    "lr_schedule.lr_warmup_iters=1",
    "data.num_workers=0",
    "train.micro_batch_size=2",
    "train.global_batch_size=2",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.num_attention_heads=4",
    "model.normalization=LayerNorm",
    "model.activation=gelu",
    "model.add_bias_linear=true",
    "model.attention_backend=eager",
    "data.seq_length=16",
    "precision.dtype=bf16",
    "precision.fp8_format=hybrid",
    "precision.fp8_recipe=delayed",
    "checkpoint.save_interval=2",
)


def printed_lines(*words: str | Path) -> list[str]:
    """Lines that the command prints."""
    application = typer.Typer()
    application.command()(command)
    result = CliRunner().invoke(application, [str(word) for word in words], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.exception
    return result.output.splitlines()


@pytest.mark.parametrize("further", [(), ("--dry-run",)])
def test_an_optimizer_that_is_not_read_is_named_with_the_reason(further, tmp_path) -> None:
    file = save_rank(tmp_path / "a", "mp_rank_00", {"args": arguments(), "model": gpt()})
    torch.save({}, file.parent / "layer_wise_optimizer_0.pt")
    lines = printed_lines("--load-dir", tmp_path / "a", "--save-dir", tmp_path / "b", "--saver", "hf", *further)
    expected = "without the optimizer of Megatron's run: layer-wise optimizers (layer_wise_optimizer_*.pt) do not say"
    assert lines[1].startswith(expected)


def test_nothing_is_said_where_there_is_no_optimizer(tmp_path) -> None:
    save_rank(tmp_path / "a", "mp_rank_00", {"args": arguments(), "model": gpt()})
    lines = printed_lines("--load-dir", tmp_path / "a", "--save-dir", tmp_path / "b", "--saver", "hf")
    assert [line for line in lines[1:] if not line.startswith("without a tokenizer")] == []


@pytest.fixture(scope="module")
def fp8_run(tmp_path_factory, host) -> Path:
    """Two steps of a GPT with delayed scaling."""
    path = tmp_path_factory.mktemp("run") / "run"
    loaded = load_config(preset="gpt-tiny", overrides=list(TRAINED), host=host)
    Trainer(loaded, run_dir=path).train()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["hf", "megatron", "megatron-dist", "mt"])
def test_histories_of_fp8_are_left_out_and_listed(saver, fp8_run, tmp_path, host) -> None:
    source = open_checkpoint(RunDirectory(fp8_run).latest_checkpoint(), host)
    histories = {name for name in source.shapes() if name.endswith(".fp8.amax_history")}
    assert len(histories) == 2 * 4
    report = convert(fp8_run, tmp_path / saver, saver=saver, verify=True, host=host)
    assert histories <= set(report.left_out)
    assert report.verification is not None
    written = open_with(host[CHECKPOINT_LOADERS].get(saver), tmp_path / saver, host)
    model = {name for name in source.shapes() if name.startswith("model.")}
    assert {name for name in written.shapes() if name.startswith("model.")} == model - histories
    for name in model - histories:
        assert torch.equal(written.read(name), source.read(name)), name


def test_the_command_lists_them_in_one_word(fp8_run, tmp_path) -> None:
    lines = printed_lines("--load-dir", fp8_run, "--save-dir", tmp_path / "hf", "--saver", "hf")
    assert "fp8.amax_history" in lines[1].partition("left out")[2]
    assert " model" not in lines[1].partition("left out")[2].partition(":")[2]


def test_a_checkpoint_without_histories_is_read_as_it_is(tmp_path, host) -> None:
    source = RandomCheckpoint(LLAMA, host)
    through("mt", source, options(), tmp_path / "mt", host)
    assert convert(tmp_path / "mt", tmp_path / "b", saver="megatron", host=host).left_out == ()
    assert_same_tensors(open_with(host[CHECKPOINT_LOADERS].get("megatron"), tmp_path / "b", host), source)
