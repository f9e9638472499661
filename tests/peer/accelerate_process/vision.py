"""Replacements for torchvision and timm: a few digits, pictures and weights, without a download."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
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


class Folder(data.Dataset[Any]):
    """In place of `torchvision.datasets.ImageFolder`: 768 pictures of two classes for training, 128 otherwise."""

    classes = ("ants", "bees")

    def __init__(self, root: Any, transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
        count = 768 if str(root).endswith("train") else 128
        generator = torch.Generator().manual_seed(count)
        self.labels = torch.arange(count) % 2
        self.pictures = self.labels[:, None, None, None] + torch.rand(count, 3, 8, 8, generator=generator)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.pictures[index]), int(self.labels[index])


def composed(steps: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda picture: functools.reduce(lambda value, step: step(value), steps, picture)


def unchanged(*arguments: Any, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A random or statistical transform that leaves pictures as they are, so that runs can be compared."""
    return lambda picture: picture


def resized(size: int, *arguments: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """To a sixteenth of the size [3, size / 16, size / 16]: 224 becomes 14."""
    side = size // 16
    return lambda picture: functional.interpolate(picture[None], (side, side))[0]


class Network(nn.Module):
    """In place of a ResNet: one convolution, and no batch norm, whose statistics are those of a rank's batch."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.fc = nn.Linear(8, classes)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """[b, 3, side, side] -> [b, classes]."""
        return self.fc(torch.relu(self.conv(pictures)).mean((2, 3)))


def network(*names: str, weights: object = None, num_classes: int = 4, **options: Any) -> Network:
    """The weights that a file would have, the same at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network(num_classes)


def install() -> None:
    """Puts the replacements where scripts import them from."""
    top = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.models", "timm")
    modules = {name: ModuleType(name) for name in top}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    vision, datasets, transforms, models, timm = modules.values()
    vars(vision).update(__path__=[], datasets=datasets, transforms=transforms, models=models)
    vars(datasets).update(MNIST=Digits, ImageFolder=Folder)
    vars(transforms).update(Compose=composed, RandomResizedCrop=resized, CenterCrop=resized, Resize=unchanged)
    vars(transforms).update(RandomHorizontalFlip=unchanged, ToTensor=unchanged, Normalize=unchanged)
    vars(models).update(resnet18=network, ResNet18_Weights=SimpleNamespace(DEFAULT=None))
    vars(timm).update(create_model=network)
    data.random_split = few(data.random_split)
