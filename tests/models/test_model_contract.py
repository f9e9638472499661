"""What families declare of their modules: inputs, text generation, pipeline stages."""

from __future__ import annotations

import pytest
import torch
from tests.ckpt.convert_cases import MODELS
from torch import nn

from mt_core.config.loading import config_from_dict
from mt_core.errors import ConfigError
from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.model import Generates, Model, as_generator, contract, is_pipelined
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins


@pytest.fixture(scope="module")
def host():
    return load_plugins()


def build(host, keys) -> nn.Module:
    config = config_from_dict({"model": keys}, host)
    ctx = ParallelContext(device=torch.device("meta"))
    return host.models.get(config.model.family).build.load()(config.model, ModelEnvironment(config, ctx, host))


@pytest.mark.parametrize("name", MODELS)
def test_every_family_builds_a_model_under_the_contract(name, host) -> None:
    model = build(host, MODELS[name])
    assert isinstance(model, Model)
    assert isinstance(model, Generates) == (name not in ("bert", "vision"))
    assert isinstance(model, Generates) or not model.continues_text


def test_a_head_on_a_decoder_neither_continues_text_nor_is_cut(host) -> None:
    keys = {**MODELS["llama"], "family": "llama_classification", "num_classes": 3}
    model = build(host, keys)
    assert not is_pipelined(model)
    with pytest.raises(ConfigError, match="does not generate text"):
        as_generator(model)
    assert is_pipelined(build(host, MODELS["llama"]))


def test_layers_to_divide_are_those_of_all_stacks(host) -> None:
    stacked = {name: config_from_dict({"model": MODELS[name]}, host).model.stacked_layers for name in ("llama", "t5")}
    assert stacked == {"llama": 3, "t5": 6}


def test_a_plain_module_stands_under_the_defaults() -> None:
    plain = contract(nn.Linear(2, 2))
    assert plain.inputs == ("tokens", "position_ids", "segment_ids")
    assert not plain.continues_text
    assert plain.needs_logits is None
    assert not is_pipelined(nn.Linear(2, 2))
