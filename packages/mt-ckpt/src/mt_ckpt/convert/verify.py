"""Compares two checkpoints: every tensor bit for bit, what their models compute, the loss of the program that reads the
result, and the names that its strict load expects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mt_ckpt.convert.prepare import open_named
from mt_ckpt.convert.reader_loss import ReaderLoss, reader_loss, token_inputs
from mt_ckpt.megatron.vocabulary_padding import PADDING
from mt_ckpt.model import build_model, model_config
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader, CheckpointSaverSpec, ConvertOptions, StrictNames
from mt_core.config.schema import Config, ModelConfig
from mt_core.errors import CheckpointError
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.checkpoint.state import load_parameters

BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class Verification:
    """What was compared and found equal.

    outputs: module outputs that are equal bit for bit; 0 for a model that takes something else than rows of token ids.
    changed_settings: keys of [model] that both families have and that differ in value, as "old -> new".
    loss: None for a model whose output is no distribution over the vocabulary, and without the reader's program.
    strict_names: None for a format whose program has no strict load that is known here.
    """

    num_tensors: int
    num_outputs: int
    changed_settings: Mapping[str, str]
    loss: ReaderLoss | None
    strict_names: StrictNames | None


def verify_conversion(
    source: CheckpointReader,
    path: Path,
    spec: CheckpointSaverSpec,
    options: ConvertOptions,
    host: PluginHost,
    folder: Path | None = None,
) -> Verification:
    """path: what the saver `spec` has written from `source`, with `options`. folder: see `reader_loss`.

    Raises CheckpointError that names the first tensors that differ, or the first module whose output does; for a
    loss that the program computes otherwise that reads the format; and for names that its strict load does not want.
    """
    written = open_named(path, spec.name, host)
    num_tensors = _require_same_tensors(source, written)
    first, second = model_config(source, host), model_config(written, host)
    settings = changed_settings(first.model, second.model)
    # Both models are held one after the other: the first is dropped with the call that computed its outputs.
    num_outputs = _require_same_outputs(_outputs(first, source, host), _outputs(second, written, host), settings)
    loss = reader_loss(source, written, path, spec.name, host, folder)
    require_names = spec.require_strict_names and spec.require_strict_names.load()
    names = require_names(path, source, options, host) if require_names else None
    return Verification(num_tensors, num_outputs, settings, loss, names)


WHEN_UNSET = {"num_query_groups": "query_groups", "kv_channels": "head_dim", "ffn_hidden_size": "ffn_size"}
"""Key of [model] -> the property that holds what it is when it is not set, in families that have one."""


def changed_settings(first: ModelConfig, second: ModelConfig) -> dict[str, str]:
    """Keys that both have, maybe two families, and that differ in value: a default written out does not."""
    both = [key for key in type(first).model_fields if key in type(second).model_fields]
    pairs = {key: (_effective(first, key), _effective(second, key)) for key in both}
    return {key: f"{old} -> {new}" for key, (old, new) in pairs.items() if old != new}


def _effective(model: ModelConfig, key: str) -> Any:
    value = getattr(model, key)
    return getattr(model, WHEN_UNSET.get(key, key), None) if value is None else value


# -- tensors ----------------------------------------------------------------------------------------


def _require_same_tensors(source: CheckpointReader, written: CheckpointReader) -> int:
    """The number of tensors compared: the model's, and further ones that both sides have. Rows of padding may be others
    in another layout; what they do is in the reader's loss."""
    there = written.shapes()  # all of the model, as the engine has checked
    names = [name for name in source.shapes() if name in there and not name.startswith(PADDING)]
    different = [f"{name} ({difference})" for name in names if (difference := _difference(name, source, written))]
    if different:
        more = f" and {len(different) - 8} more" if len(different) > 8 else ""
        raise CheckpointError(f"written, but not the same: {', '.join(different[:8])}{more}")
    return len(names)


def _difference(name: str, source: CheckpointReader, written: CheckpointReader) -> str | None:
    first, second = source.read(name), written.read(name)
    if first.shape != second.shape or first.dtype != second.dtype:
        return f"{first.dtype} {list(first.shape)} became {second.dtype} {list(second.shape)}"
    # Bytes: NaN equals itself, and a sign of zero counts.
    wrong = sum(int((a != b).sum()) for a, b in zip(_blocks(first), _blocks(second), strict=True))
    return f"{wrong} of {first.nbytes} bytes differ" if wrong else None


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).split(BLOCK_BYTES)


# -- outputs ----------------------------------------------------------------------------------------


def _outputs(config: Config, reader: CheckpointReader, host: PluginHost) -> dict[str, Tensor]:
    """Module name -> its output for a few token ids, in the order in which they are computed.

    Of the modules that stand in a list (layers), of the top ones, and of the model itself. {} for a model that takes
    something else than rows of token ids.
    """
    model = build_model(config, host).eval()
    inputs = token_inputs(model, config.model.vocab_size or 1)
    if inputs is None:
        return {}
    load_parameters(model.named_parameters(), reader, parameter_layouts(model), MODEL, ParallelContext())
    outputs: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        # Layers, top modules and the whole: the first difference in this order says where the models part.
        if name.count(".") == 0 or name.rpartition(".")[2].isdigit():
            module.register_forward_hook(_recorder(name or "the model's output", outputs))
    with torch.no_grad():
        model(**inputs)
    return outputs


def _recorder(name: str, outputs: dict[str, Tensor]) -> Any:
    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        for i, tensor in enumerate(_tensors(output)):
            # The first call counts, of modules that are called several times (a shared layer). clone: a module may
            # write into its output later.
            outputs.setdefault(f"{name}[{i}]" if i else name, tensor.detach().clone())

    return record


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors(part)
    elif hasattr(output, "__dataclass_fields__"):
        yield from _tensors([getattr(output, key) for key in output.__dataclass_fields__])


def _require_same_outputs(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], settings: Mapping[str, str]
) -> int:
    for name, expected in first.items():
        output = second.get(name)
        if output is None or output.shape != expected.shape:
            raise CheckpointError(
                f"written, but another model: {name} is not there or of another shape{_why(settings)}"
            )
        if not torch.equal(output, expected):
            largest = (output - expected).abs().max().item()
            raise CheckpointError(
                f"written, but the models compute different things: the first output that differs is that of {name}, "
                f"by {largest:g} at most{_why(settings)}"
            )
    return len(first)


def _why(settings: Mapping[str, str]) -> str:
    changes = "; ".join(f"model.{key}: {change}" for key, change in settings.items())
    return f" (settings that changed: {changes})" if changes else ""
