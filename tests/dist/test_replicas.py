"""`train.verify_replicas_interval`: copies of weights are compared bit for bit, and a flipped bit is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch
from tests.dist.in_turn import InTurn
from tests.dist.test_layouts import GATHER, MOE, SMALL_BUCKETS, SP, TP2, TP4, ZERO, config

from mt_core.errors import ConfigError, TrainingError
from mt_core.testing import run_ranks
from mt_core.train.callbacks import Callback
from mt_core.train.step_checks import bit_hash
from mt_core.train.trainer import Trainer

pytestmark = pytest.mark.dist

SMALL = ("model.num_layers=2", "train.global_batch_size=4", "train.train_iters=2", "train.sample_prompt=null")
EVERY_STEP, EVERY_OTHER = "train.verify_replicas_interval=1", "train.verify_replicas_interval=2"
EP2 = "parallel.expert_model_parallel_size=2"
FEW_PADDING_ROWS = "model.make_vocab_size_divisible_by=8"
NORM = "decoder.layers.1.input_layernorm.weight"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
A_BIT = 1 << 20
"""Of the mantissa, high enough not to be rounded away by the next update."""


class Fault(NamedTuple):
    """A bit of the weight `name` flips on `rank` after `step` steps."""

    rank: int
    name: str
    step: int = 1


class Outcome(NamedTuple):
    """steps: those that ended well. error: of the check, if it found something."""

    steps: list[int]
    error: str | None


class Steps(Callback):
    def __init__(self, fault: Fault | None) -> None:
        self.fault = fault
        self.ended: list[int] = []

    def on_step_end(self, run: Trainer, metrics: Mapping[str, float | int | str]) -> None:
        self.ended.append(run.state.iteration)
        if self.fault is not None and run.state.iteration == self.fault.step:
            flip(run, self.fault.name)


def flip(run: Trainer, name: str) -> None:
    weight = run.model.get_parameter(name).detach()
    weight.view(-1).view(torch.int32)[-1] ^= A_BIT


class Case(NamedTuple):
    settings: tuple[str, ...]
    fault: Fault | None = None

    def __str__(self) -> str:
        keys = "+".join(key.partition("=")[0].rpartition(".")[2] for key in self.settings)
        return keys if self.fault is None else f"{keys}, rank {self.fault.rank}"


def train(rank: int, world: int, case: Case) -> Outcome:
    settings, fault = case
    steps = Steps(fault if fault is not None and fault.rank == rank else None)
    trainer = Trainer(config(*SMALL, *settings), callbacks=[steps])
    return outcome_of(trainer, steps)


def outcome_of(trainer: Trainer, steps: Steps) -> Outcome:
    try:
        trainer.train()
    except TrainingError as error:
        return Outcome(steps.ended, str(error))
    return Outcome(steps.ended, None)


def train_with_a_wrong_gather(rank: int, world: int, settings: tuple[str, ...], fault: Fault) -> Outcome:
    """What the optimizer's ranks collect arrives with a wrong bit on one of them, just before it is checked: any
    earlier, the next step would put the right one there."""
    steps = Steps(None)
    trainer = Trainer(config(*SMALL, *settings), callbacks=[steps])
    collect = trainer.engine.weights.finish_gather

    def collect_wrongly() -> None:
        collect()
        if rank == fault.rank and trainer.state.iteration == fault.step:
            flip(trainer, fault.name)

    trainer.engine.weights.finish_gather = collect_wrongly  # type: ignore[method-assign]
    return outcome_of(trainer, steps)


WITHOUT_FAULT = [
    (2, Case((EVERY_STEP,))),
    (2, Case((TP2, EVERY_STEP))),
    (2, Case((TP2, SP, EVERY_STEP))),
    (4, Case((TP2, SP, ZERO, SMALL_BUCKETS, EVERY_STEP))),
    (4, Case((ZERO, SMALL_BUCKETS, GATHER, EVERY_STEP))),
    (4, Case((MOE, EP2, EVERY_STEP))),
]
ON_FOUR_RANKS = [
    (Case((EVERY_STEP,), Fault(2, QKV)), "dp_cp"),
    (Case((EVERY_STEP,), Fault(0, QKV)), "dp_cp"),
    (Case((TP4, FEW_PADDING_ROWS, EVERY_STEP), Fault(3, NORM)), "tp"),
    (Case((TP4, SP, FEW_PADDING_ROWS, EVERY_STEP), Fault(1, NORM)), "tp"),
]
OF_TWO_COPIES = Case((EVERY_STEP,), Fault(0, QKV))
AT_INTERVALS = Case((EVERY_OTHER, "train.train_iters=4"), Fault(1, QKV, step=2))
UNSEEN = Case((), Fault(1, QKV))
RUNS = InTurn(
    train,
    [*WITHOUT_FAULT, *((4, case) for case, _ in ON_FOUR_RANKS), (2, AT_INTERVALS), (2, UNSEEN)],
    [(2, OF_TWO_COPIES)],  # a group of its own: the only case that is not marked slow
)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), WITHOUT_FAULT, ids=str)
def test_copies_that_agree_pass_at_every_step(world: int, case: Case) -> None:
    assert RUNS.of_ranks(world, case) == [Outcome([1, 2], None)] * world


@pytest.mark.slow
@pytest.mark.parametrize(("case", "axis"), ON_FOUR_RANKS, ids=str)
def test_a_flipped_bit_stops_the_run_with_tensor_and_rank(case: Case, axis: str) -> None:
    fault = case.fault
    assert fault is not None
    for outcome in RUNS.of_ranks(4, case):
        assert outcome.steps == [1]
        assert outcome.error is not None
        assert f"{fault.name} of rank {fault.rank} among the {axis} ranks [0, 1, 2, 3]" in outcome.error
        assert "go on from a checkpoint of before" in outcome.error


@pytest.mark.slow
def test_a_flipped_bit_is_found_under_zero_while_weights_are_collected_late() -> None:
    fault = Fault(3, QKV, step=2)
    layout = (ZERO, SMALL_BUCKETS, GATHER, EVERY_STEP)
    for outcome in run_ranks(4, train_with_a_wrong_gather, layout, fault):
        assert outcome.steps == [1]
        assert outcome.error is not None
        assert f"{QKV} of rank 3 among the dp_cp ranks [0, 1, 2, 3]" in outcome.error


def test_of_two_copies_neither_is_blamed() -> None:
    for outcome in RUNS.of_ranks(2, OF_TWO_COPIES):
        assert outcome.error is not None
        assert f"{QKV} differs among the dp_cp ranks [0, 1], and no value has a majority" in outcome.error


@pytest.mark.slow
def test_the_interval_says_when_copies_are_compared() -> None:
    for outcome in RUNS.of_ranks(2, AT_INTERVALS):
        assert outcome.steps == [1, 2, 3]
        assert outcome.error is not None


@pytest.mark.slow
def test_without_the_key_nothing_is_compared() -> None:
    assert [outcome.error for outcome in RUNS.of_ranks(2, UNSEEN)] == [None, None]


def test_sharded_weights_have_no_copies_to_compare() -> None:
    with pytest.raises(ConfigError, match=r"train\.verify_replicas_interval compares copies of weights"):
        config("parallel.use_torch_fsdp2=true", EVERY_STEP)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hash_follows_from_every_bit_and_its_place(dtype: torch.dtype) -> None:
    weight = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=dtype)
    swapped = weight.clone()
    swapped[0] = weight[0].flip(0)
    assert bit_hash(weight) == bit_hash(weight.clone())
    assert bit_hash(weight) != bit_hash(swapped)
    assert bit_hash(torch.zeros(3, dtype=dtype)) != bit_hash(-torch.zeros(3, dtype=dtype))
