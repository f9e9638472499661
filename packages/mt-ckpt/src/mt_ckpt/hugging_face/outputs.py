"""External tensors, computed from canonical ones."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.hugging_face.family import Family
from mt_ckpt.hugging_face.tensors import infer
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.name_map import Rule, Transpose


class Outputs:
    """External tensors computed from canonical ones, one canonical one at a time."""

    def __init__(
        self, source: CheckpointReader, family: Family, model: Any, dropped: Container[str] = frozenset()
    ) -> None:
        """dropped: canonical names of the source that are not written."""
        self._source = source
        names = family.name_map(model)
        stored = [name for name in source.shapes() if name.startswith(MODEL) and name not in dropped]
        ours = [name.removeprefix(MODEL) for name in stored]
        # Both ways, before anything is read: each canonical tensor has a rule and each rule its tensor.
        names.check(ours, [name for rule in names.rules for name in rule.sources])
        self._made_of: dict[str, str] = {}
        infos: dict[str, TensorInfo] = {}
        rules = self._rules = {rule.ours: rule for rule in names.rules}
        shapes, dtypes = source.shapes(), source.dtypes()
        for rule in [rules[name] for name in ours]:  # layer after layer, as the source has them
            tensor_info = TensorInfo(tuple(shapes[MODEL + rule.ours]), dtypes[MODEL + rule.ours])
            for name, info in _parts(rule, tensor_info):
                infos[name], self._made_of[name] = info, rule.ours
        self.infos: Mapping[str, TensorInfo] = infos

    def left_out(self) -> list[str]:
        """Canonical names of parameters that the format leaves to another file."""
        return [rule.ours for rule in self._rules.values() if not rule.sources]

    def made_of(self, name: str) -> str:
        """The canonical name of what an external tensor is a part of."""
        return self._made_of[name]

    def values(self, names: Iterable[str]) -> Iterator[Tensor]:
        """The tensors `names` in their order. Parts of one canonical tensor that follow one another cost one read; what
        the source has in this form is not put together first."""
        ours: str | None = None
        parts: Mapping[str, Tensor] = {}
        for name in names:
            if self._is_stored_so(name):
                ours, parts = None, {}
                yield self._source.read_external(MODEL + self.made_of(name), name)  # type: ignore[attr-defined]
                continue
            if self.made_of(name) != ours:
                parts = {}  # before the next is read
                ours = self.made_of(name)
                parts = self.parts_of(ours)
            yield parts[name]

    def _is_stored_so(self, name: str) -> bool:
        # Sources of conversions have it; a model in memory has not.
        external = getattr(self._source, "external", None)
        rule = self._rules[self.made_of(name)]
        stored = None if external is None else external(MODEL + rule.ours, rule)
        return stored is not None and stored[name].shape == self.infos[name].shape

    def parts_of(self, ours: str) -> Mapping[str, Tensor]:
        """All external tensors that are made of a canonical one."""
        rule = self._rules[ours]
        return dict(zip(rule.sources, rule.export_value(self._source.read(MODEL + ours)), strict=True))

    def rows_of(self, ours: str, rows: Tensor) -> Mapping[str, Tensor]:
        """What `parts_of` makes of a tensor with other columns than the canonical one, such as scales."""
        rule = self._rules[ours]
        return dict(zip(rule.sources, rule.export_value(rows), strict=True))

    def is_transposed(self, name: str) -> bool:
        """Whether the external tensor is a matrix [in, out]."""
        rule = self._rules[self.made_of(name)]
        return isinstance(rule, Transpose) or bool(getattr(rule, "transposed", False))


def _parts(rule: Rule, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    # Shapes by carrying out the rule on meta tensors: no second description of what a rule does.
    return zip(rule.sources, infer(lambda tensors: rule.export_value(tensors[0]), [info]), strict=True)
