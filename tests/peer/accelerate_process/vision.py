"""Replacements for torchvision: a few digits, without a download."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.utils import data

COUNT = 3072
"""Of which a twelfth is evaluated: a batch of 64 on each of four ranks."""


class Digits(data.Dataset[Any]):
    """In place of `torchvision.datasets.MNIST`: noise about one picture for each class."""

    def __init__(self, root: Any, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(COUNT) % 10
        pictures = torch.rand(10, 1, 28, 28, generator=generator)
        self.pictures = pictures[self.labels] + 0.2 * torch.rand(COUNT, 1, 28, 28, generator=generator)
        self.class_to_idx = {str(number): number for number in range(10)}

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pictures[index], int(self.labels[index])


def few(split: Callable[..., Any]) -> Callable[..., Any]:
    """`random_split` for the numbers of MNIST, in proportion to those of `Digits`."""

    def proportional(dataset: Any, lengths: Sequence[float], **options: Any) -> Any:
        total = sum(lengths)
        first, *others = (int(COUNT * length / total) for length in lengths) if total > COUNT else lengths
        first = COUNT - int(sum(others)) if total > COUNT else first
        return split(dataset, [first, *others], **options)

    return proportional


def install() -> None:
    """Puts the replacements where scripts import them from."""
    modules = {name: ModuleType(name) for name in ("torchvision", "torchvision.datasets", "torchvision.transforms")}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    top, datasets, transforms = modules.values()
    top.__path__, top.datasets, top.transforms = [], datasets, transforms  # type: ignore[attr-defined]
    datasets.MNIST = Digits  # type: ignore[attr-defined]
    transforms.ToTensor = lambda: None  # type: ignore[attr-defined]
    data.random_split = few(data.random_split)
