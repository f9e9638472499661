"""What sends the gradients of a program's own modules: the hooks that `DistributedDataParallelKwargs` names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mt_core.errors import ConfigError
from mt_core.testing import run_ranks

CASES = {
    "none": {},
    "bf16": {"comm_hook": "bf16"},
    # Of full rank the factors of a matrix are the matrix.
    "PowerSGD": {
        "comm_hook": "power_sgd",
        "comm_state_option": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2, "min_compression_rate": 0.1},
    },
    "PowerSGD in bf16": {
        "comm_hook": "power_sgd",
        "comm_wrapper": "bf16",
        "comm_state_option": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2, "min_compression_rate": 0.1},
    },
}


def gradients(rank: int, world_size: int) -> dict[str, list[float]]:
    """Case -> the gradient of a matrix after four passes, where PowerSGD has begun."""
    from mt_accelerate import Accelerator
    from mt_accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    found = {}
    for name, options in CASES.items():
        kinds = {
            key: DDPCommunicationHookType(value) if isinstance(value, str) else value for key, value in options.items()
        }
        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**kinds)])
        torch.manual_seed(0)
        model = accelerator.prepare(nn.Linear(4, 4, bias=False))
        inputs = torch.arange(16.0).reshape(4, 4).sin() * (rank + 1)
        for _ in range(4):
            model.zero_grad()
            accelerator.backward(model(inputs).pow(2).sum())
        found[name] = model.module.weight.grad.flatten().tolist()
    return found


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.slow
def test_every_hook_has_the_mean_of_the_ranks() -> None:
    first, second = run_ranks(2, gradients)
    assert first == second
    # By hand: the gradient of |xW'|^2 is 2 x'xW, and the ranks' inputs are x and 2x: the mean is (1 + 4) / 2 of x's.
    torch.manual_seed(0)
    weight, inputs = nn.Linear(4, 4, bias=False).weight.detach(), torch.arange(16.0).reshape(4, 4).sin()
    expected = (2.5 * 2 * weight @ inputs.T @ inputs).flatten().tolist()
    assert first["none"] == pytest.approx(expected, rel=1e-5)
    assert first["PowerSGD"] == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert first["bf16"] == pytest.approx(expected, abs=0.02 * max(map(abs, expected)))
    assert first["bf16"] != pytest.approx(expected, rel=1e-6)
    # PowerSGD's factors lose much in 16 bits; that the wrapper is there shows in numbers that bf16 has.
    wrapped = torch.tensor(first["PowerSGD in bf16"])
    assert torch.equal(wrapped, wrapped.bfloat16().float())
    assert not torch.equal(wrapped, torch.tensor(first["PowerSGD"]))


def test_another_wrapper_is_refused() -> None:
    from mt_accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    with pytest.raises(ConfigError, match="comm_wrapper='power_sgd'"):
        DistributedDataParallelKwargs(comm_wrapper=DDPCommunicationHookType.POWER_SGD)
