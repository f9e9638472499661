"""Instances that share the optimizer's state: each rank has a part of it, and a run goes on under another layout."""

from __future__ import annotations

import pytest
import torch
from tests.dist.test_layouts import FSDP, config

from mt_core.errors import ConfigError
from mt_core.testing import run_ranks
from mt_core.train.trainer import Trainer

pytestmark = [pytest.mark.dist, pytest.mark.slow]

INSTANCES = "parallel.num_distributed_optimizer_instances=2"
OUTER = "parallel.outer_dp_sharding_strategy=optim"


def moments(rank: int, world: int, layout: tuple[str, ...]) -> tuple[int, int]:
    """Elements of weights, and of Adam's first moments, that the rank has after a step."""
    torch.set_num_threads(1)
    trainer = Trainer(config("train.exit_iteration=1", "train.eval_iters=0", *layout))
    trainer.train()
    engine = trainer.engine
    state = engine.step.optimizer.state.values()
    weights = sum(parameter.to_local().numel() for parameter in engine.model.parameters())
    return weights, sum(values["exp_avg"].numel() for values in state)


def test_instances_share_the_state() -> None:
    replicated, shared = (run_ranks(4, moments, (FSDP, INSTANCES, *more)) for more in ((), (OUTER,)))
    assert [weights for weights, _ in replicated] == [weights for weights, _ in shared]
    # Two instances of two ranks have the whole twice, or once together.
    assert sum(state for _, state in replicated) == 2 * sum(state for _, state in shared)
    assert max(state for _, state in shared) < 0.6 * max(state for _, state in replicated)


@pytest.mark.parametrize(
    ("keys", "words"),
    [((FSDP, OUTER), "set parallel.num_distributed_optimizer_instances too"), ((OUTER,), "use_torch_fsdp2")],
)
def test_without_instances_it_is_refused(keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        config(*keys)
