"""Declarations of how a family's parameters stand in an external format, read in both directions.

A map is a list of rules. A rule ties one canonical parameter to one or more external tensors by a
reversible operation: the same tensor, a transpose, rows of query, key and value grouped, gate and up laid end
to end. `{i}` in names stands for a layer, and the rule for every layer.

    MAP = [
        Same("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        Concatenate("decoder.layers.{i}.mlp.linear_fc1.weight",
                    ("model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.mlp.up_proj.weight")),
    ]

`NameMap` expands the rules for a model and insists on a bijection: every external tensor is read once,
every parameter is written once.

Some files hold a parameter in another form: experts in one tensor or one by one, quantized or not. A rule then lists
such forms as further rules in `others`. `NameMap.reading` gives the map for the names that some files have; what is
written is always the rule's own form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from mt_core.errors import CheckpointError

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Rule:
    """ours: canonical name. theirs: external names, in the order in which the operation takes them. others: rules for
    the same parameter in other forms, which are read and never written."""

    ours: str
    theirs: str | tuple[str, ...]
    others: tuple[Rule, ...] = field(default=(), kw_only=True)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    def for_layer(self, layer: int) -> Rule:
        """The rule with `{i}` replaced; braces of other kinds stay."""
        return replace(
            self,
            ours=self.ours.replace("{i}", str(layer)),
            theirs=tuple(name.replace("{i}", str(layer)) for name in self.sources),
            others=tuple(rule.for_layer(layer) for rule in self.others),
        )

    def reading(self, names: frozenset[str]) -> Rule:
        """The form whose names are among these, if only in part; this one when none is."""
        forms = (self, *self.others)
        # A form of which some names are there is chosen, so that check() reports the missing ones.
        return next((form for form in forms if not names.isdisjoint(form.sources)), self)

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        """The canonical tensor from the external ones."""
        raise NotImplementedError

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        """The external tensors from the canonical one; the inverse of import_value."""
        raise NotImplementedError


@dataclass(frozen=True)
class Same(Rule):
    """One tensor as it is."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor]


@dataclass(frozen=True)
class Transpose(Rule):
    """One matrix, stored [in, out] there and [out, in] here."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].T.contiguous()

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.T.contiguous()]


@dataclass(frozen=True)
class LessOne(Rule):
    """The weight of a norm, stored less one there (layernorm1p). Both ways through fp32, in which a bf16 value between
    2^-15 and 2^8 comes back bit for bit."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].float() + 1.0

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.float() - 1.0]


@dataclass(frozen=True)
class Concatenate(Rule):
    """Several tensors end to end along dimension 0, in equal parts: gate and up."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors))

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [part.contiguous() for part in tensor.chunk(len(self.sources))]


@dataclass(frozen=True)
class GroupedQKV(Rule):
    """Query, key and value matrices (or biases) there; rows grouped by key-value group here.

    groups: key-value heads. heads: query heads. With one external tensor it holds q, k and v end to end;
    transposed: it is stored [in, out].
    """

    groups: int = 1
    heads: int = 1
    transposed: bool = False

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        parts = [x.T if self.transposed and x.ndim == 2 else x for x in tensors]
        # q, k and v rows end to end: [(heads + 2 groups) * rows, ...]
        if len(parts) == 1:
            rows = parts[0].shape[0] // (self.heads + 2 * self.groups)
            parts = list(parts[0].split([rows * self.heads, rows * self.groups, rows * self.groups]))
        # [groups, rows of q, k and v of the group, ...] -> [all rows, ...]
        return torch.cat([x.unflatten(0, (self.groups, -1)) for x in parts], dim=1).flatten(0, 1)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        # [groups, (per_group + 2) * size, ...], size = head_dim
        grouped = tensor.unflatten(0, (self.groups, -1))
        per_group = self.heads // self.groups
        size = grouped.shape[1] // (per_group + 2)
        parts = [x.flatten(0, 1) for x in grouped.split([per_group * size, size, size], dim=1)]
        if len(self.sources) == 1:
            parts = [torch.cat(parts)]
        return [(x.T if self.transposed and x.ndim == 2 else x).contiguous() for x in parts]


class NameMap:
    """Rules expanded for a model with `num_layers` layers; `ignored` names external tensors that hold no weight
    of it; * stands for anything."""

    def __init__(self, rules: Iterable[Rule], num_layers: int, ignored: Iterable[str] = ()) -> None:
        self.rules = [
            expanded
            for rule in rules
            for expanded in ([rule.for_layer(i) for i in range(num_layers)] if "{i}" in rule.ours else [rule])
        ]
        self.ignored = frozenset(ignored)
        self._patterns = [name for name in self.ignored if "*" in name]
        self._by_ours = {rule.ours: rule for rule in self.rules}

    def reading(self, names: Iterable[str]) -> NameMap:
        """The map for files that have these external names: each rule in the form in which they hold its parameter."""
        external_names = frozenset(names)
        # 0 layers: the rules are expanded already.
        return NameMap([rule.reading(external_names) for rule in self.rules], 0, self.ignored)

    def check(self, ours: Iterable[str], theirs: Iterable[str]) -> None:
        """Raise CheckpointError unless the rules take each external tensor once and give each parameter once."""
        wanted, external_names = set(ours), {name for name in theirs if not self._is_ignored(name)}
        sources = [name for rule in self.rules for name in rule.sources]
        problems = [f"{name} is missing in the checkpoint" for name in sources if name not in external_names]
        problems += [f"{name} is in the checkpoint but unknown" for name in sorted(external_names - set(sources))]
        problems += [f"{name} has no rule" for name in sorted(wanted - set(self._by_ours))]
        problems += [f"{name} is not a parameter of the model" for name in self._by_ours if name not in wanted]
        # Two rules that read one tensor would import it into two parameters and export it twice.
        twice = sorted(name for name, count in Counter(sources).items() if count > 1)
        problems += [f"{name} is taken twice" for name in twice]
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise CheckpointError(f"the tensors do not fit the model: {'; '.join(problems[:8])}{more}")

    def left_out(self, theirs: Iterable[str]) -> dict[str, int]:
        """Patterns of external tensors that are weights of other parts than the model has, such as a tower of images or
        prediction layers, and how many each stands for. A name without * is that of a buffer."""
        patterns = (next((p for p in self._patterns if fnmatchcase(name, p)), None) for name in theirs)
        return dict(sorted(Counter(pattern for pattern in patterns if pattern is not None).items()))

    def _is_ignored(self, name: str) -> bool:
        return name in self.ignored or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def import_value(self, read: Read) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, tensor) one by one; `read` gives an external tensor by name."""
        for rule in self.rules:
            yield rule.ours, rule.import_value([read(name) for name in rule.sources])

    def export_value(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """(external name, tensor) one by one, in the order of `tensors`."""
        for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            rule = self._by_ours[name]
            yield from zip(rule.sources, rule.export_value(tensor), strict=True)
