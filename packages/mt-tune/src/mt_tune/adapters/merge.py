"""Merging an adapter into its base: W + s B A in fp32, rounded once to the dtype of the base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mt_ckpt.model import build_model, model_config
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_tune.adapters.base import NAME, Adapter, adapters
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.on_base import SECTION
from mt_tune.adapters.peft_folder import values_of
from mt_tune.adapters.quantized_reading import dense_checkpoint
from mt_tune.adapters.targets import WEIGHT

PROBE_TOKENS = 32
MARK = (f".{NAME}.", ".output_adapter.")


class MergedCheckpoint:
    """The model of a checkpoint without its adapter, which computes the same (a `CheckpointReader`)."""

    def __init__(self, source: CheckpointReader, host: PluginHost) -> None:
        """Raises ConfigError for a checkpoint without an adapter, and for an adapter that cannot be merged."""
        config = model_config(source, host)
        if not config.section(AdapterConfig).is_on:
            raise ConfigError("there is nothing to merge: the checkpoint has no adapter ([adapter] has type=none)")
        # A base that is held quantized is merged as it dequantizes.
        self._source = dense_checkpoint(source, config, host)
        all_adapters = adapters(build_model(config, host, "meta"))
        for adapter in all_adapters.values():
            refuse_shared_weight(adapter, config.model)
        self._adapters = {f"{MODEL}{path.removesuffix(NAME)}{WEIGHT}": (path, a) for path, a in all_adapters.items()}
        self._biases = {f"{MODEL}{path.removesuffix(NAME)}bias": (path, a) for path, a in all_adapters.items()}
        stored = {name: value for name, value in source.metadata["config"].items() if name != SECTION}
        self.metadata: Mapping[str, Any] = {**source.metadata, "config": stored}

    def _is_kept(self, name: str) -> bool:
        return name.startswith(MODEL) and not any(mark in name for mark in MARK)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, shape in self._source.shapes().items() if self._is_kept(name)}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: dtype for name, dtype in self._source.dtypes().items() if self._is_kept(name)}

    def read(self, name: str) -> Tensor:
        weight = self._source.read(name)
        if name not in self._adapters and name not in self._biases:
            return weight
        path, adapter = (self._adapters | self._biases)[name]
        merge = adapter.merged if name in self._adapters else adapter.merged_bias
        merged = merge(weight, values_of(path, adapter, self._source)).to(weight.dtype)
        if not merged.isfinite().all():
            raise CheckpointError(f"{name}: the merged weight has values that {weight.dtype} cannot hold, or NaN")
        return merged

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()


def refuse_shared_weight(adapter: Adapter, model: Any) -> None:
    """Raise ConfigError for an adapter of a matrix that another layer uses too, without it."""
    tied = not getattr(model, "untie_embeddings_and_output_weights", True)
    if tied and adapter.kind in ("embedding", "output") and not adapter.covers_tied_weight:
        raise ConfigError(
            f"{adapter.layer_path} is tied: token embeddings and LM head are one matrix, and the adapter changes one "
            "of them. Untie them in the base (model.untie_embeddings_and_output_weights), or serve the adapter unmerged"
        )


def largest_logit_change(source: CheckpointReader, merged: CheckpointReader, host: PluginHost) -> float | None:
    """The largest difference of a logit between the adapted and the merged model, of random token ids; both compute in
    fp32 with the weights as they are stored. None for a model that takes more than tokens."""
    models = [load_model(reader, host) for reader in (source, merged)]
    vocab_size = getattr(models[0].config, "vocab_size", None)
    if vocab_size is None:
        return None
    length = min(PROBE_TOKENS, getattr(models[0], "max_sequence_length", None) or PROBE_TOKENS)
    tokens = torch.randint(int(vocab_size), (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, second = (model(tokens) for model in models)
    return float((first - second).abs().max())


def load_model(reader: CheckpointReader, host: PluginHost) -> nn.Module:
    """The model of a checkpoint in fp32 on this process."""
    model = build_model(model_config(reader, host), host)
    layouts = parameter_layouts(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(layouts[name].to_local(reader.read(MODEL + name), ParallelContext()))
    return model.eval()
