"""Optimizers over layouts: whole matrices for Muon, groups with schedules of their own, zeros counted once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from tests.covering import EXHAUSTIVE
from tests.dist.in_turn import InTurn, called
from tests.dist.test_layouts import CP2, EP2, FSDP, MOE, PP2, SMALL_BUCKETS, SP, TP2, TP4, ZERO, config
from torch import Tensor

from mt_core.optim import muon
from mt_core.optim.configs import MuonCoefficients
from mt_core.optim.muon import ShardedMatrix
from mt_core.testing import run_ranks
from mt_core.train import Callback, Trainer
from mt_tools.verify.comparison import compare
from mt_tools.verify.run_record import RunRecord, record_run

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SMALL = ("model.num_layers=2", "train.global_batch_size=4")
BASE = ("optimizer.lr=1e-3", "optimizer.min_lr=0", "optimizer.adam_eps=1e-4")
MUON = (*BASE, "optimizer.optimizer=muon")
SHAPES = ("optimizer.muon_nesterov=true", "optimizer.muon_scale_mode=unit_rms_norm")
TWO_SAMPLES = "train.global_batch_size=2"
WHOLE_QKV = ("optimizer.muon_split_qkv=false", TWO_SAMPLES)
ONE_GROUP = ("model.num_query_groups=1", TWO_SAMPLES)
INSTANCES = "parallel.num_distributed_optimizer_instances=2"
OUTER = "parallel.outer_dp_sharding_strategy=optim"
DECOUPLED = (
    *BASE,
    "optimizer.decoupled_lr=1e-4",
    "optimizer.weight_decay_incr_style=cosine",
    "optimizer.start_weight_decay=0",
    "optimizer.end_weight_decay=10",
)


def joined(value: object) -> str:
    return "+".join(key.split(".")[1] for key in value) if isinstance(value, tuple) else str(value)


def run(rank: int, world: int, options: tuple[str, ...]) -> RunRecord | None:
    record = record_run(config(*SMALL, *options))
    return record if rank == 0 else None


class Counted(Callback):
    """zeros: of the gradient of each step. norms: of the parameters. plain: the last of these by plain torch, from a
    model that one process has whole."""

    def __init__(self) -> None:
        self.zeros: list[int] = []
        self.norms: list[float] = []
        self.plain = 0.0

    def on_step_end(self, run, metrics) -> None:
        self.zeros.append(metrics["zeros_in_grad"])

    def on_log(self, run, metrics) -> None:
        self.norms.append(metrics["params_norm"])
        self.plain = float(sum(p.detach().double().square().sum() for p in run.model.parameters())) ** 0.5


def count_zeros(rank: int, world: int, layout: tuple[str, ...]) -> Counted:
    """Token embeddings apart from the output layer: rows of ids that no sample has are 0. No padding."""
    seen = Counted()
    model = ("model.vocab_size=512", "model.untie_embeddings_and_output_weights=true")
    logged = ("logging.log_num_zeros_in_grad=true", "logging.log_params_norm=true")
    more = (*logged, "train.exit_iteration=2", "train.eval_iters=0")
    Trainer(config(*SMALL, *model, *more, *layout), callbacks=[seen]).train()
    return seen


def orthogonalized(rank: int, world: int, options: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Shapes of the matrices that this rank made orthogonal, without those of the estimate of bytes (8 x 8)."""
    shapes: list[tuple[int, ...]] = []
    compute = muon.orthogonalize

    def recording(matrix: Tensor, steps: int, coefficients: MuonCoefficients) -> Tensor:
        shapes.append(tuple(matrix.shape))
        return compute(matrix, steps, coefficients)

    with mock.patch.object(muon, "orthogonalize", recording):
        run(rank, world, options)
    return [shape for shape in shapes if shape != (8, 8)]


def keep_the_part(rank: int, world: int, options: tuple[str, ...]) -> RunRecord | None:
    """Each rank makes its own rows or columns orthogonal, as if they were the matrix."""
    with (
        mock.patch.object(ShardedMatrix, "unshard", lambda self, part: part),
        mock.patch.object(ShardedMatrix, "shard", lambda self, whole: whole),
    ):
        return run(rank, world, options)


