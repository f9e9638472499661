"""On a GPU: a step of each family of decoders in fp32, its loss and each gradient, against the same step on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.ckpt.convert_cases import MODELS
from torch import Tensor

from mt_core.config.loading import load_config
from mt_core.plugins import load_plugins
from mt_core.train import Trainer
from mt_tools.verify.run_record import RunRecord, record_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEP = [
    # The gradient of a bias of keys is zero but for rounding, which Adam would make as large as any other.
    "optimizer.optimizer=sgd",
    "data.seq_length=64",
    "data.corpus_bytes=1000000",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "train.train_iters=5",
    "train.eval_interval=null",
    "train.eval_iters=1",
    "checkpoint.save_interval=null",
    "logging.progress=none",
    "precision.dtype=fp32",
]
OTHER_SAMPLES = ("bert", "modernbert", "t5", "bart", "vision")
"""Families that train on other samples than texts."""
DECODERS = [name for name, keys in MODELS.items() if "vision_model" not in keys and name not in OTHER_SAMPLES]
Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def full_fp32() -> Iterator[None]:
    """cuDNN's convolutions use TF32 where nothing forbids it."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = allowed


def settings(table: str, keys: dict[str, Any]) -> Iterator[str]:
    for key, value in keys.items():
        name = f"{table}.{key}"
        yield from settings(name, value) if isinstance(value, dict) else [f"{name}={json.dumps(value)}"]


def one_step(name: str, device: str, prepare: Callable[[Trainer], object]) -> RunRecord:
    host = load_plugins()
    keys = {**MODELS[name], "vocab_size": 263}
    config = load_config(overrides=[*STEP, f"train.device={device}", *settings("model", keys)], host=host)
    return record_run(config, 1, host=host, prepare=prepare)


def copy_of_weights(trainer: Trainer) -> Weights:
    return {name: weight.detach().clone() for name, weight in trainer.engine.model.state_dict().items()}


@pytest.mark.parametrize("name", DECODERS)
def test_a_step_is_that_of_the_cpu(name: str) -> None:
    """From the same weights: a GPU draws other random numbers."""
    weights: Weights = {}
    expected = one_step(name, "cpu", lambda trainer: weights.update(copy_of_weights(trainer)))
    found = one_step(name, "cuda", lambda trainer: trainer.engine.model.load_state_dict(weights))
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(gradient.norm().item() for gradient in expected.gradients.values())
    for parameter, gradient in expected.gradients.items():
        error = (found.gradients[parameter].cpu().float() - gradient.float()).norm().item()
        # Sums in another order. Gradients that nearly cancel are as small as the rounding errors of others.
        assert error < 1e-4 * gradient.norm().item() + 1e-7 * largest, f"the gradient of {parameter}: {error:.1e}"
