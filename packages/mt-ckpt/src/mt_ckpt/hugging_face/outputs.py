"""The external tensors of a model, computed from canonical ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mt_ckpt.hugging_face.family import Family
from mt_ckpt.hugging_face.reader import MODEL
from mt_ckpt.hugging_face.shapes import infer
from mt_ckpt.safetensors_files import TensorInfo
from mt_core.name_map import Rule
from mt_core.specs import CheckpointReader


@dataclass(frozen=True)
class _Output:
    """One external tensor: which of the parts that `rule` makes of a canonical one."""

    rule: Rule
    part: int


class Outputs:
    """External tensors computed from canonical ones, one canonical one at a time."""

    def __init__(self, source: CheckpointReader, family: Family, model: Any) -> None:
        self._source = source
        names = family.name_map(model)
        ours = [name.removeprefix(MODEL) for name in source.shapes() if name.startswith(MODEL)]
        # Both ways, before anything is read: each canonical tensor has a rule and each rule its tensor.
        names.check(ours, [name for rule in names.rules for name in rule.sources])
        self._outputs: dict[str, _Output] = {}
        infos: dict[str, TensorInfo] = {}
        rules = {rule.ours: rule for rule in names.rules}
        shapes, dtypes = source.shapes(), source.dtypes()
        for rule in [rules[name] for name in ours]:  # layer after layer, as the source has them
            given = TensorInfo(tuple(shapes[MODEL + rule.ours]), dtypes[MODEL + rule.ours])
            for part, (name, info) in enumerate(_parts(rule, given)):
                infos[name], self._outputs[name] = info, _Output(rule, part)
        self.infos: Mapping[str, TensorInfo] = infos

    def made_of(self, name: str) -> str:
        """The canonical name of what an external tensor is a part of."""
        return self._outputs[name].rule.ours

    def values(self, names: Iterable[str]) -> Iterator[Tensor]:
        """The tensors `names` in their order. Parts of one canonical tensor that follow one another cost one read."""
        ours: str | None = None
        parts: list[Tensor] = []
        for name in names:
            output = self._outputs[name]
            if output.rule.ours != ours:
                parts = []  # before the next is read
                ours = output.rule.ours
                parts = list(output.rule.export_value(self._source.read(MODEL + ours)))
            yield parts[output.part]


def _parts(rule: Rule, given: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    # Shapes by carrying out the rule on meta tensors: no second description of what a rule does.
    return zip(rule.sources, infer(lambda tensors: rule.export_value(tensors[0]), [given]), strict=True)
