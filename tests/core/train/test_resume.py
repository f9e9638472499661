"""N steps equal k steps, a new process, and N - k steps: to the last bit."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.config.checks import as_world
from mt_core.errors import CheckpointError
from mt_core.plugins import load_plugins
from mt_core.testing import rank_context
from mt_core.train import Callback, Trainer
from mt_core.train.checkpoint.resume import differences, require_same_run
from mt_core.train.checkpoint.run_directory import RunDirectory

VARIANTS = {
    "fp32 adam with dropout": ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"],
    "bf16": ["precision.dtype=bf16"],
    "fp16": ["precision.dtype=fp16", "precision.initial_loss_scale=1e30", "precision.hysteresis=1"],
    "sgd": ["optimizer.optimizer=sgd", "optimizer.lr=0.1"],
    "WSD": ["lr_schedule.lr_decay_style=WSD", "lr_schedule.lr_wsd_decay_iters=3"],
    "noise on the input of a router": ["model.moe={num_experts=4, moe_router_topk=2, moe_input_jitter_eps=0.3}"],
    "packed documents": ["data.reset_attention_mask=true", "data.reset_position_ids=true", "data.eod_mask_loss=true"],
}


class DrawsNumbers(Callback):
    """From torch's default generator, as modules do that are not mt's."""

    def on_step_end(self, run, metrics) -> None:
        torch.rand(1)


def run(config, directory):
    Trainer(config, run_dir=directory, callbacks=[DrawsNumbers()]).train()


def contents(directory) -> dict[str, np.ndarray]:
    """Every tensor of the latest checkpoint, as raw bytes."""
    reader = open_checkpoint(RunDirectory(directory).latest_checkpoint(), load_plugins())
    return {name: reader.read(name).contiguous().view(-1).view(torch.uint8).numpy() for name in reader.shapes()}


def curve(directory) -> list[tuple[int, float, float]]:
    lines = (json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines())
    return [(line["iteration"], line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_is_the_same_run(tiny, tmp_path, variant) -> None:
    options = VARIANTS[variant]
    run(tiny(*options), tmp_path / "whole")
    run(tiny(*options, "train.exit_iteration=2"), tmp_path / "parts")
    # The second part is another process, so that nothing can survive in memory. It is no fork of this one: where a
    # test before has started threads of autograd, a fork cannot compute gradients.
    process = rank_context().Process(target=run, args=(tiny(*options), tmp_path / "parts"))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    whole, parts = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert [name for name in whole if not np.array_equal(whole[name], parts[name])] == []


@pytest.mark.slow
def test_samples_go_on_where_they_stopped(tiny, tmp_path) -> None:
    class Ids(Callback):
        seen: list[int]

        def __init__(self) -> None:
            self.seen = []

        def on_step_end(self, run, metrics) -> None:
            self.seen.append(metrics["consumed_samples"])

    first, second = Ids(), Ids()
    Trainer(tiny("train.exit_iteration=2"), run_dir=tmp_path, callbacks=[first]).train()
    Trainer(tiny(), run_dir=tmp_path, callbacks=[second]).train()
    assert first.seen + second.seen == [4, 8, 12, 16, 20, 24]


def test_a_run_ends_after_its_minutes_with_a_checkpoint(tiny, tmp_path) -> None:
    """As after a signal: what was trained is saved, and the same command goes on, also with other minutes."""
    result = Trainer(tiny("train.exit_duration_in_mins=1e-9"), run_dir=tmp_path).train()
    assert (result.state.iteration, result.stopped) == (1, "train.exit_duration_in_mins=1e-09")
    assert result.interrupted  # mt train ends with the status of a run that goes on later
    assert Trainer(tiny("train.exit_duration_in_mins=60"), run_dir=tmp_path).train().state.iteration == 6


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_to_do(tiny, tmp_path) -> None:
    run(tiny(), tmp_path)
    before = contents(tmp_path)
    result = Trainer(tiny(), run_dir=tmp_path).train()
    assert result.state.iteration == 6
    after = contents(tmp_path)
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_metrics_of_steps_after_the_checkpoint_are_dropped(tiny, tmp_path) -> None:
    run(tiny("checkpoint.save_interval=2"), tmp_path)
    (tmp_path / "checkpoints" / "latest").write_text("iter_0000004\n")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "iter')  # cut short by a kill
    run(tiny("checkpoint.save_interval=2"), tmp_path)
    assert [iteration for iteration, _, _ in curve(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("change", ["optimizer.lr=0.1", "data.seq_length=8", "train.seed=7", "train.train_iters=9"])
def test_a_changed_setting_must_be_accepted_by_its_key(tiny, tmp_path, change) -> None:
    key = change.partition("=")[0]
    run(tiny("train.exit_iteration=2"), tmp_path)
    with pytest.raises(CheckpointError, match=f"{key}: .* in the checkpoint, .* now") as error:
        Trainer(tiny(change), run_dir=tmp_path)
    assert "give another --run-dir" in str(error.value)
    assert f'checkpoint.accept_changes=["{key}"]' in str(error.value)
    Trainer(tiny(change, f'checkpoint.accept_changes=["{key}"]'), run_dir=tmp_path)


def test_what_changes_no_weight_may_change(tiny) -> None:
    free = ["train.check_memory=false", "train.deferred_metrics=never", "parallel.pipeline_backward_communicator=false"]
    free += ["recompute.cpu_offloading_num_layers=1"]
    assert list(differences(tiny().config.to_dict(), tiny(*free).config, load_plugins())) == []


def test_a_global_batch_that_follows_from_the_ranks_must_be_accepted_too(tiny) -> None:
    """Twice the ranks would train with twice the batch, and the rates of another schedule."""
    alone = tiny("train.global_batch_size=null", "train.micro_batch_size=2").config
    metadata = {"config": alone.to_dict(), "global_batch_size": 2}
    host = load_plugins()
    assert require_same_run(metadata, alone, "C", host) == []
    with as_world(2):
        with pytest.raises(CheckpointError, match="train.global_batch_size: 2 in the checkpoint, 4 now"):
            require_same_run(metadata, alone, "C", host)
        accepts = 'checkpoint.accept_changes=["train.global_batch_size"]'
        accepting = tiny("train.global_batch_size=null", "train.micro_batch_size=2", accepts).config
        (change,) = require_same_run(metadata, accepting, "C", host)
        assert change == ("train.global_batch_size", 2, 4)
    # The same batch by the key, which is how more ranks keep it.
    keeping = tiny("train.global_batch_size=2", "train.micro_batch_size=2").config
    assert require_same_run(metadata, keeping, "C", host) == []
    with pytest.raises(CheckpointError, match=r"2 in the checkpoint, 8 now\ntrain.global_batch_size=2 keeps the batch"):
        require_same_run(metadata, tiny("train.global_batch_size=8", "train.micro_batch_size=2").config, "C", host)
    # A checkpoint of before the size was stored.
    del metadata["global_batch_size"]
    assert require_same_run(metadata, alone, "C", host) == []


def test_another_model_cannot_be_accepted(tiny, tmp_path) -> None:
    run(tiny(), tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.num_layers: 2 in the checkpoint, 3 now"):
        Trainer(tiny("model.num_layers=3", 'checkpoint.accept_changes=["model.num_layers"]'), run_dir=tmp_path)


@pytest.mark.slow
def test_attention_may_be_computed_by_another_backend_unless_bits_count(tiny, tmp_path) -> None:
    run(tiny("model.attention_backend=eager", "train.exit_iteration=2"), tmp_path / "any")
    assert Trainer(tiny("model.attention_backend=sdpa"), run_dir=tmp_path / "any").state.iteration == 2
    exact = ("model.attention_backend=eager", "train.deterministic=true", "train.exit_iteration=2")
    run(tiny(*exact), tmp_path / "exact")
    with pytest.raises(CheckpointError, match=r"model\.attention_backend: eager in the checkpoint, sdpa now"):
        Trainer(tiny("model.attention_backend=sdpa", "train.deterministic=true"), run_dir=tmp_path / "exact")


def test_a_key_that_the_checkpoint_lacks_has_its_default(tiny) -> None:
    config = tiny().config
    stored = config.to_dict()
    del stored["optimizer"]["clip_grad"]
    assert list(differences(stored, config, load_plugins())) == []
    assert [change.key for change in differences(stored, tiny("optimizer.clip_grad=0.5").config, load_plugins())] == [
        "optimizer.clip_grad"
    ]


def test_required_and_never(tiny, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint.resume=required"):
        Trainer(tiny("checkpoint.resume=required"), run_dir=tmp_path)
    run(tiny(), tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint.resume=never"):
        Trainer(tiny("checkpoint.resume=never"), run_dir=tmp_path)


def test_a_latest_that_names_nothing_is_an_error(tiny, tmp_path) -> None:
    run(tiny(), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "iter_0000006")
    with pytest.raises(CheckpointError, match="latest names iter_0000006, which is not there"):
        Trainer(tiny(), run_dir=tmp_path)


def test_weights_alone_from_another_run(tiny, tmp_path) -> None:
    run(tiny(), tmp_path / "first")
    config = tiny(f'checkpoint.load="{tmp_path / "first"}"', "optimizer.lr=0.0", "optimizer.min_lr=0.0")
    trainer = Trainer(config, run_dir=tmp_path / "second")
    assert trainer.state.iteration == 0
    old = open_checkpoint(RunDirectory(tmp_path / "first").latest_checkpoint(), load_plugins())
    for name, parameter in trainer.model.named_parameters():
        stored = old.read(f"model.{name}")
        assert torch.equal(parameter[: len(stored)], stored)


def test_a_requested_checkpoint_that_is_missing_is_an_error(tiny, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        Trainer(tiny(f'checkpoint.load="{tmp_path / "nowhere"}"'))


def test_a_requested_checkpoint_that_does_not_fit_names_the_tensors(tiny, tmp_path) -> None:
    run(tiny(), tmp_path / "first")
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.2\.\S+ is missing"):
        Trainer(tiny("model.num_layers=3", f'checkpoint.load="{tmp_path / "first"}"'))


def test_deterministic_continues_only_in_the_same_environment(tiny, tmp_path) -> None:
    run(tiny("train.deterministic=true", "train.exit_iteration=2"), tmp_path)
    with pytest.raises(CheckpointError, match="num_threads: 1 then, 2 now"):
        Trainer(tiny("train.deterministic=true", "train.num_threads=2"), run_dir=tmp_path)
