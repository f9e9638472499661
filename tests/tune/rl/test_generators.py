"""Completions by processes of their own: the steps of generation in the processes that train, staleness, failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.dist.in_turn import InTurn
from tests.dist.test_layouts import EP2, FSDP, PP2, TP2
from tests.tune.environments import counting
from tests.tune.rl.runs import config
from tests.tune.rl.test_layouts import Lines, folder_of_all
from tests.tune.rl.test_rollouts import trained
from tests.tune.rl.test_routing_replay import MIXTURE, REPLAY

from mt_core.errors import ConfigError, TrainingError
from mt_core.train import Callback, Trainer
from mt_core.train.callbacks import Run
from mt_tune.rl.generators import placement
from mt_tune.rl.generators.generator_drawer import GeneratorDrawer
from mt_tune.rl.generators.placement import Placement
from mt_tune.rl.generators.weight_transfer import WeightSender
from mt_tune.rl.rollout_file import ROLLOUTS_FILE, read_rollouts
from mt_tune.rl.source import RolloutSource

pytestmark = [pytest.mark.slow, pytest.mark.dist]
NAMES = ("loss", "grad_norm", "reward", "valid_reward", "sampling/importance_sampling_ratio/max")
EXACT, TWICE = "numerics.batch_invariant=true", "train.eval_interval=2"
BF16 = "precision.dtype=bf16"
ONE, TWO = "rl.generator_processes=1", "rl.generator_processes=2"


def rollouts(folder: Path, run: str, **left_out: None) -> list[Any]:
    return [{**one, **left_out} for one in read_rollouts(folder / run / ROLLOUTS_FILE)]


@pytest.mark.parametrize("ahead", [(), ("rl.asynchronous=true",)], ids=["", "asynchronous"])
def test_a_generator_draws_what_training_would_draw(tmp_path: Path, ahead: tuple[str, ...]) -> None:
    """Bit for bit, with an evaluation in between; the hash of the copy stands beside each completion. 4 s each"""
    _, plain = trained(tmp_path, EXACT, TWICE, run="plain")
    _, beside = trained(tmp_path, EXACT, TWICE, ONE, *ahead, run="beside")
    for name in NAMES:
        assert [line.get(name) for line in beside] == [line.get(name) for line in plain]
    assert rollouts(tmp_path, "beside", weights=None) == rollouts(tmp_path, "plain", weights=None)
    assert all(list(one["weights"]) == [str(one["step"] - 1)] for one in rollouts(tmp_path, "beside"))


@pytest.mark.long
def test_conversations_are_held_where_completions_are_drawn(tmp_path: Path) -> None:
    """4 s"""
    keys = (
        EXACT,
        "data.seq_length=64",
        "rl.max_completion_length=40",
        "data.prompt_format=user_message",
        "data.chat_template=plain",
        'rl.environments=["counting:Echo"]',
        f"rewards.modules=[{json.dumps(str(Path(counting.__file__)))}]",
        "rewards.functions=[]",
        "rl.environment_processes=2",
        "train.train_iters=2",
        "rl.patience=0",
    )
    trained(tmp_path, *keys, run="plain")
    trained(tmp_path, *keys, ONE, run="beside")
    found = rollouts(tmp_path, "beside", weights=None)
    assert found == rollouts(tmp_path, "plain", weights=None)
    assert any(one["reward"] for one in found)


# -- several processes train ------------------------------------------------------------------------------


def of_layout(rank: int, world: int, keys: tuple[str, ...]) -> Any:
    """Lines of the log, and what was drawn."""
    lines, folder = Lines(*NAMES), folder_of_all(world)
    with pytest.MonkeyPatch.context() as patch:
        if TWO in keys and PP2 in keys:
            # Each process is on a node of its own, and starts one generator.
            patch.setenv("MASTER_ADDR", "127.0.0.1")
            patch.setattr(placement, "host_name", lambda: f"node-{rank}")
        loaded = config(folder, EXACT, "train.train_iters=2", *keys)
        trainer = Trainer(loaded, run_dir=folder / "run", callbacks=[lines])
    trainer.train()
    return lines.lines, rollouts(folder, "run", weights=None, source=None)


MOE = (*MIXTURE, EP2)
LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tp to tp": (
        (TP2, "rl.generation_parallel={tensor_model_parallel_size = 2}"),
        (TP2, "rl.generation_parallel={tensor_model_parallel_size = 2}", TWO),
    ),
    "fsdp to one": ((FSDP, BF16), (FSDP, BF16, ONE)),
    "ep to one": ((*MOE, *REPLAY, "rl.generation_parallel={}"), (*MOE, *REPLAY, ONE)),
    "pp to dp on two nodes": ((PP2, "rl.generation_parallel={}"), (PP2, TWO)),
}
"""In the processes that train with a copy of the weights, and in others."""
RUNS = InTurn(of_layout, *([(2, keys) for keys in pair] for pair in LAYOUTS.values()))


IN_CI = ("tp to tp", "pp to dp on two nodes")
"""Programs of four processes; the others have three."""


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=pytest.mark.long if one in IN_CI else ()) for one in LAYOUTS]
)
def test_weights_come_from_every_layout(layout: str) -> None:
    """35 s for all."""
    here, there = (RUNS.result(2, keys) for keys in LAYOUTS[layout])
    assert there == here


STALE = ("rl.asynchronous=true", "rl.extra_groups=2", "rl.max_staleness=4", "rl.steps_per_generation=2")
UNEVEN = ("inference.max_requests=3", "inference.max_tokens_per_step=6")


def in_parts(rank: int, world: int, last_steps: tuple[int | None, ...]) -> Any:
    lines, folder = Lines("loss", "grad_norm", "sampling/staleness/max"), folder_of_all(world)
    for last in last_steps:
        stop = () if last is None else (f"train.exit_iteration={last}",)
        keys = (*STALE, *UNEVEN, ONE, "train.train_iters=8", "checkpoint.save_interval=1", *stop)
        Trainer(config(folder, *keys), run_dir=folder / "run", callbacks=[lines]).train()
    return lines.lines, rollouts(folder, "run", source=None)


PARTS = InTurn(in_parts, [(2, (None,))], [(2, (3, None))])


@pytest.mark.long
def test_several_processes_train_while_completions_are_drawn() -> None:
    """Within the bound of staleness, over changes of the weights, and resumed with what was in progress. 12 s"""
    whole, drawn = PARTS.result(2, (None,))
    assert PARTS.result(2, (3, None)) == (whole, drawn)
    ages = [one["step"] - 1 - one["versions"][0] for one in drawn]
    assert 2 < max(ages) <= 4
    assert any(len(one["token_versions"]) > 1 for one in drawn)


# -- failures ---------------------------------------------------------------------------------------------


class AfterFirstStep(Callback):
    def __init__(self, act: Callable[[GeneratorDrawer], None]) -> None:
        self.act = act

    def on_step_end(self, run: Run, *_: Any) -> None:
        source = cast(Trainer, run).source
        assert isinstance(source, RolloutSource)
        assert isinstance(source.collector.drawer, GeneratorDrawer)
        self.act(source.collector.drawer)


def kill(drawer: GeneratorDrawer) -> None:
    drawer.processes.started[0].process.kill()


def test_a_generator_that_ends_stops_the_run(tmp_path: Path) -> None:
    """3 s"""
    trainer = Trainer(config(tmp_path, ONE), callbacks=[AfterFirstStep(kill)])
    drawer: Any = trainer.source.collector.drawer  # type: ignore[attr-defined]
    (started,) = drawer.processes.started
    with pytest.raises(TrainingError, match=r"generator 0 \(process \d+\) was ended by signal 9.* last checkpoint"):
        trainer.train()
    assert started.process.returncode == -9
    assert drawer.processes.started == []


def test_weights_that_arrive_as_others_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 s"""
    part = WeightSender._part

    def damaged(self: Any, fragments: Any, copy: Any) -> torch.Tensor:
        sent = part(self, fragments, copy).clone()
        return sent + 1e-6 if copy.name == "embedding.word_embeddings.weight" else sent

    monkeypatch.setattr(WeightSender, "_part", damaged)
    with pytest.raises(TrainingError, match="after step 0 .*: embedding.word_embeddings.weight of"):
        Trainer(config(tmp_path, ONE))


def test_what_a_generator_refuses_is_said_by_training(tmp_path: Path) -> None:
    """3 s"""
    layout = "rl.generation_parallel={tensor_model_parallel_size = 2}"
    with pytest.raises(ConfigError, match="does not divide the 1 processes"):
        Trainer(config(tmp_path, ONE, layout))


@pytest.mark.long
def test_generators_are_divided_over_nodes() -> None:
    place = Placement(starters=(0, 4), each=2, address="first", first_device=4)
    assert [list(place.ranks_of(rank)) for rank in (0, 1, 4)] == [[0, 1], [], [2, 3]]
    assert [place.device_of(rank, "cuda") for rank in range(4)] == ["cuda:4", "cuda:5", "cuda:4", "cuda:5"]
