"""Training over several ranks is the training of one process: losses, norms, weights, data, stopping, resuming."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.dist.in_turn import InTurn

from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.config.loading import LoadedConfig, load_config
from mt_core.errors import ConfigError
from mt_core.optim.buckets import Bucket
from mt_core.parallel import reductions as data_parallel
from mt_core.parallel.context import Axis
from mt_core.parallel.reductions import buckets, sum_gradients
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train import Callback, Trainer, engine
from mt_core.train.step.optimizer_step import OptimizerStep

pytestmark = pytest.mark.dist

STEPS = 4
STOPPED = "train.exit_iteration=2"
SETTINGS = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "data.eod_mask_loss=true",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    f"train.train_iters={STEPS}",
    "train.eval_interval=2",
    "train.eval_iters=1",
    "checkpoint.save_interval=null",
    "lr_schedule.lr_warmup_iters=1",
    "logging.progress=none",
]


def config(*more: str) -> LoadedConfig:
    torch.set_num_threads(1)
    return load_config(preset="gpt-tiny", overrides=[*SETTINGS, *more])


class Curve(Callback):
    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.valid: list[float] = []

    def on_step_end(self, run, metrics) -> None:
        self.steps.append((metrics["loss"], metrics["grad_norm"]))

    def on_evaluation(self, run, metrics) -> None:
        self.valid.append(metrics["valid_loss"])


def curve(rank: int, world: int, more: tuple[str, ...] = (), run_dir: str | None = None) -> dict:
    seen = Curve()
    trainer = Trainer(config(*more), callbacks=[seen], run_dir=run_dir)
    result = trainer.train()
    weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return {"steps": seen.steps, "valid": seen.valid, "weights": weights, "iteration": result.state.iteration}


def mutated(rank: int, world: int, case: tuple[str | None, tuple[str, ...]]) -> dict:
    mutation, more = case
    with pytest.MonkeyPatch.context() as patch:
        if mutation is not None:
            MUTATIONS[mutation](patch)
        return curve(rank, world, more)


def do_not_sum_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bucket, "start_reduce", lambda bucket: setattr(bucket, "_reduced", True))


def count_tokens_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OptimizerStep, "global_counts", lambda step, counts: (counts.divisor, counts.tokens))


def read_the_same_samples(patch: pytest.MonkeyPatch) -> None:
    reader = engine.BatchReader
    patch.setattr(engine, "BatchReader", lambda *args, dp_rank, **options: reader(*args, dp_rank=0, **options))


MUTATIONS = {
    "gradients are not summed": do_not_sum_gradients,
    "each rank divides by its own count of tokens": count_tokens_of_one_rank,
    "all ranks take the same samples": read_the_same_samples,
}
UNBROKEN = None, ()
BF16 = None, ("precision.dtype=bf16",)
DROPOUT = None, ("model.hidden_dropout=0.2",)
RUNS = InTurn(mutated, [(2, case) for case in (*((mutation, ()) for mutation in MUTATIONS), UNBROKEN, BF16, DROPOUT)])


@cache
def curve_of_one_process() -> dict:
    return curve(0, 1)


def differs(mine: dict, reference: dict) -> float:
    """Largest relative difference of losses, norms, evaluations and weights."""
    found = [
        abs(a / b - 1)
        for x, y in zip(mine["steps"], reference["steps"], strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    found += [abs(a / b - 1) for a, b in zip(mine["valid"], reference["valid"], strict=True)]
    found += [
        ((mine["weights"][name] - value).abs().max() / value.abs().max()).item()
        for name, value in reference["weights"].items()
    ]
    return max(found)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_train_as_one_process(world) -> None:
    reference = curve_of_one_process()
    for mine in RUNS.of_ranks(world, UNBROKEN):
        assert differs(mine, reference) < 2e-5
        assert len(mine["steps"]) == STEPS


@pytest.mark.slow
def test_with_16_bit_weights_too() -> None:
    first, second = RUNS.of_ranks(2, BF16)
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    assert [loss for loss, _ in first["steps"]] == pytest.approx(
        [loss for loss, _ in curve_of_one_process()["steps"]], rel=0.01
    )


FORMS = ("copies", "remainders")
ONE_KERNEL = ("precision.dtype=bf16", "optimizer.exp_avg_dtype=bf16")
"""With moments in bf16 the fused kernel's reference updates either form on a CPU."""
STATES = {
    "replicated": (),
    "sharded": ("parallel.use_distributed_optimizer=true", "parallel.ddp_bucket_size=10000"),
}


def in_form(form: str, *more: str) -> tuple[str, ...]:
    return *ONE_KERNEL, f"optimizer.main_weights={form}", *more


def in_all_forms(rank: int, world: int, folder: str) -> dict[tuple[str, str], dict]:
    cases = product(STATES, FORMS)
    return {
        (state, form): curve(rank, world, in_form(form, STOPPED, *STATES[state]), f"{folder}/{state}-{form}")
        for state, form in cases
    }


