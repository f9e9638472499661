"""Generation beside training and over changes of weights: the same steps where nothing is stale, bounds, resuming."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.covering import EXHAUSTIVE
from tests.dist.in_turn import InTurn
from tests.dist.test_layouts import TP2, ZERO
from tests.tune.rl.runs import config
from tests.tune.rl.test_layouts import Lines, folder_of_all
from tests.tune.rl.test_rollouts import trained

from mt_core.errors import ConfigError, TrainingError
from mt_core.tensor_slice import TensorSlice
from mt_core.testing import RankFailureError, run_ranks
from mt_core.train import Trainer
from mt_core.train.checkpoint.local_shards import identity
from mt_infer.text import TextGenerator
from mt_tune.rl.drawing import Drawer
from mt_tune.rl.rollout_file import ROLLOUTS_FILE, read_rollouts
from mt_tune.rl.weight_hashes import element_numbers, fragment_hash, module_fragments

pytestmark = pytest.mark.slow
TWICE = ("rl.steps_per_generation=2", "train.train_iters=8", "train.eval_interval=3")
# Few sequences at a time, which begin at different steps, so that a generation ends while others are within one.
UNEVEN = ("inference.max_requests=3", "inference.max_tokens_per_step=6")
PARTIAL = ("rl.extra_groups=2", "rl.max_staleness=2", *UNEVEN)
AHEAD = ("rl.asynchronous=true", "rl.max_staleness=2")
BOTH = ("rl.asynchronous=true", "rl.extra_groups=2", "rl.max_staleness=4", *UNEVEN)
NAMES = ("loss", "grad_norm", "reward", "valid_reward", "sampling/staleness/mean")


def rollouts(folder: Path, run: str) -> list[Any]:
    return list(read_rollouts(folder / run / ROLLOUTS_FILE))


def test_asynchronous_generation_without_staleness_is_the_synchronous_one(tmp_path: Path) -> None:
    """Bit for bit, in a thread with a copy of the weights. 2 s"""
    threads: set[str] = set()
    draw = Drawer.draw

    def noted(self: Any, *arguments: Any) -> None:
        threads.add(threading.current_thread().name)
        draw(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drawer, "draw", noted)
        _, beside = trained(tmp_path, *TWICE, "rl.asynchronous=true", run="beside")
    assert any(name.startswith("generation") for name in threads)
    _, plain = trained(tmp_path, *TWICE, run="plain")
    for name in NAMES:
        assert [line.get(name) for line in beside] == [line.get(name) for line in plain]
    left_out = {"weights": None}
    assert [one | left_out for one in rollouts(tmp_path, "beside")] == [
        one | left_out for one in rollouts(tmp_path, "plain")
    ]
    # The copy's hash stands beside each completion; without a copy there is none.
    assert all(list(one["weights"]) == [str(one["step"] - 1)] for one in rollouts(tmp_path, "beside"))
    assert len({value for one in rollouts(tmp_path, "beside") for value in one["weights"].values()}) == 4
    assert all(one["weights"] == {} for one in rollouts(tmp_path, "plain"))


@pytest.mark.long
@pytest.mark.parametrize(("keys", "most"), [(PARTIAL, 2), (AHEAD, 2), (BOTH, 4)], ids=["partial", "ahead", "both"])
def test_stale_completions_are_within_the_bound_and_resumed(tmp_path: Path, keys: tuple[str, ...], most: int) -> None:
    """A stopped run continues with the groups in progress, those drawn ahead, and the next prompts. 4 s each"""
    keys = (*TWICE, *keys, "checkpoint.save_interval=1")
    _, whole = trained(tmp_path, *keys, run="whole")
    parts: list[Any] = []
    for last in (1, 4, None):
        stop = () if last is None else (f"train.exit_iteration={last}",)
        parts += trained(tmp_path, *keys, *stop, run="parts")[1]
    for name in NAMES:
        assert [line.get(name) for line in parts] == [line.get(name) for line in whole]
    found = rollouts(tmp_path, "whole")
    assert rollouts(tmp_path, "parts") == found
    ages = [one["step"] - 1 - one["versions"][0] for one in found]
    assert 0 < max(ages) <= most
    # Each prompt once, and no group without an end but those that the end of the run leaves.
    numbers = [one["prompt_number"] for one in found]
    assert sorted(numbers) == sorted(4 * [*set(numbers)])
    assert set(range(max(numbers) - 4)) <= set(numbers)
    if "rl.extra_groups=2" in keys:
        continued = [one for one in found if len(one["token_versions"]) > 1]
        assert continued
        for one in continued:
            assert sum(count for _, count in one["token_versions"]) == one["tokens"]


def test_a_preference_is_learnt_from_completions_of_older_weights(tmp_path: Path) -> None:
    """3 s"""
    length = ("train.train_iters=40", "train.global_batch_size=32", "train.micro_batch_size=16", "rl.patience=0")
    constant = "lr_schedule.lr_decay_style=constant"
    ahead = ("rl.asynchronous=true", "rl.max_staleness=1")
    _, lines = trained(tmp_path, *length, *ahead, constant, "optimizer.lr=0.02", reward="low")
    assert lines[0]["reward"] < 0.4
    assert lines[-1]["reward"] > 0.9
    assert lines[-1]["sampling/staleness/max"] == 1
    assert lines[5]["sampling/importance_sampling_ratio/mean"] != pytest.approx(1.0, abs=1e-4)


def test_a_copy_that_was_not_brought_up_to_date_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refit(self: TextGenerator, training: Any) -> None:
        self.engine.weights_changed()

    trainer = Trainer(config(tmp_path, "rl.generation_parallel={}", "optimizer.lr=0.1"), run_dir=tmp_path / "run")
    monkeypatch.setattr(TextGenerator, "refit", refit)
    with pytest.raises(TrainingError, match=r"after step 2 .*embedding.word_embeddings.weight.* tensors differ"):
        trainer.train()


def test_the_hash_of_a_tensor_is_the_sum_over_its_slices(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path))
    fragment = next(iter(module_fragments(trainer.model, trainer.ctx)))
    whole, tensor = fragment_hash(fragment), fragment.tensor()
    rows, columns = tensor.shape
    parts = 0
    for top, left in ((0, 0), (0, 5), (7, 0), (7, 5)):
        bottom, right = (7, rows)[top > 0], (5, columns)[left > 0]
        place = TensorSlice((top, left), (bottom - top, right - left))
        part = partial(identity, tensor[top:bottom, left:right])
        parts += fragment_hash(replace(fragment, tensor_slice=place, tensor=part))
    assert parts % (1 << 64) == whole
    numbers = element_numbers((1, 2), (2, 3), (4, 6), torch.device("cpu"))
    assert numbers.tolist() == np.arange(24).reshape(4, 6)[1:3, 2:5].tolist()
    with torch.no_grad():
        tensor[3, 3] += 1e-6
    assert fragment_hash(fragment) != whole


def staleness(rank: int, world: int, layout: tuple[str, ...]) -> Any:
    lines = Lines("loss", "sampling/staleness/max")
    Trainer(config(folder_of_all(world), *TWICE, *PARTIAL, *layout), callbacks=[lines]).train()
    return [line["sampling/staleness/max"] for line in lines.lines if "sampling/staleness/max" in line]


RANKS = {
    "dp": (),
    "tp": (TP2, "rl.generation_parallel={}"),
    "zero": (ZERO, "rl.generation_parallel={tensor_model_parallel_size = 2}"),
}
RUNS = InTurn(staleness, [(2, layout) for name, layout in RANKS.items() if name != "dp"])


@pytest.mark.dist
@pytest.mark.parametrize("layout", [pytest.param(name, marks=EXHAUSTIVE if name == "dp" else ()) for name in RANKS])
def test_ranks_agree_on_groups_in_progress(layout: str) -> None:
    """Each has the same batches, or collectives would not match; hashes of copies in other layouts are equal. 5 s

    Data parallelism alone is in ZeRO's case, too.
    """
    assert RUNS.result(2, RANKS[layout]) == [0, 2, 2, 2]


@pytest.mark.dist
def test_asynchronous_generation_is_of_one_process() -> None:
    with pytest.raises(RankFailureError, match="2 processes would mix the messages of both"):
        run_ranks(2, staleness, ("rl.asynchronous=true", "rl.extra_groups=2", "rl.max_staleness=4"))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("rl.max_staleness=1",), "has no effect"),
        (("rl.asynchronous=true", 'rl.tools=["judges:right"]'), "is in no checkpoint"),
        (("rl.extra_groups=1",), "give at least 1"),
        (("rl.extra_groups=1", "rl.asynchronous=true", "rl.max_staleness=1"), "give at least 2"),
        (("rl.extra_groups=3", "rl.max_staleness=1"), "above the 2 groups"),
        (("rl.asynchronous=true", "rl.max_staleness=1", "rl.sampling_correction=none"), "weighs"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, keys: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, *keys)
