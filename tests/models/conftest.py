"""Build a family from a few keys."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from tests.models import plugin_host

from mt_core.config.loading import load_config
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import initialize
from mt_core.parallel.context import ParallelContext
from mt_core.specs import MODELS


@pytest.fixture(scope="session")
def host():
    return plugin_host.host()


@pytest.fixture
def build(host):
    """A function from keys of the model section to an initialized model in fp32."""

    def make(*overrides: str, family: str = "gpt", **keys):
        settings = [
            f"model.{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()
        ]
        common = [f"model.family={family}", "data.seq_length=16", "train.train_iters=1"]
        config = load_config(overrides=[*common, *settings, *overrides], host=host).config
        ctx = ParallelContext()
        model = host[MODELS].get(family).build.load()(config.model, ModelBuildContext(config, ctx, host))
        initialize(model, 1, ctx)
        return model.eval()

    return make


@pytest.fixture
def randomize():
    """Gives a model weights far from their initial values, norms and biases included, so that no term can hide."""

    def fill(model: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 and parameter.mean() == 1 else scale * noise)

    return fill