@pytest.mark.slow
def test_remainders_train_as_copies_do_and_either_goes_on_with_the_other(tmp_path: Path) -> None:
    """Bit for bit, over replicated and over sharded state; their checkpoints are the same, and go on on one rank."""
    for found in run_ranks(2, in_all_forms, str(tmp_path)):
        for state in STATES:
            require_same_bits(found[state, "copies"], found[state, "remainders"])
    for state in STATES:
        copies, remainders = (
            open_checkpoint(find_checkpoint(tmp_path / f"{state}-{form}"), load_plugins()) for form in FORMS
        )
        tensors = [name for name in copies.shapes() if not name.startswith("rng.")]
        assert tensors == [name for name in remainders.shapes() if not name.startswith("rng.")]
        assert all(torch.equal(copies.read(name), remainders.read(name)) for name in tensors)
    copies, remainders = (
        curve(0, 1, in_form(form, *STATES["sharded"]), str(tmp_path / f"sharded-{other}"))
        for form, other in (("copies", "remainders"), ("remainders", "copies"))
    )
    require_same_bits(copies, remainders)
    assert [len(mine["steps"]) for mine in (copies, remainders)] == [STEPS - 2, STEPS - 2]


def require_same_bits(some: dict, others: dict) -> None:
    assert some["steps"] == others["steps"]
    assert all(torch.equal(weight, others["weights"][name]) for name, weight in some["weights"].items())


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_runtime_is_noticed(mutation) -> None:
    reference = curve_of_one_process()
    assert max(differs(mine, reference) for mine in RUNS.of_ranks(2, (mutation, ()))) > 1e-3


def resumed(rank: int, world: int, run_dir: str, more: tuple[str, ...]) -> dict:
    return curve(rank, world, more, run_dir)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    reference = curve_of_one_process()
    first = run_ranks(2, resumed, str(tmp_path), (STOPPED,))
    assert [mine["iteration"] for mine in first] == [2, 2]
    for mine in run_ranks(4, resumed, str(tmp_path), ()):
        assert len(mine["steps"]) == STEPS - 2
        assert differs({**mine, "valid": []}, {**reference, "steps": reference["steps"][2:], "valid": []}) < 2e-5


@pytest.mark.slow
def test_dropout_goes_on_bit_for_bit_on_as_many_ranks(tmp_path: Path) -> None:
    _, drop = DROPOUT
    run_ranks(2, resumed, str(tmp_path), (*drop, STOPPED))
    parts = run_ranks(2, resumed, str(tmp_path), drop)
    for mine, reference in zip(parts, RUNS.of_ranks(2, DROPOUT), strict=True):
        assert mine["steps"] == reference["steps"][2:]
        assert all(torch.equal(mine["weights"][name], value) for name, value in reference["weights"].items())


def stopped_on_one_rank(rank: int, world: int) -> int:
    class Enough(Callback):
        def on_step_end(self, run, metrics) -> None:
            if rank == 1 and metrics["iteration"] == 3:
                run.stop("this rank has had enough")

    return Trainer(config(), callbacks=[Enough()]).train().state.iteration


@pytest.mark.slow
def test_a_stop_on_one_rank_stops_all_after_the_same_step() -> None:
    assert run_ranks(2, stopped_on_one_rank) == [3, 3]


def refused(rank: int, world: int) -> str:
    try:
        config("parallel.tensor_model_parallel_size=3")
    except ConfigError as error:
        return str(error)
    return ""


def test_what_training_cannot_divide_is_refused_by_its_key() -> None:
    message = run_ranks(2, refused)[0]
    assert "parallel.tensor_model_parallel_size=3 does not divide the number of processes=2" in message


def counted(rank: int, world: int) -> tuple[int, int]:
    """Messages and elements of one sum of gradients."""
    messages = []
    reduce = dist.all_reduce
    data_parallel.dist.all_reduce = lambda tensor, **options: (
        messages.append(tensor.numel()) or reduce(tensor, **options)
    )
    axis = Axis(world, rank, dist.group.WORLD, tuple(range(world)))
    gradients = [torch.full((size,), float(rank + 1)) for size in (3, 4, 5, 100)]
    sum_gradients(gradients, axis, bucket_elements=8)
    assert all((gradient == 3).all() for gradient in gradients)
    return len(messages), sum(messages)


def test_gradients_are_sent_once_in_buckets() -> None:
    assert run_ranks(2, counted) == [(3, 112)] * 2


def test_buckets_keep_order_size_and_dtype() -> None:
    tensors = [torch.zeros(3), torch.zeros(4), torch.zeros(2).double(), torch.zeros(9), torch.zeros(1)]
    assert [[t.numel() for t in bucket] for bucket in buckets(tensors, 8)] == [[3, 4], [2], [9], [1]]
