"""Small image towers of `transformers` with random weights, ours made from their files, and how they are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.config.checks import check_config
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS
from mt_models.hugging_face import HuggingFaceFamily, load_reference

TOWER = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 22,  # two pixels more than its patches fill
    "patch_size": 5,
    "num_channels": 2,
    "attn_implementation": "eager",
}


def randomize(model: nn.Module, scale: float = 0.3) -> None:
    """Every weight far from its initial value, norms and biases included."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = parameter.ndim == 1 and bool((parameter == 1).all())
            parameter.copy_(1 + 0.1 * noise if norm else scale * noise)


def config_from(host: PluginHost, model: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """The configuration with this [model] section, checked as a run's is."""
    train = {"train_iters": 1, **sections.pop("train", {})}
    config = config_from_dict({"model": model, "train": train, **sections}, host)
    check_config(config)
    host.check_config(config)
    return config


def built(host: PluginHost, config: Config, device: str = "cpu") -> nn.Module:
    ctx = ParallelContext(device=torch.device(device))
    return host[MODELS].get(config.model.family).build.load()(config.model, ModelBuildContext(config, ctx, host)).eval()


def from_reference(
    host: PluginHost, family: HuggingFaceFamily, reference: nn.Module, keys: dict[str, Any], **sections: dict[str, Any]
) -> nn.Module:
    """Our model of the reference's configuration with its weights. keys: further ones of [model]."""
    model = built(host, config_from(host, family.read_config(reference.config.to_dict()) | keys, **sections))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # whatever the map leaves out shows
    load_reference(model, reference.state_dict(), family)
    return model


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-4 at most and 1e-5 on average, in units of the largest value if that is above 1."""
    assert ours.shape == theirs.shape
    unit = max(1.0, theirs.abs().max().item())
    assert (ours - theirs).abs().max() < 1e-4 * unit
    assert (ours - theirs).abs().mean() < 1e-5 * unit


def assert_same_gradients(
    model: nn.Module, reference: nn.Module, family: HuggingFaceFamily, untrained: tuple[str, ...] = ()
) -> None:
    """After backward on both. A name map is linear: it carries gradients as it carries weights.

    untrained: beginnings of our names whose parameters must have no gradient in either; so it is with their buffers.
    """
    config = model.config
    theirs = {
        family.spelling(config, name): torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for name, tensor in [*reference.named_buffers(), *reference.named_parameters()]
    }
    layouts, parameters = parameter_layouts(model), dict(model.named_parameters())
    expected = dict(family.name_map(config).reading(theirs).import_value(theirs.__getitem__))
    assert expected.keys() == parameters.keys()
    for name, gradient in expected.items():
        largest = gradient.abs().max().item()
        if name.startswith(untrained) or not layouts[name].trained:
            assert largest == 0, name
            assert parameters[name].grad is None, name
            continue
        assert largest > 0, f"{name} has no effect in the reference"
        ours = layouts[name].to_canonical(parameters[name].grad)
        torch.testing.assert_close(
            ours, gradient, atol=2e-5 * largest + 1e-7, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_same_training(
    ours: tuple[nn.Module, Tensor], theirs: tuple[nn.Module, Any], labels: Tensor, family: HuggingFaceFamily
) -> None:
    """The same logits, loss and gradients, and weights that pass both maps. ours: a model and its logits; theirs: a
    model and what it returned for the labels."""
    (model, logits), (reference, returned) = ours, theirs
    assert_near(logits, returned.logits)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(returned.loss.item(), rel=1e-5)
    loss.backward()
    returned.loss.backward()
    assert_same_gradients(model, reference, family)
    assert_round_trip(model, reference, family)


def assert_round_trip(model: nn.Module, reference: nn.Module, family: HuggingFaceFamily) -> None:
    """Names and configuration go there and back to the last bit; what stays behind is known to hold no weight."""
    config = model.config
    state = {family.spelling(config, name): tensor for name, tensor in reference.state_dict().items()}
    written = written_like(model, family, state)
    left = set(state) - set(written) - set(family.copies(config))
    assert left <= family.name_map(config).ignored
    assert all(torch.equal(written[name], state[name]) for name in written)
    read, again = family.read_config(reference.config.to_dict()), family.read_config(family.write_config(config))
    assert_says(again, read)


def written_like(model: nn.Module, family: HuggingFaceFamily, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is written of a model, in the form that these names have: files and memory may differ."""
    layouts = parameter_layouts(model)
    ours = {name: layouts[name].to_canonical(parameter.detach()) for name, parameter in model.named_parameters()}
    return dict(family.name_map(model.config).reading(state).export_value(ours))


def assert_says(keys: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Keys may say more than is wanted: what the other format leaves to a default."""
    for key, value in wanted.items():
        if isinstance(value, dict):
            assert_says(keys[key], value)
        else:
            assert keys[key] == value, key


def canonical_size(host: PluginHost, config: Config) -> int:
    """Parameters of a model on the meta device, padding left out."""
    layouts = parameter_layouts(built(host, config, "meta"))
    return sum(torch.Size(layout.shape).numel() for layout in layouts.values())


def random_images(count: int, channels: int, height: int, width: int) -> Tensor:
    return torch.randn(count, channels, height, width, generator=torch.Generator().manual_seed(2))
