"""The checkpoint that a run with adapter.base starts from, in the form in which the run holds its base."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.hugging_face.reader import HuggingFaceReader, StoredWeight
from mt_ckpt.model import build_model
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.schema import Config
from mt_core.errors import CheckpointError, ConfigError
from mt_core.name_map import Rule
from mt_core.nn.layout import ParameterLayout
from mt_core.plugins import PluginHost
from mt_core.train.build import DTYPES
from mt_tune.adapters.config import AdapterConfig, has_quantized_base
from mt_tune.adapters.quantized_base import configured_format, quantized_weights
from mt_tune.adapters.targets import external_rules
from mt_tune.quantized_weights.formats import as_bytes
from mt_tune.quantized_weights.stored import KeptWeight, kept_weight
from mt_tune.quantized_weights.weight import QuantizedWeight, dequantized

SECTION, BASE = "adapter", ("base", "base_block_size", "base_double_quant", "base_excluded")


def quantized_checkpoint(reader: CheckpointReader, config: Config, host: PluginHost) -> CheckpointReader:
    """What `checkpoint.load` gives with adapter.base. A checkpoint of a run with the same base is taken as it is."""
    weights = quantized_weights(build_model(config, host, "meta"))
    if any(
        f"{MODEL}{name}.{part.name}" in reader.shapes() for name, weight in weights.items() for part in weight.parts
    ):
        _require_same_base(reader, config)
        return reader
    return QuantizedCheckpoint(reader, weights, config, host)


def _require_same_base(reader: CheckpointReader, config: Config) -> None:
    stored, now = reader.metadata["config"].get(SECTION, {}), config.section(AdapterConfig).model_dump(mode="json")
    for key in BASE:
        if stored.get(key) != now[key]:
            raise ConfigError(
                f"adapter.{key}={now[key]}: the base of checkpoint.load is held with {key}={stored.get(key)}; set it "
                "to that"
            )


class QuantizedCheckpoint:
    """A checkpoint with the parts of quantized weights in place of the weights (a `CheckpointReader`).

    Weights that a published folder holds in the same format are kept bit for bit; others are quantized, each matrix as
    a package quantizes the module of that name. Raises ConfigError for weights that the folder has in another format.
    """

    def __init__(
        self, reader: CheckpointReader, weights: Mapping[str, QuantizedWeight], config: Config, host: PluginHost
    ) -> None:
        self._reader, self._weights = reader, {MODEL + name: weight for name, weight in weights.items()}
        self._rules, self._options = external_rules(config, host), config.section(AdapterConfig)
        self._parts = {f"{name}.{part.name}": name for name, weight in self._weights.items() for part in weight.parts}
        self._last: tuple[str, Mapping[str, Tensor]] = ("", {})
        self.metadata: Mapping[str, Any] = reader.metadata

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        others = {name: shape for name, shape in self._reader.shapes().items() if name not in self._weights}
        return {**others, **{name: self._layout(name).shape for name in self._parts}}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        others = {name: dtype for name, dtype in self._reader.dtypes().items() if name not in self._weights}
        return {**others, **dict.fromkeys(self._parts, torch.uint8)}

    def read(self, name: str) -> Tensor:
        if name not in self._parts:
            return self._reader.read(name)
        whole = self._parts[name]
        if self._last[0] != whole:  # the parts of a weight are read one after another
            self._last = ("", {})
            self._last = (whole, self._parts_of(whole))
        return self._last[1][name.rpartition(".")[2]]

    def files(self) -> Mapping[str, bytes]:
        return self._reader.files()

    def _layout(self, name: str) -> Any:
        return self._weights[self._parts[name]].layouts[name.rpartition(".")[2]]

    def _parts_of(self, name: str) -> Mapping[str, Tensor]:
        weight, rule = self._weights[name], self._rules.get(name.removeprefix(MODEL))
        kept: Mapping[str, KeptWeight] = {}
        if isinstance(self._reader, HuggingFaceReader):
            rule, stored = self._reader.stored_weights(name)
            kept = self._kept(name, rule, stored, weight)
        elif self._is_quantized(name):
            self._refuse(name, "in another format")
        matrices = external_matrices(weight.layout, rule)
        if kept:
            return collected(weight, matrices, lambda matrix: kept[str(matrix.source)].parts(matrix.index))
        dense = self._reader.read(name)
        rows = dense.reshape(-1, dense.shape[-1])

        def quantized(matrix: ExternalMatrix) -> Mapping[str, Tensor]:
            return weight.form.quantize(rows[matrix.rows].float())

        return collected(weight, matrices, quantized)

    def _is_quantized(self, name: str) -> bool:
        formats = getattr(self._reader, "stored_formats", None)
        form = formats().get(name) if formats is not None else None
        return form is not None and form.quantized

    def _kept(
        self, name: str, rule: Rule, stored: Mapping[str, StoredWeight | None], weight: QuantizedWeight
    ) -> Mapping[str, KeptWeight]:
        """Source -> its parts as they are stored; none where the folder has the weight unquantized."""
        sources = [source for source in rule.sources if not source.endswith("bias")]
        held = {source: stored_weight for source in sources if (stored_weight := stored[source]) is not None}
        if not held:
            if self._is_quantized(name):  # in a form that the family reads
                self._refuse(name, "in another format")
            return {}
        kept: dict[str, KeptWeight] = {}
        for source in sources:
            stored_weight = held.get(source)
            answer = "a part of it is not quantized" if stored_weight is None else kept_weight(stored_weight, weight)
            if isinstance(answer, str):
                self._refuse(name, answer)
                return {}
            kept[source] = answer
        if any(matrix.transposed for matrix in external_matrices(weight.layout, rule)):
            self._refuse(name, "with inputs and outputs the other way round")
            return {}
        return kept

    def _refuse(self, name: str, why: str) -> None:
        """Raises ConfigError unless adapter.base_requantize allows to round twice."""
        if not self._options.base_requantize:
            raise ConfigError(
                f"adapter.base={self._options.base}: checkpoint.load has {name.removeprefix(MODEL)} quantized "
                f"differently: {why}. Set adapter.base and its keys as the folder is, or adapter.base_requantize=true "
                "to quantize anew what it dequantizes to"
            )


def dense_checkpoint(source: CheckpointReader, config: Config, host: PluginHost) -> CheckpointReader:
    """The checkpoint of a run with its base dequantized into the dtype of the run."""
    if not has_quantized_base(config):
        return source
    return DenseCheckpoint(source, config, host)


class DenseCheckpoint:
    """The checkpoint of a run with a quantized base, with dequantized weights (a `CheckpointReader`)."""

    def __init__(self, source: CheckpointReader, config: Config, host: PluginHost) -> None:
        self._source, self.metadata = source, source.metadata
        precision = source.metadata["config"].get("precision", {})
        self._dtype = DTYPES[precision.get("dtype", "fp32")]
        self._form = configured_format(config.section(AdapterConfig))
        weights = quantized_weights(build_model(config, host, "meta"))
        self._weights = {MODEL + name: weight for name, weight in weights.items()}
        self._parts = {f"{name}.{part.name}" for name, weight in self._weights.items() for part in weight.parts}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        others = {name: shape for name, shape in self._source.shapes().items() if name not in self._parts}
        return {**others, **{name: weight.layout.shape for name, weight in self._weights.items()}}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        others = {name: dtype for name, dtype in self._source.dtypes().items() if name not in self._parts}
        return {**others, **dict.fromkeys(self._weights, self._dtype)}

    def read(self, name: str) -> Tensor:
        weight = self._weights.get(name)
        if weight is None:
            if name in self._parts:
                raise CheckpointError(f"{name} is a part of a quantized weight, which is read whole")
            return self._source.read(name)
        stored = {part.name: self._source.read(f"{name}.{part.name}") for part in weight.parts}
        return dequantized(weight.form, weight.layout, stored, weight.layout.shape, self._dtype)

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()


# -- canonical weights as the matrices of external tensors, each of which is quantized by itself -----------


@dataclass(frozen=True, eq=False)
class ExternalMatrix:
    """A matrix of an external tensor. source: the tensor's name, None where the family has no such format. index: of
    the matrices of a stack; None: the tensor is one. rows: [n] int64, its rows in the canonical [... x out, in].
    transposed: whether it is stored [in, out]."""

    source: str | None
    index: int | None
    rows: Tensor
    transposed: bool = False


def external_matrices(layout: ParameterLayout, rule: Rule | None) -> list[ExternalMatrix]:
    *leading, rows, _ = layout.shape
    experts = leading[0] if leading else 1
    numbers = torch.arange(experts * rows).view(*leading, rows, 1)
    if rule is None:
        return [ExternalMatrix(None, None, matrix_rows) for matrix_rows in numbers.view(experts, rows)]
    exported = zip(rule.sources, rule.export_value(numbers), strict=True)
    return [
        matrix
        for name, matrix_rows in exported
        if not name.endswith("bias")
        for matrix in _of_tensor(name, matrix_rows)
    ]


def _of_tensor(name: str, rows: Tensor) -> list[ExternalMatrix]:
    transposed = rows.shape[-1] > 1
    if rows.ndim == 2:
        return [ExternalMatrix(name, None, rows.flatten(), transposed)]
    return [ExternalMatrix(name, number, matrix_rows.flatten(), transposed) for number, matrix_rows in enumerate(rows)]


def collected(
    weight: QuantizedWeight, matrices: list[ExternalMatrix], parts_of: Callable[[ExternalMatrix], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Canonical bytes of each part [..., out, size(, 4)], from the parts of each external matrix [rows, size]."""
    *leading, rows, _ = weight.layout.shape
    count = rows * (leading[0] if leading else 1)
    whole = {part.name: torch.empty(count, *part.shape, dtype=torch.uint8) for part in weight.parts}
    for matrix in matrices:
        parts = parts_of(matrix)
        for part in weight.parts:
            values = parts[part.name]
            whole[part.name][matrix.rows] = as_bytes(values) if part.is_float else values.to(torch.uint8)
    return {name: values.view(*leading, rows, *values.shape[1:]) for name, values in whole.items()}
