"""The Namespace of a written checkpoint: the model, the run and its layout as Megatron's arguments.

What Megatron reads from a checkpoint with --use-checkpoint-args is all here. A model that its arguments cannot express
is refused, naming the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mt_ckpt.megatron.families import model_arguments
from mt_ckpt.megatron.metadata import KEY
from mt_ckpt.megatron.model import Grid
from mt_ckpt.megatron.rank_plan import Pipeline
from mt_ckpt.megatron.run_arguments import run_arguments
from mt_ckpt.megatron.versions import Conventions
from mt_core.config.schema import Config
from mt_core.plugins import PluginHost

LOCAL, FUSED = "local", "transformer_engine"
ADDS_POSITIONS = "add_position_embedding"


@dataclass(frozen=True)
class Target:
    """How the written checkpoint is sharded, in which dtype, and for which Megatron-Core version.

    transformer_impl: whose layers' names it has; None: those of the run that the source came from, else Transformer
    Engine's.
    """

    grid: Grid
    pipeline: Pipeline
    padded_vocab_size: int
    vocab_divisible_by: int
    dtype: torch.dtype
    version: Conventions
    transformer_impl: str | None = None


def megatron_arguments(
    config: Config,
    metadata: Mapping[str, Any],
    target: Target,
    parameters: Collection[str],
    ckpt_format: str,
    host: PluginHost,
) -> dict[str, Any]:
    """The attributes of the Namespace. metadata: of the source; arguments that came from Megatron are kept.

    Raises ConfigError for a model that Megatron does not have.
    """
    kept = carried_arguments(metadata)
    model = model_arguments(config, parameters, kept, host)
    # Later entries win: defaults, what the source carried, the run, the model, the layout.
    return {
        "transformer_impl": FUSED,
        "seq_length": min(config.data.seq_length, model["max_position_embeddings"]),
        ADDS_POSITIONS: True,  # unless a run said --no-position-embedding: of every model, whatever its positions
        **kept,
        **run_arguments(metadata),
        **model,
        **_hybrid(model, target.version),
        **({"transformer_impl": target.transformer_impl} if target.transformer_impl else {}),
        **_layout(config, target),
        "ckpt_format": ckpt_format,
    }


def _hybrid(model: Mapping[str, Any], version: Conventions) -> dict[str, Any]:
    """Which layers a hybrid model has, as a version says it."""
    if not model["is_hybrid_model"]:
        return {}
    # Both are set: the source may carry the other one.
    patterns = dict.fromkeys(("hybrid_layer_pattern", "hybrid_override_pattern"))
    return {**patterns, version.pattern_argument: model["hybrid_layer_pattern"], "spec": [*version.layer_specification]}


def carried_arguments(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a reader of Megatron's formats found, as far as JSON could carry them."""
    carried = metadata.get(KEY)
    stored = carried.get("args", {}) if isinstance(carried, Mapping) else {}
    return {name: _restored(value) for name, value in stored.items() if not _is_object(value)}


def uses_fused_norms(args: Mapping[str, Any]) -> bool:
    """Whether the names are those of Transformer Engine's layers, as Megatron has them by default."""
    return args["transformer_impl"] != LOCAL


def _is_object(value: Any) -> bool:
    # What JSON does not have was kept as text, see `pickles.inert_objects.plain`; "<...>" is an object of a class.
    return isinstance(value, str) and value.startswith("<")


def _restored(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"torch\.\w+", value):
        dtype = getattr(torch, value.removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) else value
    return value


def _layout(config: Config, target: Target) -> dict[str, Any]:
    grid, pipeline = target.grid, target.pipeline
    virtual = pipeline.parts if pipeline.parts > 1 else None
    layers = getattr(config.model, "num_layers", 0)
    stage = math.lcm(grid.tp, grid.etp * grid.ep)  # the fewest processes that hold all of a stage
    return {
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": pipeline.stages,
        "transformer_pipeline_model_parallel_size": pipeline.stages,
        "virtual_pipeline_model_parallel_size": virtual,
        "num_layers_per_virtual_pipeline_stage": layers // pipeline.runs if virtual else None,
        "num_virtual_stages_per_pipeline_rank": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": grid.etp,
        "tensor_parallel_num_weight_shards": None,
        "expert_tensor_parallel_num_weight_shards": None,
        "context_parallel_size": 1,
        "data_parallel_size": stage // grid.tp,
        "world_size": stage * pipeline.stages,
        "sequence_parallel": False,
        "use_distributed_optimizer": False,
        "make_vocab_size_divisible_by": target.vocab_divisible_by,
        "padded_vocab_size": target.padded_vocab_size,
        "params_dtype": target.dtype,
        "bf16": target.dtype == torch.bfloat16,
        "fp16": target.dtype == torch.float16,
    }
