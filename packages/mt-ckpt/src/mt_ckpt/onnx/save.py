"""Writes encoders as ONNX graphs, a file for each: weights in fp32, any batch size and length.

torch's own exporter (`torch.onnx.export(dynamo=True)`) does it, with the package onnxscript. Inputs are `input_ids`,
`attention_mask` (1 for tokens) and, where the model has types of tokens, `token_type_ids`, int64 [batch, sequence]
each: what tokenizers of transformers give. A family exports what its model's `encoders` names.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from mt_ckpt.model import build_model, model_config
from mt_ckpt.writing.options import refuse, refuse_layout
from mt_ckpt.writing.resumable import ResumableFolder
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader, ConvertOptions
from mt_core.errors import ConfigError
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.build import build_model as build_run_model

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
EMBEDDING = "sentence_embedding"
"""The output of an encoder that gives one vector for a text."""
MAX_BYTES = 2**31 - 1
"""Size of a file without others beside it: the limit of protobuf."""


class Encoder(Protocol):
    """A module that is called with tokens, tokentype_ids=None and padding_mask=None, [B, S] each."""

    def __call__(self, tokens: Tensor, tokentype_ids: Tensor | None, padding_mask: Tensor | None) -> Any:
        """A tensor, or a named tuple of tensors of which some may be None."""
        ...


@runtime_checkable
class SupportsEncoding(Protocol):
    """A model with encoders that stand by themselves."""

    def encoders(self) -> Mapping[str, nn.Module]:
        """File name without its suffix -> an `Encoder`."""
        ...


def convert_checkpoint(path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> None:
    """Write NAME.onnx of each encoder, and the tokenizer's files.

    Raises ConfigError for models without encoders, for those above 2 GB, and where onnxscript is not installed.
    """
    refuse_layout("onnx", options)
    refuse("onnx", options, "max_shard_size", why="a graph and its weights are one file")
    if options.dtype not in (None, "fp32"):
        raise ConfigError(f"--dtype {options.dtype}: graphs are written in fp32; leave it out")
    model = loaded_model(source, host)
    assert isinstance(model, SupportsEncoding)
    with closing(ResumableFolder(path, None)) as folder:
        files = {f"{name}.onnx": graph(cast(Encoder, encoder), model) for name, encoder in model.encoders().items()}
        files |= dict(source.files())
        for name, data in files.items():
            folder.write_small(name, data)
        folder.commit(set(files))


def loaded_model(source: CheckpointReader, host: PluginHost) -> nn.Module:
    """The model in fp32 with the weights of the checkpoint."""
    config = model_config(source, host)
    _require(build_model(config, host, "meta"), config.model.family, source)
    ctx = ParallelContext()
    # With the attention of the run: torch's own becomes one operator of the graph.
    model = build_run_model(config, ctx, host).eval()
    layouts = parameter_layouts(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(layouts[name].to_local(source.read(MODEL + name).float(), ctx))
    return model


def _require(model: nn.Module, family: str, source: CheckpointReader) -> None:
    """Raises ConfigError for what cannot be written, before a weight is read."""
    if not isinstance(model, SupportsEncoding):
        raise ConfigError(
            f"model.family={family} has no encoder that ONNX files are written of; bert and biencoder have"
        )
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    if num_bytes > MAX_BYTES:
        raise ConfigError(f"the model has {num_bytes / 1e9:.1f} GB in fp32; a file of ONNX holds less than 2.1")
    if find_spec("onnxscript") is None:
        raise ConfigError("--saver onnx needs the package onnxscript; install it with pip install 'mt-ckpt[onnx]'")


class _Named(nn.Module):
    """The encoder with the names of inputs that tokenizers give, and without outputs that it does not have."""

    def __init__(self, encoder: nn.Module, has_types: bool) -> None:
        super().__init__()
        self.encoder, self.has_types = encoder, has_types

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> tuple[Tensor, ...]:
        outputs = self.encoder(ids, types, mask)
        values = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        return tuple(value for value in values if value is not None)


def graph(encoder: Encoder, model: nn.Module) -> bytes:
    """The file's contents."""
    config: Any = model.config
    named = _Named(cast(nn.Module, encoder), bool(config.num_tokentypes)).eval()
    inputs = (IDS, MASK, *((TYPES,) if named.has_types else ()))
    # Two texts of 16 tokens: 0 and 1 would be taken as constants.
    example = tuple(torch.ones(2, min(16, config.max_position_embeddings), dtype=torch.long) for _ in inputs)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=config.max_position_embeddings)}
    with torch.no_grad(), _quiet():
        names = output_names(encoder, example[0])
        program = torch.onnx.export(
            named,
            example,
            dynamo=True,
            verbose=False,
            input_names=list(inputs),
            output_names=names,
            dynamic_shapes=tuple(sizes for _ in inputs),
        )
    assert program is not None
    return bytes(program.model_proto.SerializeToString())


def output_names(encoder: Encoder, example: Tensor) -> list[str]:
    """Those of the named tuple that has a value, or EMBEDDING. example: [B, S]"""
    outputs = encoder(example, None, example)
    return (
        [EMBEDDING] if isinstance(outputs, Tensor) else [n for n in outputs._fields if getattr(outputs, n) is not None]
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes on packages that are missing and on names of axes."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
