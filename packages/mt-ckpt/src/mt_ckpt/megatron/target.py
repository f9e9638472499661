"""What a conversion to one of Megatron's formats will write, validated before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mt_ckpt.megatron.families import require_writable
from mt_ckpt.megatron.metadata import optimizer_options
from mt_ckpt.megatron.model import Grid, as_written, layouts_of, load_model_config, require_divisible
from mt_ckpt.megatron.names import DIST_RENAMED, EMBEDDING, OUTPUT, Style, norms_apart, torch_renamed
from mt_ckpt.megatron.optimizer import MAIN
from mt_ckpt.megatron.rank_plan import Pipeline, split_layers
from mt_ckpt.megatron.reader import OPTIMIZER, require_same_names
from mt_ckpt.megatron.versions import Conventions, conventions, parse_version, require_known
from mt_ckpt.megatron.vocabulary_padding import Padding, choose_padding
from mt_ckpt.megatron.write_arguments import Target, carried_arguments, megatron_arguments, uses_fused_norms
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader, ConvertOptions
from mt_core.config.schema import Config
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.embedding import padded_vocab_size
from mt_core.nn.layout import ParameterLayout
from mt_core.parallel.context import AxisName
from mt_core.plugins import PluginHost

Fused = Literal["never", "beside", "always"]
MOMENTS = ("exp_avg", "exp_avg_sq")
NO_OPTIMIZER = "none"
"""An option's value: the optimizer's state is left out."""
DISTRIBUTED = "use_distributed_optimizer"
"""Argument of Megatron's, and key of [parallel]."""
OPTIONS: Mapping[AxisName, str] = {
    "tp": "target_tensor_parallel_size",
    "ep": "target_expert_parallel_size",
    "etp": "target_expert_tensor_parallel_size",
}


@dataclass(frozen=True)
class Plan:
    """layouts: by canonical name, the vocabulary padded. runs: the parameters of each pipeline run. args: Megatron's.

    states: of the optimizer, that are written with each parameter ("exp_avg", "main"); none: only the model is.
    optimizer: its options, as of the source's iteration; {} without states.
    """

    source: CheckpointReader
    config: Config
    target: Target
    layouts: Mapping[str, ParameterLayout]
    runs: list[list[str]]
    args: Mapping[str, Any]
    states: tuple[str, ...]
    optimizer: Mapping[str, Any]
    padding: Padding

    @property
    def distributed(self) -> bool:
        """Whether the optimizer's state is written as Megatron's distributed optimizer does: if the run had that."""
        parallel = self.source.metadata.get("config", {}).get("parallel", {})
        carried = carried_arguments(self.source.metadata)
        # A run of Megatron's says it in its arguments, one of mt's in [parallel].
        return bool(self.states) and bool(carried.get(DISTRIBUTED) or parallel.get(DISTRIBUTED))

    @property
    def experts_apart(self) -> bool:
        """Whether the experts have an optimizer for themselves: Megatron makes one with expert parallel ranks only."""
        return self.target.grid.ep > 1

    @property
    def local(self) -> bool:
        """Whether the names are those of Megatron's own layers."""
        return not uses_fused_norms(self.args)

    @property
    def version(self) -> Conventions:
        """The conventions of the Megatron-Core version that the files are for."""
        return self.target.version

    @property
    def hybrid(self) -> bool:
        return bool(self.args["is_hybrid_model"])

    def torch_style(self) -> Style:
        """Names of the `torch` format, in which the modules list their parameters."""
        fused: Fused = "never" if self.local else "beside"
        return Style(fused, self.hybrid, self.layouts, norms_apart(self.version), torch_renamed(self.version))

    def dist_style(self) -> Style:
        """Names of the `torch_dist` format: Transformer Engine's, whatever the layers; but latent attention's and those
        of hybrid models have no such mapping."""
        unmapped = self.hybrid or bool(self.args["multi_latent_attention"])
        fused: Fused = "beside" if not self.local else "never" if unmapped else "always"
        return Style(fused, self.hybrid, self.layouts, norms_apart(self.version), DIST_RENAMED)

    @property
    def iteration(self) -> int:
        return int(self.source.metadata.get("iteration", 0))

    def trained(self, name: str) -> bool:
        """Whether the optimizer has the parameter."""
        return name not in self.layouts or self.layouts[name].trained

    def source_of(self, name: str) -> str:
        """The parameter of the source: of a last stage's copy of the token embeddings, these."""
        return EMBEDDING if name == OUTPUT and name not in self.layouts else name

    def layout_of(self, name: str) -> ParameterLayout:
        return self.layouts[self.source_of(name)]

    def read(self, name: str, state: str | None = None) -> Tensor:
        """A parameter or a state of its shape, the vocabulary padded. The copy ("main") of weights that are fp32 is the
        weights."""
        whole = state is None or (state == MAIN and not self.rounded(name))
        stored = MODEL + name if whole else f"{OPTIMIZER}{state}.{name}"
        shape = self.layouts[name].shape
        # Only tables of the vocabulary may differ from the source, by their padding.
        if tuple(self.source.shapes()[stored]) == shape:
            return self.source.read(stored)
        return self.padding.pad(self.source, stored, name, state, shape[0])

    def rounded(self, name: str) -> bool:
        """Whether a parameter is 16-bit, so that the optimizer has fp32 master weights of it."""
        return _rounded(self.source, name)

    def step(self) -> float:
        """Number of optimizer steps."""
        # One step stands for all parameters; a checkpoint without any has made as many as iterations.
        name = next((name for name in self.source.shapes() if name.startswith(f"{OPTIMIZER}step.")), None)
        return float(self.source.read(name)) if name else float(self.iteration)