CASES = [
    (2, (*MUON, *WHOLE_QKV), (TP2,)),
    (4, (*MUON, *ONE_GROUP), (TP4,)),
    (4, (*MUON, *SHAPES), (TP2, SP, ZERO, SMALL_BUCKETS)),
    (4, (*MUON, *SHAPES), (FSDP, TP2, SP)),
    (4, MUON, (FSDP, INSTANCES)),
    (4, MUON, (FSDP, INSTANCES, OUTER)),
    (4, MUON, (CP2, ZERO)),
    (8, MUON, (PP2, TP2, SP, ZERO)),
    (2, (*MUON, MOE, TWO_SAMPLES), (TP2, SP, EP2, "parallel.expert_tensor_parallel_size=1")),
    (4, DECOUPLED, (TP2, ZERO)),
    (4, DECOUPLED, (PP2, FSDP)),
]
SHARDED = (*MUON, TP2, ZERO)
IN_PARTS = (*MUON, *WHOLE_QKV, TP2)
ZEROS = [(2, (FSDP,)), (4, (TP2, CP2)), (4, (ZERO, INSTANCES)), (4, (FSDP, INSTANCES, OUTER)), (4, (PP2, TP2, SP))]
MORE_ZEROS = [(8, (PP2, TP2, SP, ZERO))]
"""ZeRO with the axes that others have."""


RUNS = InTurn(
    called,
    [
        *((world, (run, (*options, *layout))) for world, options, layout in CASES),
        *((1, (run, options)) for _, options, _ in CASES),
        *((world, (count_zeros, layout)) for world, layout in ((1, ()), *ZEROS)),
        (1, (orthogonalized, MUON)),
        (4, (orthogonalized, SHARDED)),
        (2, (keep_the_part, IN_PARTS)),
    ],
)


def one_process(options: tuple[str, ...]) -> RunRecord:
    return RUNS.result(1, (run, options))


@pytest.mark.long
@pytest.mark.parametrize(("world", "options", "layout"), CASES, ids=joined)
def test_every_layout_takes_the_same_steps(world, options, layout) -> None:
    found = RUNS.result(world, (run, (*options, *layout)))
    assert [str(difference) for difference in compare(found, one_process(options)) if difference.too_large] == []


def test_each_matrix_is_made_orthogonal_by_one_rank() -> None:
    alone, ranks = RUNS.result(1, (orthogonalized, MUON)), RUNS.of_ranks(4, (orthogonalized, SHARDED))
    assert sorted(shape for shapes in ranks for shape in shapes) == sorted(alone)
    assert max(map(len, ranks)) <= len(alone) / 3


def test_a_part_made_orthogonal_by_itself_is_found() -> None:
    found = RUNS.result(2, (keep_the_part, IN_PARTS))
    assert any(difference.too_large for difference in compare(found, one_process((*MUON, *WHOLE_QKV))))


def resumed(rank: int, world: int, options: tuple[str, ...], folder: Path, steps: int) -> RunRecord | None:
    changed = [f"parallel.{key}" for key in config().config.parallel.model_dump()]
    options = (*options, f"checkpoint.accept_changes={json.dumps(changed)}")
    record = record_run(config(*SMALL, *options), steps, run_dir=folder)
    return record if rank == 0 else None


@pytest.mark.parametrize(("world", "layout"), [(2, (FSDP,)), (4, (FSDP, INSTANCES, OUTER))], ids=joined)
def test_the_momentum_goes_on_under_another_layout(world, layout, tmp_path) -> None:
    """Two steps under one layout and one under another are three of one process."""
    run_ranks(4, resumed, (*MUON, TP2, SP, ZERO, SMALL_BUCKETS), tmp_path, 2)
    found = run_ranks(world, resumed, (*MUON, *layout), tmp_path, 3)[0]
    reference = one_process(MUON)
    assert found.losses == pytest.approx(reference.losses[2:], rel=1e-5)
    assert found.rates == reference.rates[2:]
    assert found.samples == reference.samples[2:]
    # Only the weights remain to be compared.
    found = replace(reference, weights=found.weights)
    assert [str(difference) for difference in compare(found, reference) if difference.too_large] == []


@pytest.mark.parametrize(
    ("world", "layout"), [*ZEROS, *(pytest.param(*one, marks=EXHAUSTIVE) for one in MORE_ZEROS)], ids=joined
)
def test_zeros_of_the_gradient_and_the_norm_of_parameters_count_each_element_once(world, layout) -> None:
    """Exact up to the few elements that are 0 in one order of summing and not in another."""
    expected = RUNS.result(1, (count_zeros, ()))
    assert min(expected.zeros) > 300 * 32, "rows of ids that do not occur"
    assert expected.norms[-1] == pytest.approx(expected.plain, rel=1e-7)
    for found in RUNS.of_ranks(world, (count_zeros, layout)):
        assert found.zeros == pytest.approx(expected.zeros, abs=32)
        assert found.norms == pytest.approx(expected.norms, rel=1e-6)
