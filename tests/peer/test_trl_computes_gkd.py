"""The real TRL computes the divergences and gradients of distillation that we compute from the same logits."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.peer.environment import python_beside_this

from mt_core.nn.loss import weighted_mean
from mt_core.parallel.context import ParallelContext
from mt_tune.distill.config import DistillationConfig
from mt_tune.distill.objective import DistillationLoss, target_of_output

SCRIPT = Path(__file__).parent / "trl_process" / "gkd.py"
CASES = [(0.0, 1.0), (1.0, 1.0), (0.5, 0.9), (0.2, 2.0)]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("gkd")
    draw = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(2, 5, 23, generator=draw) * 3 for _ in range(2))
    labels = torch.randint(0, 23, (2, 5), generator=draw)
    labels[0, :2] = -100
    logits = {"student": student, "teacher": teacher, "labels": labels}
    save_file(logits, folder / "logits.safetensors")
    job = {"logits": str(folder / "logits.safetensors"), "cases": CASES, "out": str(folder / "found.safetensors")}
    (folder / "job.json").write_text(json.dumps(job))
    python = python_beside_this("trl>=1.16,<1.17", "accelerate", "datasets")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [str(python), str(SCRIPT), str(folder / "job.json")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return logits, load_file(folder / "found.safetensors")


@pytest.mark.parametrize("number", range(len(CASES)))
def test_trl_computes_the_same(judged: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]], number: int) -> None:
    logits, found = judged
    beta, temperature = CASES[number]
    kinds = {0.0: {"divergence": "forward_kl"}, 1.0: {"divergence": "reverse_kl"}}
    kind = kinds.get(beta, {"divergence": "jsd", "beta": beta})
    keys = DistillationConfig(teacher="t", temperature=temperature, temperature_squared=False, **kind)
    loss = DistillationLoss(keys, 0, ParallelContext())
    loss.teach = lambda batch: target_of_output(logits["teacher"])
    student = logits["student"].clone().requires_grad_()
    batch = {"labels": logits["labels"], "loss_mask": (logits["labels"] >= 0).float()}
    # TRL's default reduction: the sum over the positions that count, over their number.
    mean = weighted_mean(loss(student, batch), batch["loss_mask"])
    mean.backward()
    torch.testing.assert_close(mean.detach(), found[f"{number}.loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(student.grad, found[f"{number}.grad"], rtol=1e-4, atol=1e-6)
