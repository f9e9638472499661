"""Distillation of what the student writes: which tokens count, what is minimized, layouts and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.tune.distill.runs import DISTILLED, SMALL
from tests.tune.rl.runs import SUMS

from mt_core.config import load_config
from mt_core.config.loading import LoadedConfig
from mt_core.errors import ConfigError
from mt_core.testing import run_ranks
from mt_core.train import Trainer

STILL = ("optimizer.lr=0.0", "optimizer.min_lr=0.0")
LEARNS = ("optimizer.lr=0.03", "lr_schedule.lr_warmup_iters=0")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in SUMS))
    return file


def settings(prompts: Path, *more: str) -> LoadedConfig:
    keys = (
        *(one for one in SMALL if not one.startswith("data.corpus_bytes")), *DISTILLED, "distillation.teacher=random",
        "data.dataset_type=prompts", f"data.data_path=[{json.dumps(str(prompts))}]", 'data.split="12,4,0"',
        "distillation.divergence=reverse_kl",
    )  # fmt: skip
    return load_config(preset="gpt-tiny", overrides=[*keys, *more])


def run_of(prompts: Path, *more: str, run_dir: Path | None = None) -> Trainer:
    on_policy = ("distillation.on_policy=true", "distillation.max_completion_length=5")
    return Trainer(settings(prompts, *on_policy, *more), run_dir=run_dir)


def test_the_teacher_scores_what_the_student_wrote(prompts: Path) -> None:
    """The batch has the prompt and the student's tokens, and the loss is the divergence at these alone."""
    trainer = run_of(prompts, *STILL, "train.train_iters=1", "distillation.sampling_temperature=0.7")
    batches = trainer.source.batches()
    batch = next(batches)
    batches.close()
    teacher, total, count = trainer.source.teaching.teacher.model, 0.0, 0  # type: ignore[attr-defined]
    for arrays in batch.micro_batches:
        mask = arrays["loss_mask"] > 0
        assert (mask.sum(1) >= 1).all()
        assert (mask.sum(1) <= 5).all()
        # A prompt is 4 bytes ("1+2=") behind what begins a document: the fourth predicts the first drawn token.
        assert not mask[:, :3].any()
        tokens = torch.from_numpy(arrays["tokens"])
        with torch.no_grad():
            p, q = (F.log_softmax(m.eval()(tokens=tokens).double(), -1) for m in (trainer.model, teacher))
        divergence = (p.exp() * (p - q)).sum(-1)
        total, count = total + float(divergence[torch.from_numpy(mask)].sum()), count + int(mask.sum())
    again = run_of(prompts, *STILL, "train.train_iters=1", "distillation.sampling_temperature=0.7")
    again.train()
    # The divergence of two random models is small, a difference of numbers that are not.
    assert again.recent_losses.to_list() == [pytest.approx(total / count, rel=1e-4)]


def test_a_student_comes_closer_to_its_teacher(prompts: Path) -> None:
    def divergence(*more: str) -> float:
        trainer = run_of(prompts, *more)
        trainer.train()
        return trainer.last_evaluation["valid_divergence"]

    assert divergence(*LEARNS, "train.train_iters=12") < 0.6 * divergence(*STILL, "train.train_iters=1")


def weights(trainer: Trainer) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in trainer.model.named_parameters()}


def test_a_resumed_run_is_one_that_was_not_interrupted(prompts: Path, tmp_path: Path) -> None:
    settings = (*LEARNS, "train.train_iters=4", "checkpoint.save_interval=2")
    whole = run_of(prompts, *settings, run_dir=tmp_path / "whole")
    whole.train()
    run_of(prompts, *settings, "train.exit_iteration=2", run_dir=tmp_path / "cut").train()
    resumed = run_of(prompts, *settings, run_dir=tmp_path / "cut")
    resumed.train()
    expected = weights(whole)
    assert all(np.array_equal(value, expected[name]) for name, value in weights(resumed).items())


LAYOUTS = (
    (), ("parallel.tensor_model_parallel_size=2",), ("parallel.pipeline_model_parallel_size=2",),
    ("parallel.use_torch_fsdp2=true",), ("distillation.teacher_parallel.tensor_model_parallel_size=2",),
)  # fmt: skip


def evaluated_in(rank: int, world: int, prompts: str) -> list[dict[str, float]]:
    found = []
    for layout in LAYOUTS:
        trainer = run_of(Path(prompts), *LEARNS, *layout)
        trainer.train()
        found.append(trainer.last_evaluation)
    return found


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_compute_what_one_does(prompts: Path) -> None:
    """About 8 s: five layouts."""
    alone = run_of(prompts, *LEARNS)
    alone.train()
    for of_rank in run_ranks(2, evaluated_in, str(prompts)):
        for layout, values in zip(LAYOUTS, of_rank, strict=True):
            assert values == pytest.approx(alone.last_evaluation, rel=1e-3), layout


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("distillation.on_policy=true", "distillation.cache=x", "distillation.top_k=4"), "in no cache"),
        (("distillation.on_policy=true", "distillation.alpha=0.5"), "learns nothing"),
        ((), "on_policy=true, which completes them"),
    ],
)
def test_settings_that_contradict_are_refused(prompts: Path, more: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(prompts, *more)
