"""`Trainer` from Python: what a run does, writes, and how it ends."""

from __future__ import annotations

import json
import math
import os
import signal
import threading

import numpy as np
import pytest
import torch

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError, DataError, TrainingError
from mt_core.train import Callback, Trainer


class Losses(Callback):
    """Remembers the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step_end(self, run, metrics) -> None:
        self.values.append(metrics["loss"])


def losses_of(config, **parts) -> list[float]:
    seen = Losses()
    Trainer(config, callbacks=[seen], **parts).train()
    return seen.values


def test_a_run_in_a_few_lines(tiny, tmp_path) -> None:
    result = Trainer(tiny("train.eval_iters=2"), run_dir=tmp_path).train()
    assert result.state.iteration == 6
    assert result.state.consumed_samples == 24
    assert 0 < result.losses["valid_loss"] < 8
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "iter_0000006"
    assert "finished" in (tmp_path / "log.txt").read_text()


def test_the_written_config_makes_the_same_run(tiny, tmp_path, host) -> None:
    first = Trainer(tiny(), run_dir=tmp_path)
    again = load_config(tmp_path / "config.json", host=host) if first.train() else None
    assert again is not None
    assert again.config == first.config


@pytest.mark.slow
def test_micro_batches_and_accumulation_give_the_same_curve(tiny) -> None:
    one = losses_of(tiny("train.micro_batch_size=4"))
    four = losses_of(tiny("train.micro_batch_size=1"))
    assert one == pytest.approx(four, rel=1e-5)


@pytest.mark.slow
def test_reader_threads_do_not_change_the_run(tiny) -> None:
    assert losses_of(tiny("data.num_workers=0")) == losses_of(tiny("data.num_workers=3"))


@pytest.mark.slow
def test_recomputing_layers_does_not_change_the_run(tiny) -> None:
    drop = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1", "model.attention_backend=eager"]
    plain = losses_of(tiny(*drop))
    assert losses_of(tiny(*drop, "recompute.recompute_granularity=full")) == pytest.approx(plain, rel=1e-6)


@pytest.mark.slow
def test_the_loss_falls(tiny) -> None:
    values = losses_of(tiny("train.train_iters=40", "optimizer.lr=0.01"))
    assert sum(values[-5:]) / 5 < values[0] - 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_follow_the_fp32_curve(tiny, dtype) -> None:
    reference = losses_of(tiny())
    values = losses_of(
        tiny(f"precision.dtype={dtype}", *(["precision.initial_loss_scale=1024"] if dtype == "fp16" else []))
    )
    assert values == pytest.approx(reference, abs=0.03)


def test_fp16_starts_by_finding_its_loss_scale(tiny) -> None:
    trainer = Trainer(tiny("precision.dtype=fp16", "precision.initial_loss_scale=1e30", "precision.hysteresis=1"))
    trainer.train()
    assert trainer.state.skipped_iterations > 0
    assert trainer.engine.scaler.scale < 1e30


def test_skipped_steps_do_not_bring_the_schedules_forward(tiny) -> None:
    """Megatron's scheduler stays where it is in a skipped step. Linear decay of the learning rate, linear increase of
    the weight decay; a log line of skipped steps alone has no loss, which is not 0."""
    lines, decays = [], []

    class Rows(Callback):
        def on_step_end(self, run, metrics) -> None:
            decays.append(max(group["weight_decay"] for group in run.engine.optimizer.param_groups))

        def on_log(self, run, metrics) -> None:
            lines.append((metrics["learning_rate"], metrics["loss"], metrics["skipped_since_log"]))

    config = tiny(
        "precision.dtype=fp16",
        "precision.initial_loss_scale=1e8",
        "precision.hysteresis=1",
        "precision.loss_scale_window=1000",
        "train.train_iters=30",
        "logging.log_interval=1",
        "optimizer.lr=0.01",
        "optimizer.min_lr=0.0",
        "optimizer.weight_decay_incr_style=linear",
        "optimizer.start_weight_decay=0.0",
        "optimizer.end_weight_decay=0.8",
        "lr_schedule.lr_decay_style=linear",
        "lr_schedule.lr_warmup_iters=0",
    )
    trainer = Trainer(config, callbacks=[Rows()])
    trainer.train()
    skipped = trainer.state.skipped_iterations
    assert 0 < skipped < 30
    done = 0
    for (rate, loss, was_skipped), decay in zip(lines, decays, strict=True):
        assert rate == pytest.approx(0.01 * (1 - done / 30))
        assert decay == pytest.approx(0.8 * done / 30)
        assert math.isnan(loss) == bool(was_skipped)
        done += 1 - was_skipped
    batch = trainer.engine.config.train.global_batch_size
    assert (trainer.state.schedule_samples, trainer.state.consumed_samples) == ((30 - skipped) * batch, 30 * batch)


def test_samples_and_ramp_up(tiny) -> None:
    sizes = []

    class Sizes(Callback):
        def on_step_end(self, run, metrics) -> None:
            sizes.append(metrics["consumed_samples"])

    config = tiny(
        "train.train_iters=null",
        "train.train_samples=24",
        "train.rampup_batch_size=[2, 2, 6]",
        "lr_schedule.lr_warmup_iters=null",
    )
    Trainer(config, callbacks=[Sizes()]).train()
    assert np.diff([0, *sizes]).tolist() == [2, 2, 2, 4, 4, 4, 4], "24 - 22 samples are no full batch"


def test_a_custom_loss(tiny) -> None:
    def doubled(logits, batch):
        flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return 2 * flat.view(batch["labels"].shape)

    step = ["train.train_iters=1", "lr_schedule.lr_warmup_iters=0"]
    plain, custom = losses_of(tiny(*step)), losses_of(tiny(*step), loss=doubled)
    assert custom[0] == pytest.approx(2 * plain[0], rel=1e-6)


def test_a_custom_step_a_custom_data_set(tiny) -> None:
    class Ones:
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index):
            return {"tokens": np.ones(4, np.int64), "loss_mask": np.ones(4, np.float32)}

    calls = []

    def step(model, batch):
        calls.append(batch["tokens"].shape)
        return model(batch["tokens"]).logsumexp(-1)

    Trainer(tiny(), train_data=Ones(), valid_data={}, forward_step=step).train()
    assert calls == [(2, 4)] * 12


def test_a_data_set_that_is_too_short_is_an_error_before_training(tiny) -> None:
    class Short:
        def __len__(self) -> int:
            return 23

        def __getitem__(self, index):
            raise AssertionError("never read")

    with pytest.raises(DataError, match="training takes 24 samples, the data set has 23"):
        Trainer(tiny(), train_data=Short(), valid_data={})


def test_a_loss_that_is_not_finite_names_the_batch(tiny, tmp_path) -> None:
    class Poisoned:
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index):
            mask = np.full(4, np.nan if index == 9 else 1.0, np.float32)
            return {
                "tokens": np.ones(4, np.int64),
                "labels": np.ones(4, np.int64),
                "loss_mask": np.ones(4, np.float32),
                "weight": mask,
            }

        def describe(self, index: int) -> str:
            return f"poem.txt line {index}"

    def step(model, batch):
        return model(batch["tokens"]).logsumexp(-1) * batch["weight"]

    trainer = Trainer(tiny(), run_dir=tmp_path, train_data=Poisoned(), valid_data={}, forward_step=step)
    with pytest.raises(TrainingError, match="iteration 3") as error:
        trainer.train()
    assert "samples 8 to 11" in str(error.value)
    assert "poem.txt line 9" in str(error.value)


def test_a_callback_can_stop_training(tiny, tmp_path) -> None:
    class Enough(Callback):
        def on_step_end(self, run, metrics) -> None:
            if metrics["iteration"] == 2:
                run.stop("enough")

    result = Trainer(tiny(), run_dir=tmp_path, callbacks=[Enough()]).train()
    assert (result.stopped, result.interrupted) == ("enough", False)
    assert result.state.iteration == 2
    assert (tmp_path / "checkpoints" / "iter_0000002").is_dir()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(tiny, tmp_path, number) -> None:
    class Interrupted(Callback):
        def on_step_end(self, run, metrics) -> None:
            if metrics["iteration"] == 3:
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    result = Trainer(tiny(), run_dir=tmp_path, callbacks=[Interrupted()]).train()
    assert (result.stopped, result.interrupted) == (f"signal {number.name}", True)
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"iter_{result.state.iteration:07d}"
    assert signal.getsignal(number) is before


def test_a_second_signal_stops_at_once(tiny) -> None:
    class Twice(Callback):
        def on_step_end(self, run, metrics) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Trainer(tiny(), callbacks=[Twice()]).train()


@pytest.mark.slow
def test_it_trains_outside_the_main_thread(tiny) -> None:
    results = []
    thread = threading.Thread(target=lambda: results.append(Trainer(tiny()).train()))
    thread.start()
    thread.join()
    assert results[0].state.iteration == 6


@pytest.mark.slow
def test_evaluation_sees_the_same_samples_each_time_and_leaves_the_run_alone(tiny) -> None:
    assert losses_of(tiny()) == losses_of(tiny("train.eval_interval=2"))
    trainer = Trainer(tiny("model.hidden_dropout=0.5"))
    assert trainer.evaluate() == trainer.evaluate()


@pytest.mark.slow
def test_deterministic_runs_repeat_to_the_last_bit(tiny) -> None:
    config = tiny("train.deterministic=true", "model.hidden_dropout=0.1")
    assert losses_of(config) == losses_of(config)
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_refuses_what_it_cannot_keep(tiny) -> None:
    def unstable(logits, batch):
        # kthvalue on a GPU, and this index reduction everywhere, have no deterministic form
        out = torch.zeros(logits.shape[1])
        out.put_(torch.zeros(4, dtype=torch.int64), torch.ones(4), accumulate=False)
        return logits.logsumexp(-1) + out

    with pytest.raises(RuntimeError, match="deterministic"):
        losses_of(tiny("train.deterministic=true"), loss=unstable)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tiny) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size=100 is smaller than the tokenizer's"):
        Trainer(tiny("model.vocab_size=100"))
