"""How a family stands in GGUF, the format of llama.cpp: names of tensors and metadata, declared once for both ways.

A family registers a `GGUFFamily` under `name_maps["gguf"]`. Its rules tie canonical parameters to the tensors of the
file; its keys tie the file's metadata to the fields of config.json, so that the rest of a configuration is read and
written by the family's Hugging Face map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule

T = TypeVar("T", int, float, str, bool)


class Metadata(Protocol):
    """The metadata of a file. Keys stand without the architecture in front; values of other types are errors."""

    def get(self, key: str, kind: type[T]) -> T | None: ...

    def need(self, key: str, kind: type[T]) -> T: ...

    def numbers(self, key: str) -> list[int]:
        """One for each layer, where the file may hold one for all of them."""
        ...

    def flags(self, key: str) -> list[bool]:
        """One for each layer."""
        ...

    def decimals(self, key: str) -> list[float]:
        """One for each layer; none where the file does not have the key."""
        ...

    def has_tensor(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Tensor: ...

    def shape(self, name: str) -> Sequence[int]: ...


@dataclass(frozen=True)
class Key:
    """theirs: in the metadata, behind `<architecture>.`; ours: in config.json. default: where a file may leave it out;
    None: it may not."""

    theirs: str
    ours: str
    kind: type = int
    default: Any = None


External = Mapping[str, Any]
"""The contents of config.json."""


def no_tensors(external: External) -> Mapping[str, Tensor]:
    return {}


@dataclass(frozen=True)
class GGUFArchitecture:
    """name: `general.architecture`. model_type: of config.json.

    read: fields of config.json that depend on several keys. write: keys and values beside `keys`; raises ConfigError
    for a model that llama.cpp would compute differently. fits: whether a file of this architecture is this family's.
    applies: whether a model is written as this architecture, where there are several of a model_type.
    further: tensors that no parameter stands for. predicts: whether there are layers of multi-token prediction; where
    there are none a file is written without the model's.
    """

    name: str
    model_type: str
    keys: tuple[Key, ...]
    read: Callable[[Metadata], dict[str, Any]]
    write: Callable[[External], dict[str, Any]]
    fits: Callable[[Metadata], bool] = lambda metadata: True
    applies: Callable[[External], bool] = lambda external: True
    further: Callable[[External], Mapping[str, Tensor]] = no_tensors
    predicts: bool = True


@dataclass(frozen=True)
class GGUFFamily:
    """name_map: canonical parameters to tensors of the file, for a model of this configuration."""

    family: str
    architectures: tuple[GGUFArchitecture, ...]
    name_map: Callable[[Any], NameMap]
    copies: Callable[[Any], Mapping[str, str]] = lambda config: {}

    def spelling(self, config: Any, name: str) -> str:
        return name

    def architecture_for(self, external: External) -> GGUFArchitecture:
        """The architecture in which a model of this config.json is written. Raises ConfigError for a type that
        llama.cpp does not have."""
        model_type = str(external["model_type"])
        fitting = (
            candidate
            for candidate in self.architectures
            if candidate.model_type == model_type and candidate.applies(external)
        )
        architecture = next(fitting, None)
        if architecture is None:
            kinds = ", ".join(dict.fromkeys(candidate.model_type for candidate in self.architectures))
            raise ConfigError(
                f"a model of the type {model_type} cannot be written as GGUF; of this family can: {kinds}"
            )
        return architecture


def require(external: External, key: str, allowed: Sequence[Any], architecture: str) -> None:
    """Raises ConfigError for a value of config.json that the architecture does not compute."""
    value = external.get(key)
    if value not in allowed:
        legal = " or ".join(str(choice) for choice in allowed)
        raise ConfigError(
            f"{key}={value} cannot be written as GGUF of the architecture {architecture}; it can be {legal}"
        )


def decimals(tensor: Tensor) -> list[float]:
    """The shortest numbers that are these in 32 bits: those that somebody wrote."""
    return [float(str(number)) for number in tensor.float().numpy()]


# -- operations beside those of mt_core.name_map -------------------------------------------------------


def halves_to_neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head [first halves of all pairs, second halves] -> [both of pair 0, both of pair 1, ...]."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def neighbours_to_halves(tensor: Tensor, heads: int) -> Tensor:
    """The inverse of halves_to_neighbours."""
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


@dataclass(frozen=True)
class NeighboursQKV(GroupedQKV):
    """Query, key and value: llama.cpp rotates neighbouring rows of queries and keys, mt rows of a head's two halves."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        query, key, value = tensors
        rotated = [neighbours_to_halves(query, self.heads), neighbours_to_halves(key, self.groups)]
        return super().import_value([*rotated, value])

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        query, key, value = super().export_value(tensor)
        return [halves_to_neighbours(query, self.heads), halves_to_neighbours(key, self.groups), value]


@dataclass(frozen=True)
class ExpertHalves(Rule):
    """Gate and up of all experts there, [experts, ffn, in] each (or biases [experts, ffn]); end to end here."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors), dim=1)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [half.contiguous() for half in tensor.chunk(2, dim=1)]


@dataclass(frozen=True)
class PlusOne(Rule):
    """The weight of a norm, stored with one added there. Both ways through fp32."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].float() - 1.0

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.float() + 1.0]


@dataclass(frozen=True)
class Reshaped(Rule):
    """The same elements in another shape. here, there: without the first dimension; there None: flat."""

    here: tuple[int, ...] = ()
    there: tuple[int, ...] = ()

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].reshape(-1, *self.here) if self.here else tensors[0].reshape(-1)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.reshape(-1, *self.there).contiguous()]


@dataclass(frozen=True)
class NegativeExponential(Rule):
    """-exp of it there, in fp32. here, there: shapes without the first dimension; by default [heads] and [heads, 1]."""

    here: tuple[int, ...] = ()
    there: tuple[int, ...] = (1,)

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return (-tensors[0].float()).log().reshape(-1, *self.here)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [-tensor.float().exp().reshape(-1, *self.there)]


@dataclass(frozen=True)
class Exponential(Rule):
    """exp of it there, in fp32 [heads, 1]; here [heads]."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].float().log().flatten()

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.float().exp().reshape(-1, 1)]


@dataclass(frozen=True)
class LatentUpProjection(Rule):
    """Rows of keys and values of each head in one matrix here; there keys transposed [heads, latent, key] and values
    [heads, value, latent]."""

    heads: int = 1
    key_size: int = 0

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensors[0].transpose(1, 2), tensors[1]], dim=1).flatten(0, 1).contiguous()

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        rows = tensor.unflatten(0, (self.heads, -1))
        return [rows[:, : self.key_size].transpose(1, 2).contiguous(), rows[:, self.key_size :].contiguous()]
