"""The real TRL computes the losses, gradients and group advantages of GRPO and its relatives that we compute from the
same completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.peer.test_trl_computes import models_in, require_equal_gradients, run_trl, save_model

from mt_core.nn.loss import build_cross_entropy
from mt_core.parallel.context import ParallelContext
from mt_tune.rl.advantages import ADVANTAGE_FUNCTIONS, Scored
from mt_tune.rl.config import RLConfig
from mt_tune.rl.objective import PolicyLoss
from mt_tune.rl.rows import Row, stacked
from mt_tune.rl.samples import ADVANTAGES, OLD_LOGPS, REFERENCE_LOGPS

LONGEST, GROUP, BETA = 6, 3, 0.2
COMPLETIONS = [
    ([3, 7, 9], [5, 6, 11, 1]),
    ([3, 7, 9], [8, 1]),
    ([3, 7, 9], [9, 9, 12, 13, 14, 15]),
    ([4, 4], [10, 12, 1]),
    ([4, 4], [13]),
    ([4, 4], [30, 31, 32, 33, 1]),
]
REWARDS = [1.0, 0.0, 0.25, 2.0, -1.0, 0.5]
ADVANTAGE = [0.9, -1.3, 0.4, -0.2, 1.1, -0.9]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # TRL's options, ours, and over what the mean is taken.
    "grpo": ({"loss_type": "grpo"}, {}, "sequences"),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"epsilon_high": 0.28}, "tokens"),
    "bnpo": ({"loss_type": "bnpo"}, {}, "tokens"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {}, "constant"),
    "delta": ({"loss_type": "grpo", "delta": 1.5}, {"delta": 1.5}, "sequences"),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, {"loss": "cispo", "epsilon_high": 1.3}, "tokens"),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"loss": "gspo"}, "sequences"),
    "sapo": ({"loss_type": "sapo"}, {"loss": "sapo"}, "sequences"),
    "reference": ({"loss_type": "grpo", "beta": BETA}, {"beta": BETA}, "sequences"),
}
SCALES = {"group": "grpo", "none": "dr_grpo", "batch": "grpo_batch"}
CLIPPED = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


def completion_logps(model: transformers.PreTrainedModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    whole = torch.tensor([[*prompt, *completion]])
    logps = model(input_ids=whole[:, :-1]).logits.log_softmax(-1).gather(-1, whole[:, 1:, None])
    return logps[0, len(prompt) - 1 :, 0]


@torch.no_grad()
def samples_of(folder: Path) -> list[Any]:
    """With an old policy near the policy, so that some ratios are clipped, and a reference."""
    policy, reference = save_model(folder / "near", 1), save_model(folder / "other", 2)
    generator = torch.Generator().manual_seed(5)
    samples = []
    for prompt, completion in COMPLETIONS:
        now = completion_logps(policy, prompt, completion)
        old = now + 0.4 * torch.randn(now.shape, generator=generator)
        samples.append([prompt, completion, old.tolist(), completion_logps(reference, prompt, completion).tolist()])
    return samples


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("grpo")
    samples = samples_of(folder)
    cases = [[theirs, ADVANTAGE] for theirs, _, _ in CASES.values()]
    job = {"samples": samples, "cases": cases, "groups": GROUP, "longest": LONGEST}
    return folder, samples, run_trl("grpo.py", {**job, "rewards": REWARDS, "scales": list(SCALES)}, folder)


def batch_of(samples: list[Any]) -> dict[str, torch.Tensor]:
    """[6, S]: the rows that generation makes of completions."""
    rows = []
    for (prompt, completion, old, reference), advantage in zip(samples, ADVANTAGE, strict=True):
        fields = {OLD_LOGPS: old, REFERENCE_LOGPS: reference, ADVANTAGES: [advantage] * len(completion)}
        values = {name: np.array(value, np.float32) for name, value in fields.items()}
        rows.append(Row(prompt, completion, [1] * len(completion), old, values=values))
    return {name: torch.from_numpy(array) for name, array in stacked(rows, 12).items()}


def mean_of(losses: torch.Tensor, mask: torch.Tensor, normalization: str) -> torch.Tensor:
    if normalization == "sequences":
        return ((losses * mask).sum(1) / mask.sum(1)).mean()
    return (losses * mask).sum() / (mask.sum() if normalization == "tokens" else len(mask) * LONGEST)


@pytest.mark.parametrize("name", CASES)
def test_trl_computes_the_same(computed: tuple[Path, list[Any], dict[str, torch.Tensor]], name: str) -> None:
    folder, samples, found = computed
    number, (_, ours, normalization) = list(CASES).index(name), CASES[name]
    policy, _ = models_in(folder)
    batch, parallel = batch_of(samples), ParallelContext()
    if "beta" not in ours:
        del batch[REFERENCE_LOGPS]
    loss = PolicyLoss(RLConfig(**ours), build_cross_entropy(None, None), parallel)  # type: ignore[arg-type]
    # Padding is behind the tokens, which do not attend to it.
    mean = mean_of(loss(policy(input_ids=batch["tokens"]).logits, batch), batch["loss_mask"], normalization)
    mean.backward()
    torch.testing.assert_close(mean.detach(), found[f"{number}.loss"], rtol=1e-5, atol=1e-6)
    require_equal_gradients(policy, found, number)
    recorded = {metric: value for metric, value, _ in loss.take_recorded()}
    # TRL has one value for each completion of sequence ratios, and none of clips for cispo and sapo.
    shared = ("entropy", *CLIPPED) if normal_clip(ours) else ("entropy",)
    for metric in shared:
        assert recorded[metric] == pytest.approx(float(found[f"{number}.metric.{metric}"]), rel=1e-4), metric
    assert not normal_clip(ours) or recorded["clip_ratio/region_mean"] > 0.0


def normal_clip(ours: dict[str, Any]) -> bool:
    return "loss" not in ours and "delta" not in ours


@pytest.mark.parametrize("scale", SCALES)
def test_trl_has_the_same_advantages(computed: tuple[Path, list[Any], dict[str, torch.Tensor]], scale: str) -> None:
    _, _, found = computed
    rewards = np.array(REWARDS, np.float64).reshape(-1, GROUP)
    scored = Scored(rewards, np.ones_like(rewards), [np.zeros(1)] * rewards.size)
    ours = torch.tensor([float(values[0]) for values in ADVANTAGE_FUNCTIONS[SCALES[scale]](scored)])
    torch.testing.assert_close(ours, found[f"{list(SCALES).index(scale)}.advantages"], rtol=1e-5, atol=1e-6)
