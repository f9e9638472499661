"""Importance of each column of the matrices: mean squares of their inputs while the model computes a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mt_ckpt.convert.reader_loss import token_inputs
from mt_ckpt.gguf.families import family_to_write
from mt_ckpt.gguf.imatrix import Sums, write_imatrix
from mt_ckpt.hugging_face.save import Outputs
from mt_ckpt.model import build_model, model_config
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.loading import config_from_dict
from mt_core.errors import ConfigError, DataError
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.build import restore_tokenizer
from mt_core.train.checkpoint.state import load_parameters


def collect_imatrix(
    source: CheckpointReader,
    text: Path,
    target: Path,
    host: PluginHost,
    *,
    chunk_size: int = 512,
    max_chunks: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Sums]:
    """Write the importance matrix of `source` for a text to `target`, as llama.cpp has it; returns the sums.

    The model is held in fp32 on the CPU. text: UTF-8. chunk_size: tokens that are computed together, as one sequence.
    Raises ConfigError for a model without a tokenizer, or one that takes more than tokens, and DataError for a text of
    less than one chunk.
    """
    config = model_config(source, host)
    model = build_model(config, host).eval()
    chunks = _chunks(_ids(source, text, host), chunk_size, text)[:max_chunks]
    names = token_inputs(model, config.model.vocab_size or 1)
    if names is None or len(names) != 1:
        raise ConfigError(f"model.family={config.model.family} takes more than tokens; no importance is collected")
    load_parameters(model.named_parameters(), source, parameter_layouts(model), MODEL, ParallelContext())
    with _recorded(model) as recorded, torch.no_grad():
        for number, chunk in enumerate(chunks):
            model(**{next(iter(names)): torch.tensor([chunk])})
            progress(number + 1, len(chunks))
    sums = _named(recorded, source, config.model, host)
    write_imatrix(target, sums, [text.name], len(chunks), chunk_size)
    return sums


def _ids(source: CheckpointReader, text: Path, host: PluginHost) -> list[int]:
    stored = source.metadata["config"]
    config = config_from_dict({"model": stored["model"], "tokenizer": stored.get("tokenizer") or {}}, host)
    if not source.files():
        raise ConfigError("the checkpoint has no tokenizer to make tokens of the text; convert it with --tokenizer")
    return restore_tokenizer(config, source.files(), host).encode(text.read_text(encoding="utf-8"))


def _chunks(ids: Sequence[int], size: int, text: Path) -> list[Sequence[int]]:
    chunks = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    if not chunks:
        raise DataError(f"{text} has {len(ids)} tokens, fewer than a chunk of {size}: set a smaller --chunk-size")
    return chunks


# -- inputs of matrices --------------------------------------------------------------------------------


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, Sums]]:
    """Module -> sums of its inputs, of all modules that multiply by a matrix or by one for each expert."""
    sums: dict[str, Sums] = {}
    hooks = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim in (2, 3) and not name.startswith("embedding"):
            hooks.append(module.register_forward_pre_hook(_recorder(name, sums), with_kwargs=True))
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


def _recorder(name: str, sums: dict[str, Sums]) -> Callable[..., None]:
    def record(module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        x, weight = inputs[0], module.weight
        assert isinstance(weight, Tensor)
        if not (isinstance(x, Tensor) and x.is_floating_point() and x.shape[-1] == weight.shape[-1]):
            return
        experts = weight.shape[0] if weight.ndim == 3 else 1
        if name not in sums:
            sums[name] = Sums(np.zeros((experts, weight.shape[-1])), np.zeros(experts))
        if weight.ndim == 2:
            _add(sums[name], x.reshape(-1, x.shape[-1]), None)
            return
        # Rows of experts: permuted already, or tokens that the product permutes.
        order = keywords.get("read")
        rows = x if order is None else order.permute(x)
        groups = inputs[1]
        present = groups.present(len(rows))
        _add(sums[name], rows[present], groups.numbers(len(rows))[present])

    return record


def _add(sums: Sums, rows: Tensor, experts: Tensor | None) -> None:
    squares = rows.double().square()
    if experts is None:
        sums.squares[0] += squares.sum(0).numpy()
        sums.counts[0] += len(rows)
        return
    total = torch.zeros(sums.squares.shape, dtype=torch.float64).index_add_(0, experts.long(), squares)
    sums.squares += total.numpy()
    sums.counts += torch.bincount(experts.long(), minlength=len(sums.counts)).numpy()


def _named(recorded: Mapping[str, Sums], source: CheckpointReader, model: Any, host: PluginHost) -> dict[str, Sums]:
    """Under the names of the file; queries, keys and values have one input. Layers only, as llama.cpp collects it."""
    outputs = Outputs(source, family_to_write(model.family, host), model)  # type: ignore[arg-type]
    sums = {}
    for name, info in outputs.infos.items():
        entry = recorded.get(outputs.made_of(name).removesuffix(".weight"))
        if entry is None or not re.fullmatch(r"blk\..*\.weight", name):
            continue
        # Matrices that are stored transposed have other columns.
        if len(info.shape) >= 2 and info.shape[-1] == entry.squares.shape[-1]:
            sums[name] = entry
    return sums
