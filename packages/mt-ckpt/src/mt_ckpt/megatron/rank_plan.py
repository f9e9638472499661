"""The entries of a rank's file: which parameters stand in it, in which order and under which names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mt_ckpt.megatron import names
from mt_ckpt.megatron.order import in_order

_EXPERTS = ".mlp.experts."


@dataclass(frozen=True)
class RankEntry:
    """name: canonical. stored: in the file, the layer numbered within its part. expert: among the rank's."""

    name: str
    stored: str
    expert: int | None


@dataclass(frozen=True)
class Naming:
    """fused: norms stand under the linear layers behind them, except before experts. grouped: experts' matrices are
    `weight0`, `weight1`, ... of one layer."""

    fused: bool
    grouped: bool
    layers_with_experts: frozenset[int]

    def entries(self, parameters: Iterable[str], experts: int) -> Iterator[RankEntry]:
        """Of one model part, as Megatron's modules list them. experts: how many of a layer the rank holds."""
        members = in_order(parameters, fused=self.fused)
        first = _first_layers(members)
        waiting: list[str] = []
        for name in [*members, ""]:
            if waiting and (not name or not _same_experts(name, waiting[0])):
                yield from self._expert_entries(waiting, experts, first)
                waiting = []
            if _EXPERTS in name:
                waiting.append(name)
            elif name:
                yield RankEntry(name, self._stored(name, first), None)

    def _expert_entries(self, members: list[str], experts: int, first: dict[str, int]) -> Iterator[RankEntry]:
        if self.grouped:
            for name in members:
                for expert in range(experts):
                    yield RankEntry(name, f"{_renumbered(name, first)}{expert}", expert)
            return
        for expert in range(experts):
            for name in members:
                local = _renumbered(name, first).replace(_EXPERTS, f"{_EXPERTS}local_experts.{expert}.")
                yield RankEntry(name, local, expert)

    def _stored(self, name: str, first: dict[str, int]) -> str:
        stored = _renumbered(name, first)
        found = names.layer_of(name)
        if not self.fused or found is None:
            return stored
        for inside, plain in names.FUSED_NORMS.items():
            if plain == "pre_mlp_layernorm." and found[1] in self.layers_with_experts:
                continue
            stored = stored.replace(f".{plain}", f".{inside}")
        return stored


def extra_states(entries: Iterable[RankEntry], *, has_output: bool) -> list[str]:
    """Keys that every linear layer has beside its parameters; None is stored under them without FP8."""
    modules = []
    for entry in entries:
        module, _, leaf = entry.stored.rpartition(".")
        last = module.rpartition(".")[2]
        if leaf.startswith(("weight", "bias")) and (last.startswith("linear_") or module == "output_layer"):
            modules.append(module)
    if has_output:
        modules.append("output_layer")
    return [f"{module}.{names.EXTRA_STATE}" for module in dict.fromkeys(modules)]


def _first_layers(members: Iterable[str]) -> dict[str, int]:
    first: dict[str, int] = {}
    for name in members:
        if found := names.layer_of(name):
            first[found[0]] = min(first.get(found[0], found[1]), found[1])
    return {stack: -number for stack, number in first.items()}


def _renumbered(name: str, offsets: dict[str, int]) -> str:
    return names.renumbered(name, offsets)


def _same_experts(name: str, other: str) -> bool:
    """Whether two parameters are of the experts of one layer."""
    return _EXPERTS in name and names.layer_of(name) == names.layer_of(other)
