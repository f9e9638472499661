"""A family of another plugin reaches Megatron's formats through the map that it registers."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ckpt.conftest import assert_same_state, random_weights, tensors_of
from torch import nn

from mt_ckpt.convert import convert
from mt_ckpt.model import expected_parameters
from mt_ckpt.native.read import open_checkpoint
from mt_ckpt.native.save import save_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.config.fields import PositiveInt
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import ModelConfig
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.nn.embedding import VocabParallelEmbedding, VocabParallelOutput
from mt_core.nn.layout import normal
from mt_core.nn.norm import RMSNorm
from mt_core.plugins import Plugin, PluginHost, load_plugins
from mt_core.specs import ModelSpec

SHAPE = {"family": "mean", "num_layers": 4, "hidden_size": 16, "vocab_size": 50, "half_life": 3}


class MeanConfig(ModelConfig):
    """Layers that read a decaying mean of what came before."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    half_life: PositiveInt
    """Positions after which a token counts half."""

    @property
    def ffn_size(self) -> int:
        return 2 * self.hidden_size

    activation = property(lambda self: "swiglu")
    add_bias_linear = property(lambda self: False)
    init_method_std = property(lambda self: 0.02)
    output_init_std = property(lambda self: 0.02)


class MeanLayer(nn.Module):
    def __init__(self, config: MeanConfig, environment: Any, number: int) -> None:
        super().__init__()
        self.pre_mlp_layernorm = RMSNorm(config.hidden_size, 1e-5, environment.parallel)
        self.mlp = environment.feed_forward("dense", config, number)


class MeanModel(nn.Module):
    """Parameters under canonical names; nothing here computes."""

    def __init__(self, config: MeanConfig, environment: Any) -> None:
        super().__init__()
        ctx = environment.parallel
        table = {"init": normal(0.02), "divisible_by": config.make_vocab_size_divisible_by}
        self.embedding, self.decoder = nn.Module(), nn.Module()
        self.embedding.word_embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size, ctx, **table)
        self.decoder.layers = nn.ModuleList(MeanLayer(config, environment, i) for i in range(config.num_layers))
        self.decoder.final_layernorm = RMSNorm(config.hidden_size, 1e-5, ctx)
        self.output_layer = VocabParallelOutput(config.vocab_size, config.hidden_size, ctx, **table)


def write_arguments(model: MeanConfig, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "max_position_embeddings": 64,
        "vocab_size": model.vocab_size,
        "untie_embeddings_and_output_weights": True,
        "mean_half_life": model.half_life,
    }


def read_section(arguments: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any] | None:
    if "mean_half_life" not in arguments:
        return None
    keys = {key: arguments[key] for key in ("num_layers", "hidden_size")}
    return {**keys, "half_life": arguments["mean_half_life"]}


MEGATRON = MegatronMap(arguments=write_arguments, section=read_section)
PRESETS: dict[str, Any] = {}


def host_with(**names: ModelSpec) -> PluginHost:
    host = load_plugins()
    module = types.SimpleNamespace(mt_register_models=hookimpl(lambda: list(names.values())))
    host.add(module, Plugin("mean", "nowhere", "mean", "1.0"))
    return host


def spec(name: str, **maps: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        doc="of a test",
        config_type=Lazy(f"{__name__}:MeanConfig"),
        build=Lazy(f"{__name__}:MeanModel"),
        presets=Lazy(f"{__name__}:PRESETS"),
        name_maps={key: Lazy(f"{__name__}:{value}") for key, value in maps.items()},
    )


@pytest.fixture(scope="module")
def mean_host() -> PluginHost:
    return host_with(mean=spec("mean", megatron="MEGATRON"))


def made(host: PluginHost, path: Path) -> Path:
    config = config_from_dict({"model": SHAPE}, host)
    state = random_weights(expected_parameters(config, host), seed=1, dtype=torch.float32)
    save_checkpoint(path, state.items(), {"iteration": 3, "config": config.to_dict()}, {})
    return path


@pytest.mark.parametrize("form", ["megatron", "megatron-dist"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_there_and_back(mean_host, tmp_path: Path, form: str, tp: int, pp: int) -> None:
    source = made(mean_host, tmp_path / "source")
    cut = ConvertOptions(target_tensor_parallel_size=tp, target_pipeline_parallel_size=pp if form == "megatron" else 1)
    convert(source, tmp_path / "m", saver=form, options=cut, host=mean_host)
    convert(tmp_path / "m", tmp_path / "back", saver="mt", host=mean_host)
    back = open_checkpoint(tmp_path / "back")
    model = back.metadata["config"]["model"]
    assert {key: model[key] for key in SHAPE} == SHAPE
    found = {name: tensor for name, tensor in tensors_of(back).items() if not name.startswith("padding.")}
    assert_same_state(tensors_of(open_checkpoint(source)), found)


def test_a_family_without_a_map_is_refused_by_name(tmp_path: Path) -> None:
    host = host_with(mean=spec("mean"))
    with pytest.raises(ConfigError, match="model.family=mean cannot be written as Megatron's arguments; these can: "):
        convert(made(host, tmp_path / "source"), tmp_path / "m", saver="megatron", host=host)


def test_two_families_that_take_one_model_are_both_named(mean_host, tmp_path: Path) -> None:
    source = made(mean_host, tmp_path / "source")
    convert(source, tmp_path / "m", saver="megatron", host=mean_host)
    both = host_with(mean=spec("mean", megatron="MEGATRON"), other=spec("other", megatron="MEGATRON"))
    with pytest.raises(ConfigError, match="the families mean and other both take this model"):
        convert(tmp_path / "m", tmp_path / "back", saver="mt", host=both)
