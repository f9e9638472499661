"""The parameter groups of an optimizer: with and without weight decay, and those with a decoupled learning rate.

A group is a dictionary with `params`, `names` (canonical), `weight_decay`, `wd_mult` (1 or 0: whether decay applies)
and `is_decoupled_lr`, as Megatron's are, `lr_mult` where the learning rate is multiplied, and `eps_mult` where the
optimizer's epsilon is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from mt_core.config.schema import OptimizerConfig, WeightDecayStyle

ParamGroup = dict[str, Any]
"""Parameter group of torch.optim: `params`, the names of these under `names`, and options such as `lr`."""

WORD_VECTORS = "word_embeddings.weight"
OUTPUT = "output_layer.weight"
TABLES = frozenset({"word_embeddings", "position_embeddings", "tokentype_embeddings", "relative_attention_bias"})
"""Modules whose weights are looked up by row."""


def decays(name: str, shape: Sequence[int]) -> bool:
    """Whether weight decay applies: as in Megatron, not on biases and vectors (norms)."""
    return len(shape) > 1 and not name.endswith("bias")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether any pattern has the name; * stands for any characters."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_embedding_or_output(name: str) -> bool:
    """Whether a parameter is the token embedding or the LM head, to which Megatron's decoupled_lr applies."""
    return name.endswith((WORD_VECTORS, OUTPUT))


def is_table(name: str) -> bool:
    """Whether a parameter is an embedding table, indexed by row."""
    return not TABLES.isdisjoint(name.split("."))


def param_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    shapes: Mapping[str, Sequence[int]] | None = None,
    *,
    decoupled: bool = False,
    undecayed: Sequence[str] | None = None,
    rates: Mapping[str, float] | None = None,
    epsilons: Mapping[str, float] | None = None,
) -> list[ParamGroup]:
    """Groups of the trained parameters, with their canonical names.

    shapes: of the whole parameters, where those given are shards. decoupled: the embedding and the output layer get
    separate groups. undecayed: patterns of the names without weight decay, in place of `decays`. rates: factor of the
    learning rate by name, 1 where there is none; epsilons: of the optimizer's epsilon.
    """
    groups: dict[tuple[float, float, bool, bool], ParamGroup] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            # A shard of a matrix may be one-dimensional. By its own shape it would lose its weight decay.
            shape = parameter.shape if shapes is None else shapes[name]
            decayed = decays(name, shape) if undecayed is None else not matches(name, undecayed)
            factors = ((rates or {}).get(name, 1.0), (epsilons or {}).get(name, 1.0))
            key = (*factors, decoupled and is_embedding_or_output(name), not decayed)
            group = groups.setdefault(key, _empty_group(weight_decay, *key))
            group["params"].append(parameter)
            group["names"].append(name)
    # Ranks may have different groups, as pipeline stages without an embedding do; nothing is exchanged by group. Those
    # of the plain learning rate first, with weight decay before those without.
    return [groups[key] for key in sorted(groups, key=lambda key: (key[:2] != (1.0, 1.0), *key))]


def _empty_group(weight_decay: float, lr_mult: float, eps_mult: float, apart: bool, undecayed: bool) -> ParamGroup:
    return {
        "params": [],
        "names": [],
        "weight_decay": 0.0 if undecayed else weight_decay,
        "wd_mult": float(not undecayed),
        "is_decoupled_lr": apart,
        **({"lr_mult": lr_mult} if lr_mult != 1.0 else {}),
        **({"eps_mult": eps_mult} if eps_mult != 1.0 else {}),
    }


# -- schedules of single groups: decoupled learning rate and weight decay ---------------------------------

BySamples = Callable[[int], float]
"""samples of the steps that changed the weights -> the value for the step that starts after them"""

# Fraction of the training -> fraction of the increase: 0 at 0, 1 at 1.
_RISES: dict[WeightDecayStyle, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * (1.0 - progress)) + 1.0),
}


@dataclass(frozen=True)
class GroupSchedules:
    """decoupled_lr: of the embedding and the output layer; None: as the others. weight_decay: None: constant."""

    decoupled_lr: BySamples | None = None
    weight_decay: BySamples | None = None

    def prepare(self, groups: Iterable[ParamGroup], samples: int) -> None:
        """Set the values of each group for the next step."""
        for group in groups:
            if self.decoupled_lr is not None and group.get("is_decoupled_lr"):
                group["decoupled_lr"] = self.decoupled_lr(samples)
            if self.weight_decay is not None:
                group["weight_decay"] = self.weight_decay(samples) * group["wd_mult"]


def weight_decay_schedule(config: OptimizerConfig, total_samples: int) -> BySamples | None:
    """From start_weight_decay to end_weight_decay over the whole training, as Megatron's; None: it is constant."""
    if config.weight_decay_incr_style == "constant":
        return None
    start, end = config.start_weight_decay, config.end_weight_decay
    # Ensured by check_optimizer.
    assert start is not None
    assert end is not None
    rise = _RISES[config.weight_decay_incr_style]

    def weight_decay(samples: int) -> float:
        return start + (end - start) * rise(min(samples / total_samples, 1.0))

    return weight_decay
