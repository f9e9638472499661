"""Our optimizers against those of torch.optim, and what they must not import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mt_core.optim.configs import AdamConfig, SGDConfig
from mt_core.optim.optimizers import build_adam, build_sgd, param_groups

CASES = {
    "adam": (
        build_adam,
        AdamConfig(lr=0.01, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6),
        lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-6, fused=False, foreach=False),
    ),
    "sgd": (
        build_sgd,
        SGDConfig(lr=0.01, sgd_momentum=0.7),
        lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.7, fused=False, foreach=False),
    ),
    "sgd without momentum": (
        build_sgd,
        SGDConfig(lr=0.01, sgd_momentum=0.0),
        lambda groups: torch.optim.SGD(groups, lr=0.01, fused=False, foreach=False),
    ),
}


def named_parameters() -> list[tuple[str, torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (5, 7), "a.bias": (7,), "unused.weight": (2, 2), "norm.weight": (3,)}
    return [(name, torch.nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in shapes.items()]


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_equal_torchs(case) -> None:
    build, config, reference_of = CASES[case]
    mine, theirs = named_parameters(), named_parameters()
    optimizer = build(config, param_groups(mine, 0.1))
    reference = reference_of(param_groups(theirs, 0.1))
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        for (name, a), (_, b) in zip(mine, theirs, strict=True):
            if name != "unused.weight":
                a.grad = torch.randn(a.shape, generator=generator)
                b.grad = a.grad.clone()
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 0.01 * (step + 1)
        optimizer.step()
        reference.step()
    for (_, a), (_, b) in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
        for key, value in reference.state[b].items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(optimizer.state[a][key], value, atol=1e-6, rtol=1e-5)


def test_the_first_step_of_training_does_not_import_torchs_compiler() -> None:
    """It takes seconds to import, in every process."""
    program = """
import sys
from mt_core.config import load_config
from mt_core.train import Trainer
small = ["model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "data.seq_length=16"]
small += ["data.corpus_bytes=1000000", "train.train_iters=1", "train.eval_iters=0", "logging.progress=none"]
Trainer(load_config(preset="gpt-tiny", overrides=small)).train()
print([name for name in ("torch._dynamo", "torch._inductor", "transformers", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
