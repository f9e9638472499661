"""`Prepared`: what a program gave to `Accelerator.prepare`, sorted by kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from mt_accelerate.data_loaders import MegatronLMDummyDataLoader, require_splittable
from mt_accelerate.schedulers import MegatronLMDummyScheduler
from mt_core.errors import ConfigError


@dataclass
class Prepared:
    """dummy: the MegatronLMDummyDataLoader, which was given three times."""

    model: Any
    optimizer: Any
    scheduler: Any
    loaders: list[DataLoader[Any]]
    dummy: MegatronLMDummyDataLoader | None

    @classmethod
    def of(cls, objects: tuple[Any, ...]) -> Prepared:
        """Raises ConfigError for no model or several, no optimizer or several, and what cannot be prepared."""
        models = [value for value in objects if isinstance(value, nn.Module)]
        loaders = [value for value in objects if isinstance(value, DataLoader)]
        dummies = [value for value in objects if isinstance(value, MegatronLMDummyDataLoader)]
        kinds = (nn.Module, DataLoader, MegatronLMDummyDataLoader)
        # By their attributes: optimizers and schedulers of other packages need no common base class.
        others = [value for value in objects if not isinstance(value, kinds)]
        optimizers = [value for value in others if hasattr(value, "param_groups")]
        schedulers = [value for value in others if value not in optimizers and _is_scheduler(value)]
        _require_one("model", models)
        _require_one("optimizer", optimizers)
        _require_no_more(schedulers[1:] + [one for one in others if one not in (*optimizers, *schedulers)])
        _require_same_optimizer(next(iter(schedulers), None), optimizers[0])
        _require_data(loaders, dummies)
        if not hasattr(getattr(models[0], "config", None), "to_dict"):
            raise ConfigError(f"the model is a {type(models[0]).__name__}, which has no config of transformers")
        return cls(models[0], optimizers[0], next(iter(schedulers), None), loaders, next(iter(dummies), None))


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, MegatronLMDummyScheduler) or (hasattr(value, "step") and hasattr(value, "get_last_lr"))


def _require_one(kind: str, found: list[Any]) -> None:
    if len(found) != 1:
        raise ConfigError(f"prepare needs one {kind} with Megatron-LM, and was given {len(found)}")


def _require_no_more(found: list[Any]) -> None:
    if found:
        raise ConfigError(f"prepare cannot take this {type(found[0]).__name__} beside the others")


def _require_same_optimizer(scheduler: Any, optimizer: Any) -> None:
    if scheduler is None or isinstance(scheduler, MegatronLMDummyScheduler):
        return
    if getattr(scheduler, "optimizer", None) is not optimizer:
        raise ConfigError(
            f"the {type(scheduler).__name__} sets the rates of another optimizer than the {type(optimizer).__name__} "
            "that is prepared with it; make it with this one"
        )


def _require_data(loaders: list[DataLoader[Any]], dummies: list[MegatronLMDummyDataLoader]) -> None:
    if dummies and (len(dummies) != 3 or len({id(one) for one in dummies}) != 1 or loaders):
        raise ConfigError("give one MegatronLMDummyDataLoader three times: for training, validation and test")
    if not dummies and not loaders:
        raise ConfigError("prepare needs a DataLoader beside the model: its batch_size is the micro-batch's")
    for loader in loaders:
        require_splittable(loader)
