"""Recomputation keeps less and computes the same; offloaded activations come back."""

from __future__ import annotations

import pytest
import torch

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import AuxiliaryLoss
from mt_core.nn.layout import initialize
from mt_core.nn.recompute import recomputed
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train import build

SHAPE = ["model.num_layers=4", "model.hidden_size=32", "model.num_attention_heads=4", "model.vocab_size=300"]
SHAPE += ["model.attention_backend=eager", "model.hidden_dropout=0.1", "data.seq_length=64", "train.train_iters=1"]
FULL, SELECTIVE = "recompute.recompute_granularity=full", "recompute.recompute_granularity=selective"


def kept_and_gradients(*settings: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes kept between forward and backward, each storage once; and the gradients."""
    host, ctx = load_plugins(), ParallelContext()
    config = load_config(preset="gpt-tiny", overrides=[*SHAPE, *settings], host=host).config
    model = build.build_model(config, ctx, host)
    initialize(model, 1, ctx)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(2 * 64).view(2, 64)
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens).float().logsumexp(-1).mean()
    held = sum(kept.values())
    loss.backward()
    return held, {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def plain() -> tuple[int, dict[str, torch.Tensor]]:
    return kept_and_gradients()


@pytest.mark.parametrize(
    ("settings", "less"),
    [
        ((SELECTIVE,), 0.95),
        ((SELECTIVE, "recompute.recompute_modules=['core_attn', 'mlp']"), 0.9),
        ((SELECTIVE, "recompute.recompute_modules=['layernorm']"), 0.95),
        ((FULL, "recompute.recompute_num_layers=2"), 0.7),
        ((FULL,), 0.4),
        ((FULL, "recompute.recompute_method=uniform", "recompute.recompute_num_layers=2"), 0.4),
    ],
    ids=["core attention", "attention and mlp", "norms", "two of four layers", "all layers", "pairs of layers"],
)
def test_less_is_kept_and_every_gradient_is_the_same(plain, settings, less) -> None:
    held, gradients = kept_and_gradients(*settings)
    assert held < less * plain[0]
    for name, gradient in plain[1].items():
        assert torch.equal(gradients[name], gradient), name


def test_uniform_groups_keep_fewer_inputs_the_larger_they_are() -> None:
    single = kept_and_gradients(FULL, "recompute.recompute_method=uniform")[0]
    pairs = kept_and_gradients(FULL, "recompute.recompute_method=uniform", "recompute.recompute_num_layers=2")[0]
    assert single - pairs == 2 * (2 * 64 * 32 * 4)  # two inputs [2, 64, 32] in fp32


def test_offloaded_activations_come_back(plain) -> None:
    gradients = kept_and_gradients("recompute.cpu_offloading_num_layers=3")[1]
    for name, gradient in plain[1].items():
        assert torch.equal(gradients[name], gradient), name


def test_an_auxiliary_loss_counts_once_where_its_layer_is_recomputed() -> None:
    balance, weight = AuxiliaryLoss("balance"), torch.ones(3, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return balance(x * weight, weight.sum())

    recomputed(layer)(torch.ones(3, requires_grad=True)).sum().backward()
    assert balance.take() == 3.0
    assert torch.equal(weight.grad, torch.full((3,), 2.0))  # of the sum, and of the loss


def test_layers_that_keep_their_norms_are_named() -> None:
    with pytest.raises(ConfigError, match="layernorm, which layers of the kind ParallelResidualLayer cannot"):
        kept_and_gradients(SELECTIVE, "recompute.recompute_modules=['layernorm']", "model.parallel_residual=true")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["recompute.distribute_saved_activations=true", FULL], "there is one process"),
        (["recompute.recompute_modules=['mlp']"], "only counts when recompute.recompute_granularity is selective"),
        (["recompute.recompute_method=uniform"], "only counts when recompute.recompute_granularity is full"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(settings, words) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(preset="gpt-tiny", overrides=[*SHAPE, *settings])
