"""What our models compute from a checkpoint, to compare with what Megatron computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mt_ckpt.model import build_model, model_config
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.checkpoint.state import load_parameters

BATCH, SEQUENCE = 4, 16


def inputs_of(family: str, vocab_size: int) -> dict[str, Tensor]:
    """What `Megatron.ask` takes, of ids below vocab_size. family: ours."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, vocab_size, (BATCH, SEQUENCE + 1), generator=generator)
    inputs = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    if family == "bert":
        inputs["types"] = torch.randint(0, 2, (BATCH, SEQUENCE), generator=generator)
    if family == "t5":
        inputs["decoder_tokens"] = torch.randint(0, vocab_size, (BATCH, SEQUENCE), generator=generator)
    return inputs


def logits_of(
    reader: CheckpointReader, inputs: Mapping[str, Tensor], host: PluginHost, *, double: bool = False
) -> Tensor:
    """[batch, sequence, vocabulary]. double: in fp64, from fp32 weights."""
    config = model_config(reader, host)
    model = build_model(config, host).eval()
    load_parameters(model.named_parameters(), reader, parameter_layouts(model), "model.", ParallelContext())
    if not double:
        return _logits(model, config.model.family, inputs)
    for module in model.modules():
        if getattr(module, "dtype", None) == torch.float32:  # what a residual stream is cast to
            module.dtype = torch.float64
    with patch.object(Tensor, "float", Tensor.double):  # of what is fp32 whatever the weights are
        return _logits(model.double(), config.model.family, inputs)


def _logits(model: nn.Module, family: str, inputs: Mapping[str, Tensor]) -> Tensor:
    given: list[Any] = [inputs["tokens"]]
    if family == "t5":
        given.append(inputs["decoder_tokens"])
    named = {"tokentype_ids": inputs["types"]} if "types" in inputs else {}
    with torch.no_grad():
        output = model(*given, **named)
    return output if isinstance(output, Tensor) else output.logits


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """[batch, sequence]"""
    return F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="none").view(labels.shape)
