"""Layers of a stack under their global numbers, of which a pipeline stage holds some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn


class NumberedLayers(nn.Module):
    """Layers keyed by their index in the whole model, of which this process may hold a subset."""

    def __init__(self, layers: Iterable[tuple[int, nn.Module]]) -> None:
        super().__init__()
        for number, layer in layers:
            # A ModuleList would number from 0 in every stage, and canonical names have global numbers.
            self.add_module(str(number), layer)

    def __getitem__(self, number: int) -> nn.Module:
        return self._modules[str(number)]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children())

    def __len__(self) -> int:
        return len(self._modules)

    def numbers(self) -> list[int]:
        return [int(name) for name in self._modules]
