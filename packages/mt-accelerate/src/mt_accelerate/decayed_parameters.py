"""Which parameters of mt the groups of a program's optimizer decay."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mt_ckpt.hugging_face.module import read_module
from mt_core.errors import ConfigError
from mt_core.optim.param_groups import decays, matches
from mt_core.plugins import PluginHost

Groups = Sequence[Mapping[str, Any]]


def undecayed_names(model: Any, groups: Groups, host: PluginHost) -> list[str] | None:
    """Patterns of the names of mt without weight decay (optimizer.no_weight_decay); None for biases and norms, which
    is mt's own rule.

    Raises ConfigError for a parameter of mt that is made of decayed and other ones, and for parameters of the model
    that the program does not train, which mt would.
    """
    require_all_trained(model, groups)
    if not any(group.get("weight_decay") for group in groups):
        return None
    # Marks go through the same conversion as the weights, so that no second table of names is needed: what the
    # conversion of a marked state changes belongs to the marked parameters.
    without = {id(weight) for group in groups if not group.get("weight_decay") for weight in group["params"]}
    plain, marked = _converted(model, set(), host), _converted(model, without, host)
    spared = {name for name, value in marked.items() if _is_marked(name, value, plain[name])}
    if spared == {name for name, value in marked.items() if not decays(name, value.shape)}:
        return None
    return shortened(spared, set(marked) - spared)


def require_all_trained(model: nn.Module, groups: Groups) -> None:
    """Raises ConfigError for frozen parameters, and for those in no group."""
    grouped = {id(weight) for group in groups for weight in group["params"]}
    left = [name for name, weight in model.named_parameters() if not weight.requires_grad or id(weight) not in grouped]
    if left:
        raise ConfigError(
            f"the program does not train {len(left)} parameters of the model ({', '.join(left[:3])}"
            f"{', ...' if len(left) > 3 else ''}): they have requires_grad=False or are in no group of the optimizer, "
            "and with Megatron-LM all are trained; give MegatronLMPlugin(custom_prepare_model_function=...) to freeze "
            "them, or leave the plugin out"
        )


def shortened(names: set[str], others: Iterable[str]) -> list[str]:
    """The names with * for the number of a layer, where that has no other name."""
    kept = list(others)
    found = []
    for name in names:
        pattern = re.sub(r"\\.\\d+\\.", ".*.", name)
        found.append(name if any(matches(other, [pattern]) for other in kept) else pattern)
    return sorted(set(found))


def _converted(model: Any, marked: set[int], host: PluginHost) -> dict[str, Tensor]:
    """Canonical name -> the tensor of a model whose marked parameters are 1 and whose others are 0."""
    state = {
        # A stride of 0: no memory of the weight's size.
        name: torch.full((), float(id(value) in marked)).expand(value.shape)
        for name, value in model.state_dict(keep_vars=True).items()
    }
    shape = type(type(model).__name__, (), {"config": model.config, "state_dict": lambda self: state})
    reader = read_module(shape(), host)
    prefix = "model."
    return {name.removeprefix(prefix): reader.read(name) for name in reader.shapes() if name.startswith(prefix)}


def _is_marked(name: str, value: Tensor, plain: Tensor) -> bool:
    changed = value != plain
    if bool(changed.any()) != bool(changed.all()):
        raise ConfigError(
            f"the optimizer decays a part of {name} and not the others, which mt has as one parameter; put the "
            "parameters that it is made of into one group"
        )
    return bool(changed.any())
