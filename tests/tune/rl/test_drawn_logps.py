"""Logits of drawn tokens alone give the log-probabilities, entropies and gradients of logits of all positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tune.rl.runs import config

from mt_core.nn.loss import Unprojected
from mt_core.train import Trainer
from mt_tune.rl.objective import PolicyLoss
from mt_tune.rl.samples import SAMPLED
from mt_tune.rl.token_numbers import policy_scorer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("width", [8, 16], ids=["most positions drawn", "few"])
def test_they_are_those_of_all_logits(tmp_path: Path, width: int) -> None:
    trainer = Trainer(config(tmp_path, "rl.temperature=0.7"))
    loss = trainer.engine.loss
    assert isinstance(loss, PolicyLoss)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (2, width), generator=generator)
    labels, drawn = torch.randint(0, 256, (2, width), generator=generator), torch.ones(2, width)
    drawn[:, : width - 7] = 0.0
    batch = {"labels": labels, SAMPLED: drawn}
    outputs = trainer.model(tokens), trainer.model(tokens, project=False)
    assert isinstance(outputs[1], Unprojected)
    gradients, values, entropies = [], [], []
    for output in outputs:
        found = loss.logps.found(output, batch)
        trainer.model.zero_grad(set_to_none=True)
        (found.values * drawn).sum().backward()
        gradients.append(
            {name: one.grad.clone() for name, one in trainer.model.named_parameters() if one.grad is not None}
        )
        values.append(found.values.detach() * drawn)
        entropies.append(found.entropies(trainer.ctx.tp) * drawn)
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(entropies[0], entropies[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_model_that_makes_more_of_its_logits_is_projected_as_a_whole(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path))
    assert policy_scorer(trainer.engine, trainer.model, 1.0).numbers.model_options == {"project": False}
    family = type(trainer.model)
    trainer.model.__class__ = type("Softcapped", (family,), {"logits": lambda self, x: family.logits(self, x).tanh()})
    assert policy_scorer(trainer.engine, trainer.model, 1.0).numbers.model_options == {}
