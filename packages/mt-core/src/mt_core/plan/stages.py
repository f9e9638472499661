"""Stages of a model on the meta device: which are alike, what one micro-batch costs in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.layout import parameter_layouts
from mt_core.nn.stage import NumberedLayers, Pipelined, Stage, whole
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.hidden import Hidden, HiddenForm
from mt_core.plan.activations import StageCost, empty_hidden, measure
from mt_core.plan.ledger import Ledger
from mt_core.plan.stand_ins import ON_GPUS, PlannedEnvironment, PlannedKernels
from mt_core.plugins import PluginHost
from mt_core.specs import SampleField
from mt_core.train.step import MODEL_INPUTS, masked_sum

Kind = tuple[object, ...]
"""What tells a layer from others: names and shapes of its parameters, and its window."""


@dataclass
class StageCosts:
    """The costs of a configuration's stages, each kind measured once. The configuration has its vocabulary size.

    A stage of many layers of one kind is measured with one and with two of them: the others cost what the second does.
    """

    config: Config
    host: PluginHost
    ctx: ParallelContext
    ledger: Ledger
    kinds: Mapping[int, Kind]
    samples: int = 1
    """What is measured is multiplied by this: so many times the samples of the configuration's micro-batch."""
    _known: dict[object, StageCost] = field(default_factory=dict)
    _hidden: HiddenForm | None = None

    def of(self, stage: Stage) -> StageCost:
        """Without the layers whose activations wait in host memory."""
        offloaded = stage.layers[: self.config.recompute.cpu_offloading_num_layers]
        cost = self._of(stage).of_samples(self.samples)
        if not offloaded:
            return cost
        away = self._of(Stage(offloaded, first=False, last=False)).of_samples(self.samples)
        kept = {part: count - away.kept.get(part, 0) for part, count in cost.kept.items()}
        return StageCost(kept, cost.forward, cost.backward, cost.sent)

    def recomputed(self, stage: Stage) -> float:
        """Bytes that a group of recomputed layers keeps for the time of its backward pass."""
        options = self.config.recompute
        if options.recompute_granularity != "full" or not len(stage.layers):
            return 0.0
        size = (options.recompute_num_layers or 1) if options.recompute_method == "uniform" else 1
        plain = options.model_copy(update={"recompute_granularity": "none", "cpu_offloading_num_layers": 0})
        config = self.config.model_copy(update={"recompute": plain})
        without = StageCosts(config, self.host, self.ctx, self.ledger, self.kinds, self.samples, _hidden=self.hidden)
        return without.of(Stage(stage.layers[:size], first=False, last=False)).kept_bytes

    def _of(self, stage: Stage) -> StageCost:
        kinds = tuple(self.kinds.get(number) for number in stage.layers)
        key = (kinds, stage.first, stage.last)
        if key not in self._known:
            alike = len(kinds) > 2 and len(set(kinds)) == 1 and bool(self.kinds) and not self._counts_layers
            self._known[key] = self._extended(stage) if alike else self._measured(stage)
        return self._known[key]

    @property
    def _counts_layers(self) -> bool:
        """Whether some layers of a stage are recomputed and others not, or in groups."""
        return self.config.recompute.recompute_num_layers is not None

    def _extended(self, stage: Stage) -> StageCost:
        one, two = (self._of(Stage(stage.layers[:count], stage.first, stage.last)) for count in (1, 2))
        layers = len(stage.layers) - 1
        difference = two.plus(one, -1.0)
        return one.plus(difference, layers)

    def _measured(self, stage: Stage) -> StageCost:
        hidden = None if stage.first else empty_hidden(self.hidden)
        return self._run(stage, hidden)[0]

    @property
    def hidden(self) -> HiddenForm:
        """What travels between stages."""
        if self._hidden is None:
            self._hidden = self._run(Stage(range(0), first=True, last=False), None)[1]
        return self._hidden

    def _run(self, stage: Stage, hidden: Hidden | None) -> tuple[StageCost, HiddenForm]:
        # Offloading copies tensors, which have no values here; `of` takes the layers' memory away.
        kept_here = self.config.recompute.model_copy(update={"cpu_offloading_num_layers": 0})
        config = self.config.model_copy(update={"recompute": kept_here})
        batch = empty_batch(self.config, self.host, self.ctx)
        loss = self.host.losses.get(config.train.loss, key="train.loss").build.load()(config, self.ctx)

        def run(model: nn.Module) -> Any:
            inputs = {name: batch[name] for name in getattr(model, "inputs", MODEL_INPUTS) if name in batch}
            inputs.update(getattr(loss, "model_options", {}))
            output = model.run_stage(stage, hidden, **inputs) if isinstance(model, Pipelined) else model(**inputs)
            return masked_sum(loss(output, batch), batch["loss_mask"]) if stage.last else output

        kernels = PlannedKernels(self.ledger, {} if config.train.device == "cpu" else ON_GPUS)
        model = build_on_meta(config, self.host, self.ctx, kernels, (stage,) if self.kinds else None)
        return measure(model, lambda: run(model), kernels)


def build_on_meta(
    config: Config, host: PluginHost, ctx: ParallelContext, kernels: PlannedKernels, stages: tuple[Stage, ...] | None
) -> nn.Module:
    """The model, or some stages of it, whose tensors have shapes and no memory."""
    build: Callable[..., nn.Module] = host.models.get(config.model.family, key="model.family").build.load()
    return build(config.model, PlannedEnvironment(config, ctx, host, stages, counting=kernels))


def layer_kinds(config: Config, model: nn.Module) -> dict[int, Kind]:
    """Of every layer of the whole model by its number; empty for a model that cannot be cut."""
    kinds: dict[int, Kind] = {}
    if not isinstance(model, Pipelined):
        return kinds
    window_of = getattr(config.model, "window_of", lambda number: None)
    for stack in (module for module in model.modules() if isinstance(module, NumberedLayers)):
        for number in stack.numbers():
            shapes = ((name, layout.shape) for name, layout in parameter_layouts(stack[number]).items())
            kinds[number] = (*shapes, window_of(number))
    return kinds


def only_stage(config: Config) -> Stage:
    """Of a model that is not cut."""
    return whole(getattr(config.model, "num_layers", 0) or 0)


def empty_batch(config: Config, host: PluginHost, ctx: ParallelContext) -> dict[str, Tensor]:
    """One micro-batch of this rank, without values. Raises ConfigError for fields whose shape has other words."""
    sample = host.datasets.get(config.data.dataset_type, key="data.dataset_type").sample
    return {
        one.name: torch.empty(
            (config.train.micro_batch_size, *_shape(one, config, ctx)), dtype=getattr(torch, one.dtype), device="meta"
        )
        for one in sample
        if one.name != "segment_ids" or config.data.reset_attention_mask
    }


def _shape(one: SampleField, config: Config, ctx: ParallelContext) -> tuple[int, ...]:
    known = {"[]": (), "[sequence_length]": (config.data.seq_length // ctx.cp.size,)}
    if one.shape not in known:
        raise ConfigError(
            f"mt plan does not know how large the field {one.name} {one.shape} of data.dataset_type="
            f"{config.data.dataset_type} is; it can be {' or '.join(known)}"
        )
    return known[one.shape]
