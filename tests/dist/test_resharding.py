"""A run saved under one layout goes on under another: its weights are those of the run that was never resharded.

Each pair trains a step under the first layout, saves, and trains another in new processes under the second, with the
optimizer's moments of the first. The reference trains both steps in one process.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from mt_core.config.loading import load_config
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train import Trainer
from mt_core.train.checkpoint.state import MODEL
from mt_core.train.checkpoint.write_plan import collect

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 1
TOLERANCE = 1e-6
"""Relative, in fp32, after two steps."""
SETTINGS = (
    "model.num_layers=4",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.vocab_size=263",
    "data.dataset_type=builtin",
    "data.corpus_bytes=1000000",
    "data.seq_length=16",
    "train.global_batch_size=4",
    "train.train_iters=2",
    "train.eval_interval=null",
    "train.eval_iters=0",
    "train.device=cpu",
    # Adam makes a full step out of a gradient that is 0 but for rounding, unless eps is larger than the rounding.
    "optimizer.adam_eps=1e-4",
    "lr_schedule.lr_decay_style=constant",
    "checkpoint.save_interval=null",
    "logging.progress=none",
)
MOE = "model.moe={num_experts = 4, moe_router_topk = 2}"
TP2, TP4 = "tensor_model_parallel_size=2", "tensor_model_parallel_size=4"
SP = "sequence_parallel=true"
PP2 = "pipeline_model_parallel_size=2"
VPP = "pipeline_schedule=interleaved_1f1b"
CP2 = "context_parallel_size=2"
EP2, EP4 = "expert_model_parallel_size=2", "expert_model_parallel_size=4"
ZERO, BUCKETS = "use_distributed_optimizer=true", "ddp_bucket_size=3000"
FSDP = "use_torch_fsdp2=true"


@dataclass(frozen=True)
class Layout:
    name: str
    world: int
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


DENSE = (
    Layout("one", 1),
    Layout("dp2", 2, (BUCKETS,)),
    Layout("tp2", 2, (TP2,)),
    Layout("tp4-sp", 4, (TP4, SP)),
    Layout("pp2", 2, (PP2,)),
    Layout("pp2-vpp2", 2, (PP2, VPP)),
    Layout("cp2", 2, (CP2,)),
    Layout("zero2", 2, (ZERO, BUCKETS)),
    Layout("fsdp4", 4, (FSDP,)),
    Layout("tp2-sp-pp2", 4, (TP2, SP, PP2)),
    Layout("tp2-sp-zero2", 4, (TP2, SP, ZERO, BUCKETS)),
    Layout("pp2-cp2-zero", 4, (PP2, CP2, ZERO, BUCKETS)),
)
EXPERTS = (
    Layout("one", 1),
    Layout("ep2", 2, (EP2,)),
    Layout("ep4", 4, (EP4,)),
    Layout("ep2-tp2-sp", 4, (EP2, TP2, SP)),
    Layout("ep2-pp2", 4, (EP2, PP2)),
    Layout("ep2-zero4", 4, (EP2, ZERO, BUCKETS)),
    Layout("ep2-fsdp2", 4, (EP2, FSDP)),
)
BY_NAME = {(): {layout.name: layout for layout in DENSE}, (MOE,): {layout.name: layout for layout in EXPERTS}}
Model = tuple[str, ...]
Weights = Mapping[str, Tensor]
Pair = tuple[Layout, Layout]
"""Saved under, loaded under."""


IN_OTHERS = {"tp2", "pp2", "cp2", "ep4"}
"""Layouts of one axis, which others have with more."""


def ring(model: Model) -> list[Pair]:
    """Each layout of the model, but for those in others, once on either side."""
    layouts = [layout for name, layout in BY_NAME[model].items() if name not in IN_OTHERS]
    # A distance that is prime to both lengths: neighbours in the list are alike.
    return [(layout, layouts[(number + 5) % len(layouts)]) for number, layout in enumerate(layouts)]


def further_pairs() -> Iterator[object]:
    """(model, saved under, loaded under) of all that no ring has."""
    for model, layouts in BY_NAME.items():
        for first, second in product(layouts.values(), repeat=2):
            if first != second and (first, second) not in ring(model):
                yield pytest.param(model, first, second, id=f"{label_of(model)}-{first}-to-{second}")


def label_of(model: Model) -> str:
    return "experts" if model else "dense"


QUICK = {"tp2-sp-zero2", "ep2-fsdp2"}


def same_pairs() -> Iterator[object]:
    """Those that the test of the rings has not."""
    for model, layouts in BY_NAME.items():
        for name, layout in layouts.items():
            if name not in QUICK:
                yield pytest.param(model, layout, id=f"{label_of(model)}-{name}")


@dataclass(frozen=True)
class Training:
    """Until `steps` steps are done, from the checkpoint of run_dir if it has one."""

    model: Model
    layout: Layout
    steps: int
    run_dir: Path | None = None


def train(rank: int, world: int, training: Training) -> dict[str, Tensor]:
    """The first rank's weights, if all steps are done."""
    torch.set_num_threads(1)
    host = load_plugins()
    settings = [*SETTINGS, *settings_of(training.model, training.layout), f"train.exit_iteration={training.steps}"]
    config = load_config(preset="gpt-tiny", overrides=settings, host=host)
    trainer = Trainer(config, host=host, run_dir=training.run_dir)
    assert trainer.train().state.iteration == training.steps
    if training.steps < 2 * STEPS:
        return {}
    # Collected to canonical tensors: comparable whatever the layout.
    weights = [fragment for fragment in trainer.checkpointed().fragments() if fragment.name.startswith(MODEL)]
    return {name: tensor for name, tensor in collect(weights, trainer.ctx) if rank == 0}