def make_plan(source: CheckpointReader, options: ConvertOptions, host: PluginHost, ckpt_format: str) -> Plan:
    """Raises ConfigError for options and models that Megatron cannot have, CheckpointError for tensors that are not the
    model's."""
    # Everything is checked by names and shapes: no tensor is read but the final norm, see `choose_padding`.
    config = load_model_config(_section(source), host)
    require_writable(config.model.family, host)
    version = conventions(parse_version(options.target_megatron_version))
    pipeline = _pipeline(options)
    etp = options.target_expert_tensor_parallel_size
    tp = options.target_tensor_parallel_size
    grid = Grid(tp, options.target_expert_parallel_size, tp if etp is None else etp)
    multiple = options.make_vocab_size_divisible_by or config.model.make_vocab_size_divisible_by
    assert config.model.vocab_size is not None
    # As Megatron pads: to a multiple of make_vocab_size_divisible_by * tensor ranks.
    padded = padded_vocab_size(config.model.vocab_size, multiple * tp)
    whole = layouts_of(config, host, padded)
    stored = [name.removeprefix(MODEL) for name in source.shapes() if name.startswith(MODEL)]
    require_same_names("the source", whole, stored)
    target = Target(grid, pipeline, padded, multiple, _dtype(source), version, options.target_transformer_impl)
    args = megatron_arguments(config, source.metadata, target, whole, ckpt_format, host)
    require_known(args, version.version)
    # `whole` is the model as ours; from here on layouts are as the version shards them.
    layouts = as_written(whole, version, local=not uses_fused_norms(args))
    _require_experts(grid, layouts)
    require_divisible(layouts, grid, OPTIONS)
    states = () if options.target_optimizer_format == NO_OPTIMIZER else _states(source, layouts, target.dtype)
    optimizer = optimizer_options(source.metadata, host) if states else {}
    padding = choose_padding(source, layouts, options.vocab_padding)
    return Plan(source, config, target, layouts, split_layers(layouts, pipeline), args, states, optimizer, padding)


def _section(source: CheckpointReader) -> Mapping[str, Any]:
    config = source.metadata.get("config")
    model = config.get("model") if isinstance(config, Mapping) else None
    if not isinstance(model, Mapping):
        raise CheckpointError("the source does not say what its model is: its metadata has no config.model")
    return model


def _pipeline(options: ConvertOptions) -> Pipeline:
    stages, parts = options.target_pipeline_parallel_size, options.target_virtual_pipeline_parallel_size
    if parts > 1 and stages == 1:
        raise ConfigError(
            f"--target-virtual-pipeline-parallel-size {parts} needs --target-pipeline-parallel-size of at least 2"
        )
    return Pipeline(stages, parts)


def _require_experts(grid: Grid, layouts: Mapping[str, ParameterLayout]) -> None:
    if grid.ep > 1 and not any(split.axis == "ep" for layout in layouts.values() for split in layout.splits):
        raise ConfigError(f"--target-expert-parallel-size {grid.ep}: the model has no experts; it can be 1")


def _dtype(source: CheckpointReader) -> torch.dtype:
    """The dtype of most weights."""
    counts: dict[torch.dtype, int] = {}
    for name, dtype in source.dtypes().items():
        if name.startswith(MODEL):
            counts[dtype] = counts.get(dtype, 0) + 1
    # Single parameters may have another dtype, such as a router's bias in fp32.
    return max(counts, key=lambda dtype: counts[dtype])


def _states(source: CheckpointReader, layouts: Mapping[str, ParameterLayout], dtype: torch.dtype) -> tuple[str, ...]:
    """Adam's moments, with the fp32 copies of 16-bit weights, if the source has them for all parameters."""
    names = source.shapes()
    trained = [name for name, layout in layouts.items() if layout.trained]
    needed = [f"{OPTIMIZER}{state}.{name}" for state in MOMENTS for name in trained]
    needed += [f"{OPTIMIZER}{MAIN}.{name}" for name in trained if _rounded(source, name)]
    missing = [name for name in needed if name not in names]
    if not missing:
        return MOMENTS if dtype == torch.float32 else (*MOMENTS, MAIN)
    # Some states of a broken or foreign checkpoint: not the same as none.
    if len(missing) < len(needed):
        raise CheckpointError(
            f"the source has an optimizer without {missing[0]}, one of {len(missing)} tensors that are missing"
        )
    return ()


def _rounded(source: CheckpointReader, name: str) -> bool:
    return source.dtypes()[f"{MODEL}{name}"] != torch.float32
