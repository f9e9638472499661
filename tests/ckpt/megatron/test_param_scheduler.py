"""The learning rate that groups of a written Megatron checkpoint have."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.metadata import metadata_of, optimizer_options, scheduler_value
from mt_core.errors import CheckpointError

GPT = {"family": "gpt", "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 8}
ITERATIONS, DONE, LR = 100, 5, 1e-2


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(1, 1), (2, 2), (8, 1)])
def test_the_batch_size_is_that_of_the_training_and_not_of_the_process_that_converts(
    host, ranks: int, tensor_parallel: int
) -> None:
    """Linear decay from LR to 0; the global batch size is left to the number of data-parallel ranks."""
    metadata = {
        "iteration": DONE,
        "consumed_samples": DONE * 4 * ranks // tensor_parallel,
        "config": {
            "model": GPT,
            "parallel": {"tensor_model_parallel_size": tensor_parallel},
            "train": {"micro_batch_size": 4, "train_iters": ITERATIONS},
            "optimizer": {"lr": LR, "min_lr": 0.0},
            "lr_schedule": {"lr_decay_style": "linear", "lr_warmup_iters": 0},
        },
    }
    options = optimizer_options(metadata, host)
    assert options["lr"] == pytest.approx(LR * (1 - DONE / ITERATIONS))
    assert options["max_lr"] == LR


def test_bounds_of_the_learning_rate_are_those_of_the_scheduler_that_came_from_megatron(host) -> None:
    """A group's own bounds take precedence over the scheduler's there."""
    scheduler = {"max_lr": 3 * LR, "min_lr": LR / 10, "num_steps": 40, "lr_decay_style": "linear"}
    metadata = {"config": {"model": GPT, "optimizer": {"lr": LR}}, "megatron": {"opt_param_scheduler": scheduler}}
    options = optimizer_options(metadata, host)
    assert (options["max_lr"], options["min_lr"]) == (3 * LR, LR / 10)
    assert (options["adam_beta1"], options["weight_decay"]) == (0.9, 0.01)


def test_a_weight_decay_that_megatron_does_not_have_is_refused(host) -> None:
    """Megatron would decay other parameters in the next step."""
    metadata = {"config": {"model": GPT, "optimizer": {"lr": LR, "no_weight_decay": ["*.bias"]}}}
    with pytest.raises(CheckpointError, match=r"no_weight_decay=\['\*.bias'\], .*--target-optimizer-format none"):
        optimizer_options(metadata, host)


def test_without_a_length_of_the_training_it_is_the_highest(host) -> None:
    metadata = {"iteration": 5, "consumed_samples": 40, "config": {"model": GPT, "optimizer": {"lr": LR}}}
    assert optimizer_options(metadata, host)["lr"] == LR


def test_skipped_steps_are_not_counted_by_the_scheduler(host) -> None:
    """Megatron's scheduler stays where it is in a skipped step, its samples are consumed."""
    metadata = {
        "iteration": DONE,
        "consumed_samples": 4 * DONE,
        "schedule_samples": 4 * (DONE - 2),
        "config": {
            "model": GPT,
            "train": {"global_batch_size": 4, "train_iters": ITERATIONS},
            "optimizer": {"lr": LR, "min_lr": 0.0},
            "lr_schedule": {"lr_decay_style": "linear", "lr_warmup_iters": 0},
        },
    }
    assert optimizer_options(metadata, host)["lr"] == pytest.approx(LR * (1 - (DONE - 2) / ITERATIONS))
    assert scheduler_value(metadata, host)["num_steps"] == 4 * (DONE - 2)


@pytest.mark.parametrize(("scheduler", "expected"), [({"num_steps": 12}, 12), ({"num_iters": 8}, 8), (None, 20)])
def test_a_run_continues_where_the_scheduler_of_megatron_stands(scheduler, expected: int) -> None:
    common = {"iteration": DONE, "opt_param_scheduler": scheduler}
    metadata = metadata_of(Arguments({"consumed_train_samples": 20}, Path("model_optim_rng.pt")), common, GPT)
    assert (metadata["consumed_samples"], metadata["schedule_samples"]) == (20, expected)
