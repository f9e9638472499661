"""Upcycled models compute what the dense ones compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core import specs
from mt_core.config.loading import config_from_dict
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import initialize, parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_moe.upcycling import Upcycling, upcycle

SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "ffn_hidden_size": 48}
MODELS = {
    "llama": {"family": "llama", **SMALL, "mlp_bias": True},
    "mistral": {"family": "mistral", **SMALL, "sliding_window": 6},
    "gpt": {"family": "gpt", **SMALL, "max_position_embeddings": 16},
}


@dataclass
class InMemory:
    """A CheckpointReader over tensors."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    kept: Mapping[str, bytes] = field(default_factory=dict)

    def shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def dtypes(self):
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def files(self):
        return self.kept


@pytest.fixture(scope="module")
def host():
    return load_plugins()


def build(host, section):
    config = config_from_dict({"model": dict(section)}, host)
    model = (
        host[specs.MODELS]
        .get(config.model.family)
        .build.load()(config.model, ModelBuildContext(config, ParallelContext(), host))
    )
    return model.eval()


def dense_checkpoint(host, section) -> InMemory:
    model = build(host, section)
    initialize(model, 3, ParallelContext())
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = parameter_layouts(model)[name].to_canonical(parameter.detach())
        # Biases and the last matrix far from their initial values, so that nothing hides.
        tensors[f"model.{name}"] = tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
    tensors["optimizer.exp_avg.output_layer.weight"] = torch.zeros(1)
    return InMemory(tensors, {"config": {"model": dict(section)}, "iteration": 7}, {"tokenizer.json": b"{}"})


def filled(host, reader):
    """The model of a checkpoint, every parameter read."""
    model = build(host, reader.metadata["config"]["model"])
    layouts = parameter_layouts(model)
    assert {f"model.{name}" for name in layouts} == {n for n in reader.shapes() if n.startswith("model.")}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = reader.read(f"model.{name}")
            assert tuple(tensor.shape) == reader.shapes()[f"model.{name}"] == layouts[name].shape
            assert tensor.dtype == reader.dtypes()[f"model.{name}"]
            parameter.copy_(layouts[name].to_local(tensor, ParallelContext()))
    return model


def loss(model, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize(("experts", "granularity", "topk"), [(8, 1, None), (8, 2, None), (12, 4, 8), (4, 4, 4)])
@pytest.mark.parametrize("family", MODELS)
def test_loss_and_logits_of_step_0_are_those_of_the_dense_model(host, family, experts, granularity, topk) -> None:
    dense = dense_checkpoint(host, MODELS[family])
    new = upcycle(dense, host, num_experts=experts, granularity=granularity, topk=topk)
    before, after = filled(host, dense), filled(host, new)
    tokens = torch.randint(0, 61, (3, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(after(tokens), before(tokens), atol=2e-6, rtol=1e-5)
    assert loss(after, tokens).item() == pytest.approx(loss(before, tokens).item(), rel=1e-6)


def test_the_new_model_has_experts_of_the_given_size_and_learns(host) -> None:
    """Different tokens go to different groups, and the router has a gradient."""
    new = upcycle(dense_checkpoint(host, MODELS["llama"]), host, num_experts=8, granularity=2)
    assert new.shapes()["model.decoder.layers.0.mlp.experts.linear_fc1.weight"] == (8, 2 * 24, 32)
    moe = new.metadata["config"]["model"]["moe"]
    assert (moe["moe_ffn_hidden_size"], moe["moe_router_topk"]) == (24, 4)
    model = filled(host, new).train()
    loss(model, torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))).backward()
    router = model.decoder.layers[0].mlp.router
    assert router.weight.grad.abs().max() > 0
    router.after_step()
    load = router.load.tokens.view(4, 2)
    assert torch.equal(load[:, 0], load[:, 1])  # the shards of a group see the same tokens
    assert len(load[:, 0].unique()) > 1


def test_what_is_not_the_models_is_left_out_and_files_are_copied(host) -> None:
    new = upcycle(dense_checkpoint(host, MODELS["mistral"]), host, num_experts=4)
    assert not [name for name in new.shapes() if name.startswith("optimizer.")]
    assert new.files() == {"tokenizer.json": b"{}"}
    assert new.metadata["iteration"] == 7


def test_routers_come_from_the_seed_alone(host) -> None:
    dense = dense_checkpoint(host, MODELS["mistral"])
    name = "model.decoder.layers.1.mlp.router.weight"
    first, again, other = (upcycle(dense, host, num_experts=4, seed=seed).read(name) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_experts": 8, "granularity": 5}, "granularity=5 does not divide the dense feed-forward's width 48"),
        ({"num_experts": 6, "granularity": 4}, "num_experts=6 is no multiple of granularity=4"),
        ({"num_experts": 8, "granularity": 2, "topk": 3}, "topk=3 has to be a multiple of granularity=2 from 2 to"),
        ({"num_experts": 8, "topk": 9}, "topk=9 has to be a multiple of granularity=1 from 1 to num_experts=8"),
        ({"num_experts": 8, "topk": 1}, "topk=1 leaves the router no weight"),
        ({"num_experts": 0}, "have to be at least 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(host, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        upcycle(dense_checkpoint(host, MODELS["mistral"]), host, **keys)


@pytest.mark.parametrize(
    ("moe", "words"),
    [
        ({"moe_router_pre_softmax": True}, "moe_router_pre_softmax=True changes what the model computes"),
        ({"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size=8 changes what"),
        ({"moe_router_topk": 3}, "moe_router_topk=3 is what upcycling sets itself"),
        ({"moe_routr": 3}, "moe_routr"),
    ],
)
def test_options_that_would_change_the_start_are_refused(moe, words) -> None:
    with pytest.raises(ConfigError, match=words):
        Upcycling(8, moe=moe).options(48)


def test_checkpoints_that_cannot_be_upcycled_are_refused(host) -> None:
    dense = dense_checkpoint(host, MODELS["mistral"])
    with pytest.raises(ConfigError, match="has experts already"):
        upcycle(upcycle(dense, host, num_experts=4), host, num_experts=4)
    bare = InMemory({"model.output_layer.weight": torch.zeros(1)}, dense.metadata)
    with pytest.raises(CheckpointError, match="has no dense feed-forward"):
        upcycle(bare, host, num_experts=4)
    with pytest.raises(CheckpointError, match="its metadata has no config.model"):
        upcycle(InMemory({}, {}), host, num_experts=4)
    bert = {"config": {"model": {"family": "bert", "vocab_size": 61}}}
    with pytest.raises(ConfigError):
        upcycle(InMemory({}, bert), host, num_experts=4)