def train_in_turn(rank: int, world: int, trainings: Sequence[Training]) -> list[dict[str, Tensor]]:
    return [train(rank, world, training) for training in trainings]


def weights_of(trainings: Sequence[Training]) -> dict[Training, Weights]:
    """Those on as many ranks have the same processes, one after another."""
    found: dict[Training, Weights] = {}
    for world in {training.layout.world for training in trainings}:
        alike = [training for training in trainings if training.layout.world == world]
        found |= zip(alike, run_ranks(world, train_in_turn, alike, timeout=400)[0], strict=True)
    return found


def settings_of(model: Model, layout: Layout) -> tuple[str, ...]:
    changed = ["train.micro_batch_size", "train.exit_iteration"]
    keys = [*changed, *(f"parallel.{key.partition('=')[0]}" for key in ALL_KEYS)]
    # Two samples at once halve what a layout communicates. Losses of balance are those of a micro-batch, and four
    # replicas have one sample each.
    at_once = 1 if model or FSDP in layout.keys else 2
    samples = f"train.micro_batch_size={at_once}"
    return (*model, *(f"parallel.{key}" for key in layout.keys), samples, f"checkpoint.accept_changes={keys!r}")


def weights_after(training: Training) -> Weights:
    return weights_of([training])[training]


ALL_KEYS = sorted({key for layouts in BY_NAME.values() for layout in layouts.values() for key in layout.keys})


@dataclass(frozen=True)
class Runs:
    """The weights after all steps: in one go, and by the layouts before and after the checkpoint half-way."""

    whole: Mapping[Layout, Weights]
    resumed: Mapping[Pair, Weights]


@cache
def default_runs(model: Model) -> Runs:
    """Those around the ring, and those that go on under the same layout: first halves and whole runs on as many ranks
    in the same processes, and the other halves in new ones."""
    pairs = [*ring(model), *((layout, layout) for layout in quick(model))]
    whole = [Training(model, layout, 2 * STEPS) for layout in (BY_NAME[model]["one"], *quick(model))]
    with TemporaryDirectory(prefix="mt-resharding-") as folder:
        numbered = [(Path(folder, str(number)), *pair) for number, pair in enumerate(pairs)]
        found = weights_of([*(Training(model, first, STEPS, run) for run, first, _ in numbered), *whole])
        others = [Training(model, second, 2 * STEPS, run) for run, _, second in numbered]
        resumed = weights_of(others)
    return Runs(
        {training.layout: found[training] for training in whole},
        dict(zip(pairs, [resumed[training] for training in others], strict=True)),
    )


def quick(model: Model) -> list[Layout]:
    return [layout for name, layout in BY_NAME[model].items() if name in QUICK]


@cache
def whole_run(model: Model, layout: Layout) -> Weights:
    """The weights after all steps in one go."""
    by_default = layout.world == 1 or layout.name in QUICK
    return default_runs(model).whole[layout] if by_default else weights_after(Training(model, layout, 2 * STEPS))


@pytest.fixture(scope="module")
def saved_under() -> Iterator[object]:
    """A function from a model and a layout to a run directory with the checkpoint half-way, made once."""
    with TemporaryDirectory(prefix="mt-resharding-") as folder:

        @cache
        def save(model: Model, layout: Layout) -> Path:
            path = Path(folder) / f"{len(model)}-{layout.name}"
            weights_after(Training(model, layout, STEPS, path))
            return path

        yield save


def go_on(run: Path, model: Model, layout: Layout, folder: Path) -> Weights:
    """The other half, on a copy of the run."""
    # The run is shared by tests, and continuing writes to it.
    shutil.copytree(run, folder / "run")
    return weights_after(Training(model, layout, 2 * STEPS, folder / "run"))


@pytest.mark.parametrize("model", BY_NAME, ids=label_of)
def test_runs_resharded_around_a_ring_are_the_unresharded_one(model: Model) -> None:
    """And those that go on under the same layout, to the last bit."""
    for (first, second), found in default_runs(model).resumed.items():
        if first == second:
            require_same_bits(found, whole_run(model, first), str(first))
        else:
            require_unresharded(found, model, f"{first} to {second}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "first", "second"), list(further_pairs()))
def test_a_resharded_run_is_the_unresharded_one(model, first, second, saved_under, tmp_path: Path) -> None:
    found = go_on(saved_under(model, first), model, second, tmp_path)
    require_unresharded(found, model, f"{first} to {second}")


def require_unresharded(found: Weights, model: Model, label: str) -> None:
    reference = whole_run(model, BY_NAME[model]["one"])
    assert found.keys() == reference.keys(), label
    for name, weight in reference.items():
        off = float((found[name] - weight).norm() / weight.norm().clamp(min=1e-12))
        assert off < TOLERANCE, f"{label}: {name} differs by {off:.1e}"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "layout"), list(same_pairs()))
def test_the_same_layout_goes_on_bit_for_bit(model, layout, saved_under, tmp_path: Path) -> None:
    found = go_on(saved_under(model, layout), model, layout, tmp_path)
    require_same_bits(found, whole_run(model, layout), str(layout))


def require_same_bits(found: Weights, reference: Weights, label: str) -> None:
    assert found.keys() == reference.keys(), label
    assert [name for name in reference if not torch.equal(found[name], reference[name])] == [], label


def test_a_ring_saves_and_loads_every_layout() -> None:
    for model, layouts in BY_NAME.items():
        for side in zip(*ring(model), strict=True):
            assert set(side) == {layout for name, layout in layouts.items() if name not in IN_OTHERS}
        assert all(first != second for first, second in ring(model))
