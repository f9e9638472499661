"""Layers of multi-token prediction put together from blocks of `transformers`: names, the loss and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import Tensor, nn

from mt_core.nn.auxiliary import auxiliary_losses
from mt_core.nn.layout import parameter_layouts
from mt_models.hugging_face import load_reference, to_reference

LENGTH = 13
Named = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Tensors by their names in a layer of prediction -> by those of published files."""


def one_by_one(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Experts in one tensor of transformers -> as published files have them; other tensors as they are."""
    before, marker, rest = name.partition("mlp.experts.")
    if not marker:
        return {name: tensor}
    parts = ("gate_proj", "up_proj") if "gate_up" in rest else ("down_proj",)
    return {
        f"{before}{marker}{number}.{part}.weight": rows
        for number, expert in enumerate(tensor)
        for part, rows in zip(parts, expert.chunk(len(parts)), strict=True)
    }


def assert_same_prediction(
    host: Any,
    theirs: nn.Module,
    layer: nn.Module,
    named: Named,
    state: Callable[[Tensor, Tensor], Tensor],
    untrained: tuple[str, ...] = (),
    *,
    tolerance: float = 5e-5,
    **external: Any,
) -> nn.Module:
    """Our model with the prediction, read from a file of both. theirs: a causal model, randomized, without a
    prediction. layer: of the prediction, randomized. state: what the LM head reads, from embeddings of the next tokens
    and the input of the LM head. untrained: endings of our names that may have no gradient. tolerance: of a
    gradient, over its largest value. external: keys of the configuration."""
    theirs.float().eval()
    layer.float().eval()
    config = {**theirs.config.to_dict(), **external}
    family = ref.family_of(host, config["model_type"])
    predicted = named(layer.state_dict())
    tensors = {**ref.published(theirs, theirs.state_dict()), **predicted}
    model = ref.build_from(host, family.read_config(family.held(config, tensors)))
    assert model.config.mtp_num_layers == 1
    load_reference(model, tensors, family)
    written = to_reference(model, family)
    assert set(predicted) <= set(written)
    assert all(torch.equal(written[name], tensor) for name, tensor in predicted.items())
    # A file that has lost the layer, whose configuration still counts it.
    assert not family.read_config(family.held(config, written.keys() - predicted.keys())).get("mtp_num_layers")

    vocab = theirs.config.vocab_size
    tokens, labels = dense.random_tokens(vocab, LENGTH), dense.random_tokens(vocab, LENGTH + 1)[:, 1:]
    mask = (torch.arange(LENGTH)[None] % 5 != 3).float().expand(2, -1)
    hidden = theirs.model(tokens).last_hidden_state
    next_tokens, targets, counted = (F.pad(x[:, 1:], (0, 1)) for x in (tokens, labels, mask))
    logits = theirs.lm_head(state(theirs.get_input_embeddings()(next_tokens), hidden))
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    expected = 0.1 * (losses * counted).sum() / counted.sum()
    expected.backward()
    model.train()
    for loss in auxiliary_losses(model):
        loss.scale = float(loss.name == "mtp_1_loss")
    (found,) = (loss for loss in auxiliary_losses(model) if loss.name == "mtp_1_loss")
    (0.0 * model(tokens, labels=labels, loss_mask=mask).sum()).backward()
    assert found.take() == pytest.approx(expected.item(), rel=1e-5)

    gradients = {**ref.published(theirs, _gradients(theirs)), **named(_gradients(layer))}
    spelled = {family.spelling(model.config, name): tensor for name, tensor in gradients.items()}
    layouts, parameters = parameter_layouts(model), dict(model.named_parameters())
    for name, wanted in family.name_map(model.config).reading(spelled).import_value(spelled.__getitem__):
        largest = wanted.abs().max().item()
        gradient = parameters[name].grad
        assert largest > 0 or name.endswith((*untrained, *UNUSED)), name
        actual = torch.zeros_like(wanted) if gradient is None else layouts[name].to_canonical(gradient)
        torch.testing.assert_close(actual, wanted, atol=tolerance * largest + 1e-8, rtol=1e-3, msg=name)
    return model


UNUSED = ("experts.linear_fc1.weight", "experts.linear_fc2.weight")
"""Of experts that no token of so short a text takes."""


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    given = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {
        name: torch.zeros_like(tensor) if given.get(name) is None else given[name]
        for name, tensor in module.state_dict().items()
    }


def causal(length: int = LENGTH) -> Tensor:
    """An additive mask [1, 1, S, S]."""
    return torch.full((length, length), float("-inf")).triu(1)[None, None]
