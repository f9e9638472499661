"""Reinforcement learning in layouts of several processes takes the steps that one process takes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.covering import EXHAUSTIVE
from tests.dist.in_turn import InTurn
from tests.dist.test_layouts import CP2, FSDP, PP2, SP, TP2, ZERO
from tests.tune.rl.runs import config, write_task

from mt_core.train import Callback, Trainer

pytestmark = [pytest.mark.dist, pytest.mark.slow]

UPDATES = ("rl.steps_per_generation=2", "rl.num_iterations=2", "train.train_iters=4")
LOSSES = {"clip": (), "gspo": ("rl.loss=gspo", "train.loss_normalization=sequences", *UPDATES)}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "dp": (),
    "tp-sp": (TP2, SP),
    "pp": (PP2,),
    "cp": (CP2,),
    "zero": (ZERO,),
    "fsdp": (FSDP,),
    "tp, generation by itself": (TP2, "rl.generation_parallel={}"),
}
NAMES = ("loss", "grad_norm", "reward", "entropy", "completions/mean_length")


class Lines(Callback):
    def __init__(self, *names: str) -> None:
        self.names = names or NAMES
        self.lines: list[Any] = []

    def on_log(self, run: Any, metrics: Any) -> None:
        # Rewards stand in the line of the step before which completions were drawn.
        self.lines.append({name: metrics[name] for name in self.names if name in metrics})


def folder_of_all(world: int) -> Path:
    """The same on all ranks, with the files written."""
    folders = [tempfile.mkdtemp()]
    if world > 1:
        dist.broadcast_object_list(folders)
        if dist.get_rank() == 0:
            write_task(Path(folders[0]))
        dist.barrier()
    return Path(folders[0])


def trained(rank: int, world: int, case: tuple[str, str]) -> Any:
    layout, loss = case
    lines = Lines()
    keys = ("train.micro_batch_size=2", *LOSSES[loss], *LAYOUTS[layout])
    trainer = Trainer(config(folder_of_all(world), *keys), callbacks=[lines])
    trainer.train()
    return lines.lines, trainer.last_evaluation["valid_reward"]


CASES = [
    *((layout, "clip") for layout in ("dp", "tp-sp", "cp", "zero")),
    *((layout, "gspo") for layout in ("dp", "pp", "fsdp", "cp", "tp, generation by itself")),
]
"""GSPO's ratio is of a sequence, whose positions context parallelism divides."""
MORE_CASES = [
    (layout, loss) for layout in LAYOUTS if layout != "one process" for loss in LOSSES if (layout, loss) not in CASES
]
"""The other loss, which does not know of these layouts."""
RUNS = InTurn(
    trained,
    [(1, ("one process", loss)) for loss in LOSSES],
    *([(2, case) for case in cases] for cases in (CASES, MORE_CASES)),
)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id="-".join(case)) for case in CASES),
        *(pytest.param(case, id="-".join(case), marks=EXHAUSTIVE) for case in MORE_CASES),
    ],
)
def test_a_layout_takes_the_steps_of_one_process(case: tuple[str, str]) -> None:
    """10 s for all, which share processes."""
    expected, reward = RUNS.result(1, ("one process", case[1]))
    found, found_reward = RUNS.result(2, case)
    assert found_reward == pytest.approx(reward, abs=1e-6)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-3, abs=2e-6)


def ratios(rank: int, world: int, layout: str) -> Any:
    found: list[float] = []

    class Ratios(Callback):
        def on_log(self, run: Any, metrics: Any) -> None:
            found.extend(metrics[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max"))

    keys = ("numerics.batch_invariant=true", *INVARIANT[layout])
    Trainer(config(folder_of_all(world), *keys), callbacks=[Ratios()]).train()
    return found


INVARIANT: dict[str, tuple[str, ...]] = {
    "dp": (),
    "tp": (TP2,),
    "pp": (PP2,),
    "pp, generation in dp": (PP2, "rl.generation_parallel={}"),
    "tp, generation in tp": (TP2, "rl.generation_parallel={tensor_model_parallel_size = 2}"),
}
ALSO_IN_ANOTHER = ("tp", "pp")
"""Layouts whose training is in another case too; tests/infer/test_verify_generation.py has their generation."""
RATIOS = InTurn(
    ratios, *([(2, name) for name in INVARIANT if (name in ALSO_IN_ANOTHER) == more] for more in (False, True))
)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=EXHAUSTIVE if name in ALSO_IN_ANOTHER else ()) for name in INVARIANT],
)
def test_the_ratio_to_generation_is_exactly_one(layout: str) -> None:
    """5 s for all."""
    found = RATIOS.result(2, layout)
    assert found == [1.0] * 9
