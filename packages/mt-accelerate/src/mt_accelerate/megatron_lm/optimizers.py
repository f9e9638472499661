"""A torch optimizer as keys of [optimizer], and what stands for it after `prepare`.

The optimizer of the program is a description: mt's own has its hyperparameters and updates the sharded weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mt_ckpt.hugging_face.reader import read_module
from mt_core.errors import ConfigError
from mt_core.optim.param_groups import decays, matches
from mt_core.plugins import PluginHost
from mt_core.train import Engine

FLAGS = ("amsgrad", "maximize", "nesterov", "differentiable")
"""Options of torch's optimizers that change the update and that mt's do not have."""

# By their names: others with "Adam" or "SGD" in theirs (NAdam, RAdam, Adamax, ASGD) compute other updates.
ADAMS = ("Adam", "AdamW", "FusedAdam")
SGDS = ("SGD", "FusedSGD")


class OptimizerLike(Protocol):
    """A `torch.optim.Optimizer`."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]: ...


def optimizer_keys(optimizer: OptimizerLike) -> dict[str, Any]:
    """Keys of [optimizer]. Raises ConfigError for an optimizer, an option or parameter groups that mt cannot follow."""
    kind, groups = type(optimizer).__name__, list(optimizer.param_groups)
    set_flags = [flag for flag in FLAGS if any(group.get(flag) for group in groups)]
    if set_flags:
        raise ConfigError(f"{kind}({set_flags[0]}=True) cannot be followed; leave {set_flags[0]} out")
    decay = _weight_decay(kind, groups)
    keys = {"lr": float(_common(kind, groups, "lr")), "weight_decay": decay}
    if kind in ADAMS:
        # Newer versions of torch have the key in the groups of Adam and AdamW; in older ones the class alone says it.
        if decay and not groups[0].get("decoupled_weight_decay", "adamw" in kind.lower()):
            raise ConfigError(
                f"{kind}(weight_decay={decay:g}) adds the decay to the gradient; mt's Adam is AdamW: use "
                "torch.optim.AdamW, or weight_decay=0"
            )
        beta1, beta2 = _common(kind, groups, "betas")
        eps = _common(kind, groups, "eps")
        return {**keys, "optimizer": "adam", "adam_beta1": beta1, "adam_beta2": beta2, "adam_eps": eps}
    if kind in SGDS:
        if decay or _common(kind, groups, "dampening"):
            raise ConfigError(f"{kind} with weight_decay or dampening cannot be followed; set both to 0")
        return {**keys, "optimizer": "sgd", "sgd_momentum": float(_common(kind, groups, "momentum"))}
    raise ConfigError(f"{kind} cannot be followed; the optimizer can be torch's Adam, AdamW or SGD")


def keys_and_decays(optimizer: OptimizerLike) -> dict[str, Any]:
    """`optimizer_keys`, and the decay of each group, which [optimizer] has once for all."""
    decays = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
    return {**optimizer_keys(optimizer), "weight_decay of the groups": decays}


def programs_rate(optimizer: OptimizerLike, prepared: Mapping[str, Any]) -> float:
    """The rate that the program or its scheduler has set. prepared: `keys_and_decays` of it before the first step.

    Raises ConfigError for groups with rates of their own, and where more than the rate has changed.
    """
    keys = keys_and_decays(optimizer)
    changed = [key for key, value in keys.items() if key != "lr" and value != prepared[key]]
    if changed:
        raise ConfigError(
            f"the program or its scheduler has changed {changed[0]} from {prepared[changed[0]]} to {keys[changed[0]]} "
            "after prepare, and only the rate (lr) can be followed; OneCycleLR and CyclicLR leave momentum and betas "
            "with cycle_momentum=False"
        )
    return float(keys["lr"])


def _common(kind: str, groups: Sequence[Mapping[str, Any]], name: str) -> Any:
    values = {_number(group[name]) for group in groups}
    if len(values) > 1:
        raise ConfigError(f"{kind} has parameter groups with {name} of {sorted(values)}; they can have one {name}")
    return values.pop()


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _weight_decay(kind: str, groups: Sequence[Mapping[str, Any]]) -> float:
    """The one decay of the groups that have one."""
    positive = sorted({float(group.get("weight_decay", 0.0)) for group in groups} - {0.0})
    if len(positive) > 1:
        raise ConfigError(f"{kind} has parameter groups with weight_decay of {positive}; it can be one value, and 0")
    return next(iter(positive), 0.0)


class ScheduledGroup(dict[str, Any]):
    """A parameter group whose values MegatronLMDummyScheduler decides: it can be read."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"the program sets {name} of optimizer.param_groups, and MegatronLMDummyScheduler decides the rate of each "
            "step; leave the scheduler out, and the rate is the one that the program has set"
        )

    def update(self, *args: Any, **values: Any) -> None:
        for name, value in dict(*args, **values).items():
            self[name] = value


class MegatronLMOptimizerWrapper(Optimizer):
    """Stands for the optimizer in the program's loop: the model's call has taken the step already.

    finish, drop: end and forget a step that the program accumulates itself, if there is one. followed: the program's
    optimizer, whose rate each step has; None with a MegatronLMDummyScheduler.
    """

    def __init__(
        self, engine: Engine, finish: Callable[[], None], drop: Callable[[], None], followed: Optimizer | None
    ) -> None:
        # No call of Optimizer's, which programs' schedulers test for: the groups are those of the program or the
        # engine.
        self._engine, self._finish, self._drop, self._followed = engine, finish, drop, followed
        self.step_was_skipped = False
        """Whether the last step had a gradient that was not finite, and changed nothing."""

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        if self._followed is not None:
            return self._followed.param_groups
        return [ScheduledGroup(group) for group in self._engine.optimizer.param_groups]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the program's optimizer, which schedulers that are made after `prepare` read."""
        return {} if self._followed is None else self._followed.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ConfigError: the model's parameters have their groups."""
        raise ConfigError("add_param_group after prepare: give the optimizer all parameters before it is prepared")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ConfigError: every process has a part of the state."""
        raise ConfigError("the optimizer's state is in parts over the processes; accelerator.load_state(DIR) reads it")

    def state_dict(self) -> Any:
        """Raises ConfigError: every process has a part of the state."""
        raise ConfigError("the optimizer's state is in parts over the processes; accelerator.save_state(DIR) writes it")

    def train(self) -> None:
        """Does nothing: none of the optimizers that the engine has switches between training and evaluation."""

    def eval(self) -> None:
        """Does nothing, as `train`."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing, unless the program accumulates batches itself: updates the weights."""
        self._finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing, unless the program has summed batches since the last update: forgets them."""
        self._drop()


# -- weight decay: which parameters of mt the groups of a program's optimizer decay ------------------

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
    patterns = []
    for name in names:
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        patterns.append(name if any(matches(other, [pattern]) for other in kept) else pattern)
    return sorted(set(patterns))


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
