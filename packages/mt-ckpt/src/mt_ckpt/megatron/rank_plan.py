"""The entries of a rank's file: which parameters stand in it, in which order and under which names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mt_ckpt.megatron import names
from mt_ckpt.megatron.names import EXPERTS, Style
from mt_ckpt.megatron.order import in_order

LINEAR = ("linear_", "in_proj", "out_proj", "eh_proj", "fc1_latent_proj", "fc2_latent_proj", "output_layer")
"""How the names of linear layers begin."""


@dataclass(frozen=True)
class RankEntry:
    """name: canonical. stored: in the file, the layer numbered within its part. expert: among the rank's."""

    name: str
    stored: str
    expert: int | None


@dataclass(frozen=True)
class Naming:
    """grouped: experts' matrices are `weight0`, `weight1`, ... of one layer."""

    style: Style
    grouped: bool

    def entries(self, parameters: Iterable[str], experts: int) -> Iterator[RankEntry]:
        """Of one model part, as Megatron's modules list them. experts: how many of a layer the rank holds."""
        members = in_order(parameters, self.style)
        first = _first_layers(members)
        # Parameters of the experts of one layer, which have to be complete: sequential experts list both matrices of
        # expert 0, then of expert 1. The empty name at the end flushes the last.
        waiting: list[str] = []
        for name in [*members, ""]:
            if waiting and (not name or not _same_experts(name, waiting[0])):
                yield from self._expert_entries(waiting, experts, first)
                waiting = []
            if EXPERTS in name:
                waiting.append(name)
            elif name:
                yield RankEntry(name, names.renumbered(self.style.stored(name), first), None)

    def _expert_entries(self, members: list[str], experts: int, first: dict[str, int]) -> Iterator[RankEntry]:
        # Grouped: weight0, weight1, ... of linear_fc1, then of linear_fc2.
        if self.grouped:
            for name in members:
                for expert in range(experts):
                    yield RankEntry(name, f"{names.renumbered(name, first)}{expert}", expert)
            return
        for expert in range(experts):
            for name in members:
                local = names.renumbered(name, first).replace(EXPERTS, f"{EXPERTS}local_experts.{expert}.")
                yield RankEntry(name, local, expert)


def extra_states(entries: Iterable[RankEntry], heads: Iterable[str]) -> list[str]:
    """Keys that every linear layer has beside its parameters; None is stored under them without FP8. heads: further
    layers, whose parameters may be another's."""
    modules = []
    for entry in entries:
        module, _, leaf = entry.stored.rpartition(".")
        if leaf.startswith(("weight", "bias")) and is_linear(module):
            modules.append(module)
    # dict.fromkeys: without repetitions, in the order of the modules.
    return [f"{module}.{names.EXTRA_STATE}" for module in dict.fromkeys([*modules, *heads])]


def is_linear(module: str) -> bool:
    return module.rpartition(".")[2].startswith(LINEAR)


def _first_layers(members: Iterable[str]) -> dict[str, int]:
    first: dict[str, int] = {}
    for name in members:
        if found := names.layer_of(name):
            first[found[0]] = min(first.get(found[0], found[1]), found[1])
    # Negative, so that `renumbered` counts from 0 within the part.
    return {stack: -number for stack, number in first.items()}


def _same_experts(name: str, other: str) -> bool:
    """Whether two parameters are of the experts of one layer."""
    return EXPERTS in name and name.partition(EXPERTS)[0] == other.partition(EXPERTS)[0]
