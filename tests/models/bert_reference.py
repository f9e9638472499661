"""Small models of `transformers` with random weights, ours made from their files, and how the two are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.config.files import to_toml
from mt_core.config.loading import load_config
from mt_core.config.schema import Config
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS
from mt_models.hugging_face import HuggingFaceFamily, load_reference

BERT_SHAPE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "type_vocab_size": 3,
    "attn_implementation": "eager",
}


def make_reference(name: str, shape: dict[str, Any], scale: float = 0.3, **keys: Any) -> nn.Module:
    """A class of transformers, such as BertForPreTraining, in fp32 and evaluation mode, with every weight random."""
    import transformers

    kind = getattr(transformers, name)
    reference = kind(kind.config_class(**shape, **keys)).float().eval()
    reference.config.architectures = [name]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = parameter.ndim == 1 and bool((parameter == 1).all())
            parameter.copy_(1 + 0.1 * noise if norm else scale * noise)
    return reference


def config_of(
    host: PluginHost, family: HuggingFaceFamily, external: dict[str, Any], *overrides: str, **keys: Any
) -> Config:
    """The configuration made from the contents of config.json; keys are further ones of [model]."""
    section = family.read_config(external) | keys
    settings = [f"model.{key}={text(value)}" for key, value in section.items()]
    return load_config(overrides=["data.seq_length=16", "train.train_iters=1", *settings, *overrides], host=host).config


def text(value: Any) -> str:
    return to_toml(value) if isinstance(value, bool | dict) else str(value)


def built(host: PluginHost, config: Config, device: str = "cpu") -> nn.Module:
    ctx = ParallelContext(device=torch.device(device))
    return host[MODELS].get(config.model.family).build.load()(config.model, ModelBuildContext(config, ctx, host)).eval()


def from_reference(
    host: PluginHost, family: HuggingFaceFamily, reference: nn.Module, *overrides: str, **keys: Any
) -> nn.Module:
    """Our model of the reference's configuration with its weights."""
    model = built(host, config_of(host, family, reference.config.to_dict(), *overrides, **keys))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # whatever the map leaves out shows; padding becomes 0
    load_reference(model, reference.state_dict(), family)
    return model


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-4 at most and 1e-5 on average, in units of the largest value if that is above 1."""
    assert ours.shape == theirs.shape
    unit = max(1.0, theirs.abs().max().item())
    assert (ours - theirs).abs().max() < 1e-4 * unit
    assert (ours - theirs).abs().mean() < 1e-5 * unit


def assert_same_gradients(model: nn.Module, reference: nn.Module, family: HuggingFaceFamily) -> None:
    """After backward on both. A name map is linear: it carries gradients as it carries weights."""
    theirs = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in reference.named_parameters()
    }
    layouts, parameters = parameter_layouts(model), dict(model.named_parameters())
    expected = dict(family.name_map(model.config).import_value(theirs.__getitem__))
    assert expected.keys() == parameters.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        ours = layouts[name].to_canonical(parameters[name].grad)
        torch.testing.assert_close(
            ours,
            gradient,
            atol=2e-5 * gradient.abs().max().item() + 1e-7,
            rtol=1e-3,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def assert_round_trip(model: nn.Module, reference: nn.Module, family: HuggingFaceFamily) -> None:
    """Names and configuration go there and back to the last bit, and nothing of the reference is left out."""
    from mt_models.hugging_face import to_reference

    state = reference.state_dict()
    written = to_reference(model, family)
    repeated = set(state) - set(written)
    assert repeated <= set(family.copies(model.config))
    assert all(torch.equal(written[name], state[name]) for name in written)
    # What is written may say what the reference leaves to a default.
    read, again = family.read_config(reference.config.to_dict()), family.read_config(family.write_config(model.config))
    assert read.items() <= again.items()


def canonical_size(host: PluginHost, config: Config) -> int:
    """Parameters of a model on the meta device, padding left out."""
    layouts = parameter_layouts(built(host, config, "meta"))
    return sum(torch.Size(layout.shape).numel() for layout in layouts.values())


def reference_size(make: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


def bert_batch() -> dict[str, Tensor]:
    """Four rows of 13 with different lengths; a second text begins in the middle; every third token is masked."""
    generator = torch.Generator().manual_seed(2)
    lengths, places = torch.tensor([13, 9, 4, 11])[:, None], torch.arange(13)[None]
    padding = (places < lengths).long()
    masked = (places % 3 == 1) & (places < lengths)
    return {
        "tokens": torch.randint(1, 101, (4, 13), generator=generator) * padding,
        "tokentype_ids": (places >= lengths // 2).long() * padding,
        "padding_mask": padding,
        "labels": torch.where(masked, torch.randint(0, 101, (4, 13), generator=generator), -1),
        "loss_mask": masked.float(),
        "is_random": torch.tensor([0, 1, 1, 0]),
    }
