"""Stages of a model on the meta device: which are equal, and what one micro-batch costs in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.config.checks import must_divide
from mt_core.config.metrics import configured_loss
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.interfaces import SampleField
from mt_core.nn.dropout import use_streams
from mt_core.nn.fp8.options import SLOWER_UP_TO
from mt_core.nn.fp8.use import use_fp8
from mt_core.nn.kernels.choice import use_kernels
from mt_core.nn.layout import parameter_layouts
from mt_core.nn.loss import Loss, Unprojected, weighted_sum
from mt_core.nn.model import as_pipelined, contract, model_options
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import ActivationsForm, Pipelined, Stage, whole
from mt_core.plugins import PluginHost
from mt_core.specs import DATASETS, MODELS
from mt_core.train.auto_choices import with_resolved_loss
from mt_core.train.build import transform_model
from mt_tools.plan.activations import StageCost, empty_hidden, measure, sum_of
from mt_tools.plan.fakes import ON_GPUS, PlannedEnvironment, PlannedKernels, UndrawnStreams
from mt_tools.plan.fused_kernels import ConfiguredKernels, use_planned_products
from mt_tools.plan.ledger import Ledger
from mt_tools.plan.result_cache import ResultCache
from mt_tools.plan.routing import Assignment, RoutedTokens, assign_round_robin
from mt_tools.plan.weights import GradientMemory, hold_gradients

Kind = int
"""Layers of one kind have parameters of the same names and shapes, and the same attention window."""


Runs = dict[object, tuple[StageCost, ActivationsForm]]
"""Measured costs, and the form of the output."""


@dataclass(frozen=True)
class SharedRuns:
    """Costs shared by layouts that differ in the sharding of experts only."""

    has_experts: Callable[[Stage], bool] = lambda stage: True
    without_experts: Runs = field(default_factory=dict)
    """Costs of stages for which `has_experts` is false."""
    results: ResultCache = field(default_factory=ResultCache)
    """Results for all layouts."""


@dataclass
class StageCosts:
    """The costs of a configuration's stages. The configuration has its vocabulary size.

    A stage costs what precedes the layers, plus its first layer, plus what each further layer adds to the one before it
    (layers share some saved tensors, such as rotary angles), plus what follows them. Each pair of consecutive layer
    kinds is run once. What a stage holds beside what it keeps is the most that one of these does.
    """

    config: Config
    host: PluginHost
    ctx: ParallelContext
    ledger: Ledger
    kinds: Mapping[int, Kind]
    samples: int = 1
    """Factor of the measured costs: a multiple of the samples of the configuration's micro-batch."""
    assign: Assignment = assign_round_robin
    """Assigns tokens to experts, in MoE models."""
    shared: SharedRuns = field(default_factory=SharedRuns)
    """Shared with other StageCosts."""
    capability: tuple[int, int] | None = None
    """Compute capability of the planned GPUs, by which experts choose their product."""
    with_backward: bool = True
    """Otherwise the backward pass is not run, and its cost is 0."""
    gradients: GradientMemory = "allocated"
    on_host: bool = False
    """Whether activations are offloaded to host memory."""
    _known: dict[object, StageCost] = field(default_factory=dict)
    _runs: Runs = field(default_factory=dict)
    _forms: list[ActivationsForm] = field(default_factory=list)
    """Inputs of layers 0, 1, ..."""

    def of_samples(self, samples: int) -> StageCosts:
        """For micro-batches of `samples` times the samples; measured costs are shared."""
        return replace(self, samples=samples)

    def of(self, stage: Stage) -> StageCost:
        """The cost. Layers whose activations are offloaded to host memory keep nothing."""
        key = (self._kinds_of(stage), stage.first, stage.last, self.samples)
        if key not in self._known:
            # Where some layers of a stage are recomputed and others not, a layer's cost depends on its place: the stage
            # is run whole.
            taken_apart = bool(self.kinds) and len(stage.layers) > 0 and not self._counts_layers
            self._known[key] = sum_of(self._pieces(stage)) if taken_apart else self._whole(stage)
        return self._known[key]

    def _whole(self, stage: Stage) -> StageCost:
        cost = self._measured(stage)[0]
        offloaded = stage.layers[: self.config.recompute.cpu_offloading_num_layers]
        if offloaded:
            away = self._measured(Stage(offloaded, first=False, last=False))[0]
            cost = replace(cost, kept={part: count - away.kept.get(part, 0) for part, count in cost.kept.items()})
        return cost.of_samples(self.samples)

    @property
    def _counts_layers(self) -> bool:
        """Whether only some layers of a stage are recomputed, or layers are recomputed in groups."""
        return self.config.recompute.recompute_num_layers is not None

    def _pieces(self, stage: Stage) -> Iterator[StageCost]:
        """What precedes the layers, each layer, what follows them."""
        yield from (piece.of_samples(self.samples) for piece in self._inputs_and_layers(stage))
        if stage.last:
            yield self._outputs(stage.layers.stop)

    def _inputs_and_layers(self, stage: Stage) -> Iterator[StageCost]:
        if stage.first:
            yield self._measured(Stage(range(0), first=True, last=False))[0]
        offloaded = self.config.recompute.cpu_offloading_num_layers
        on_host, here = stage.layers[:offloaded], stage.layers[offloaded:]
        for number in on_host:
            yield replace(self, on_host=True)._layers(number, number + 1)
        # kinds A A B: A + (AA - A) + (AB - A). Saved tensors that layers share are in A, and cancel in the differences.
        for number in here[:1]:
            yield self._layers(number, number + 1)
        for number in here[1:]:
            yield self._layers(number - 1, number + 1).added_to(self._layers(number - 1, number))

    def _outputs(self, end: int) -> StageCost:
        """What follows the layers, with all samples: chunks of logits and the LM head's gradient have one size."""
        stage = Stage(range(end, end), first=False, last=True)
        if self.samples == 1:
            return self._measured(stage)[0]
        form = self.form_before(end)
        size = self.config.train.micro_batch_size * self.samples
        train = self.config.train.model_copy(update={"micro_batch_size": size})
        config = self.config.model_copy(update={"train": train})
        wider = tuple(replace(tensor_form, shape=(size, *tensor_form.shape[1:])) for tensor_form in form.tensors)
        return replace(self, config=config, samples=1)._measured(stage, replace(form, tensors=wider))[0]

    def _layers(self, start: int, stop: int) -> StageCost:
        return self._measured(Stage(range(start, stop), first=False, last=False))[0]

    def _measured(self, stage: Stage, form: ActivationsForm | None = None) -> tuple[StageCost, ActivationsForm]:
        """form: of the input, by default that of one measured micro-batch."""
        if form is None and not stage.first:
            form = self.form_before(stage.layers.start)
        key = (self._kinds_of(stage), stage.first, stage.last, form, self.gradients, self.on_host)
        known = self._runs.get(key) or self.shared.without_experts.get(key)
        if known is not None:
            return known
        is_own = not self.with_backward or self.shared.has_experts(stage)
        runs = self._runs if is_own else self.shared.without_experts
        runs[key] = self._run(stage, form)
        return runs[key]

    def form_before(self, number: int) -> ActivationsForm:
        """The input of a layer."""
        if not self._forms:
            self._forms.append(self._measured(Stage(range(0), first=True, last=False))[1])  # the embedding's output
        while len(self._forms) <= number:
            layer = len(self._forms) - 1
            self._forms.append(self._measured(Stage(range(layer, layer + 1), first=False, last=False))[1])
        return self._forms[number]

    def _kinds_of(self, stage: Stage) -> object:
        return tuple(self.kinds.get(number) for number in stage.layers)

    def _run(self, stage: Stage, before: ActivationsForm | None) -> tuple[StageCost, ActivationsForm]:
        # Offloading copies tensors, which have no values here; the layers' memory is subtracted afterwards.
        kept_here = self.config.recompute.model_copy(update={"cpu_offloading_num_layers": 0})
        config = self.config.model_copy(update={"recompute": kept_here})
        batch = empty_batch(self.config, self.host, self.ctx)
        kernels = PlannedKernels(self.ledger, {} if config.train.device == "cpu" else ON_GPUS)
        stages = (stage,) if self.kinds else None
        model = build_on_meta(config, self.host, self.ctx, kernels, stages, self.capability)
        config = with_resolved_loss(config, model, self.host)
        loss = configured_loss(config, self.host).build.load()(config, self.ctx)
        use_kernels([loss], ConfiguredKernels(config, self.ctx))
        hold_gradients(model, self.gradients)

        def run(model: nn.Module) -> Any:
            hidden = None if before is None else empty_hidden(before)
            inputs = {name: batch[name] for name in contract(model).inputs if name in batch}
            inputs.update(model_options(loss))  # such as project=False
            staged = as_pipelined(model)
            output = staged.run_stage(stage, hidden, **inputs) if staged is not None else model(**inputs)
            return weighted_sum(self._losses(loss, output, batch), batch["loss_mask"]) if stage.last else output

        use_streams(model, UndrawnStreams())
        routed = RoutedTokens(self.assign, self.shared.results)
        options = {"with_backward": self.with_backward, "on_host": self.on_host}
        return measure(model, lambda: run(model), kernels, routed, **options)

    def _losses(self, loss: Loss, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Losses that take hidden states compute gradients in the forward pass; only the logits' product counts there,
        since the backward pass is counted as twice the forward."""
        before = self.ledger.flops
        losses = loss(output, batch)
        if isinstance(output, Unprojected):
            shards = self.ctx.tp.size if self.ctx.sequence_parallel else 1
            self.ledger.flops = before + 2.0 * output.hidden.numel() * shards * len(output.own)
        return losses


def build_on_meta(
    config: Config,
    host: PluginHost,
    ctx: ParallelContext,
    kernels: PlannedKernels,
    stages: tuple[Stage, ...] | None,
    capability: tuple[int, int] | None = None,
) -> nn.Module:
    """The model, or some stages of it, on the meta device. capability: of the planned GPUs."""
    build: Callable[..., nn.Module] = host[MODELS].get(config.model.family, key="model.family").build.load()
    chosen = ConfiguredKernels(config, ctx)
    environment = PlannedEnvironment(config, ctx, host, stages, chosen, counting=kernels, capability=capability)
    model = transform_model(build(config.model, environment), environment)
    use_kernels(model.modules(), chosen)
    use_fp8(model, with_planned_fp8(config), ctx, chosen)
    use_planned_products(model)
    return model


def with_planned_fp8(config: Config) -> Config:
    """FP8 of the planned device, by products that run anywhere: the same tensors are saved and sent."""
    automatic = SLOWER_UP_TO + 1 if config.train.device != "cpu" else 1
    portable = {
        "fp8_implementation": "emulated",
        "fp8_min_features": config.precision.fp8_min_features or automatic,
    }
    return config.model_copy(update={"precision": config.precision.model_copy(update=portable)})


def layer_kinds(config: Config, model: nn.Module) -> dict[int, Kind]:
    """The kind of every layer of the whole model by its number; empty for a model that cannot be split into stages."""
    staged = as_pipelined(model)
    if staged is None:
        return {}
    # Layers with and without a window have the same parameters and other attention.
    window_of = getattr(config.model, "window_of", lambda number: None)
    kinds: dict[object, Kind] = {}
    return {
        number: kinds.setdefault((_parameters_of(staged, number), window_of(number)), len(kinds))
        for number in only_stage(config).layers
    }


def has_experts(model: nn.Module, stage: Stage) -> bool:
    """Whether a stage depends on the sharding of experts. True for a model that cannot be split into stages."""
    staged = as_pipelined(model)
    return staged is None or any(
        layout.replicas == "edp"  # what experts own
        for module in staged.stage_modules(stage)
        for layout in parameter_layouts(module).values()
    )


def _parameters_of(model: Pipelined, number: int) -> object:
    """Names and shapes of the parameters that a layer uses."""
    modules = model.stage_modules(Stage(range(number, number + 1), first=False, last=False))
    return tuple(
        tuple((name, layout.shape) for name, layout in parameter_layouts(module).items()) for module in modules
    )


def only_stage(config: Config) -> Stage:
    """The cost of a model that is not split."""
    return whole(config.model.stacked_layers or 0)


SOUND_FIELDS = ("audio", "audio_lengths")
"""Fields of samples with sound."""


def empty_batch(config: Config, host: PluginHost, ctx: ParallelContext) -> dict[str, Tensor]:
    """One micro-batch of this rank, without values. Raises ConfigError for fields whose shape names dimensions that are
    neither keys of the data set nor of the model."""
    sample = host[DATASETS].get(config.data.dataset_type, key="data.dataset_type").sample
    batch = {
        sample_field.name: torch.empty(
            (config.train.micro_batch_size, *field_shape(sample_field, config, ctx)),
            dtype=getattr(torch, sample_field.dtype),
            device="meta",
        )
        for sample_field in sample
        if (sample_field.name != "segment_ids" or config.data.reset_attention_mask)
        and (sample_field.name not in SOUND_FIELDS or getattr(config.data, "audio_token_index", None) is not None)
    }
    if "images" in batch and "tokens" in batch:
        batch |= text_with_image(config, batch, ctx.cp.size)
    return batch


def text_with_image(config: Config, batch: Mapping[str, Tensor], parts: int) -> dict[str, Tensor]:
    """Fields of one of equal parts of texts with an image, the largest one in dynamic resolution. Tokens and grids have
    values, since the model searches for image tokens. Raises ConfigError for an image that cannot be divided."""
    rows, length = batch["tokens"].shape
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    features: int = config.model.image_seq_length  # type: ignore[attr-defined]
    inputs: dict[str, Tensor] = {"tokens": tokens}
    if getattr(config.data, "dynamic_resolution", False):
        cells: int = config.data.most_cells  # type: ignore[attr-defined]
        views = (rows, cells, *batch["images"].shape[-3:])
        inputs |= {"images": torch.empty(views, device="meta"), "image_grids": torch.tensor([[[1, cells]]] * rows)}
        features *= cells
    must_divide("parallel.context_parallel_size", parts, "the positions of an image", features)
    # An image's placeholders at the beginning of each row.
    tokens[:, : features // parts] = config.model.image_token_index  # type: ignore[attr-defined]
    if "audio" in batch and hasattr(config.model, "audio_token_index"):
        inputs |= longest_sound(config, tokens, features // parts)
    return inputs


def longest_sound(config: Config, tokens: Tensor, start: int) -> dict[str, Tensor]:
    """Lengths of one sound a row, as long as a sample allows and there is room behind `start`, whose placeholders are
    written into the tokens."""
    model: Any = config.model
    data: Any = config.data
    samples = data.max_audio_samples
    while (positions := model.sound_positions(samples)) > tokens.shape[1] - start:
        samples = samples * 9 // 10
    lengths = torch.zeros(len(tokens), data.max_sounds, dtype=torch.int64)
    lengths[:, 0] = samples
    tokens[:, start : start + positions] = model.audio_token_index
    return {"audio_lengths": lengths}


def field_shape(sample_field: SampleField, config: Config, ctx: ParallelContext) -> tuple[int, ...]:
    """Shape of a rank's part of a sample: "[4, sequence_length]" -> (4, data.seq_length / context-parallel ranks)."""
    words = [word.strip() for word in sample_field.shape.strip("[]").split(",")]
    lengths = tuple(_length(word, sample_field, config) for word in words if word)
    # Samples are sharded along their sequence, which is their only dimension in models with context parallelism.
    return tuple(
        length // ctx.cp.size if word == "sequence_length" else length
        for word, length in zip(words, lengths, strict=False)
    )


def _length(word: str, sample_field: SampleField, config: Config) -> int:
    """A number, a key, or a quotient of two keys. "2 or 3": the first, which is that of most samples."""
    word = word.partition(" or ")[0]
    whole_word, _, divisor = word.partition("/")
    if divisor:
        return _length(whole_word.strip(), sample_field, config) // _length(divisor.strip(), sample_field, config)
    if word.isdigit():
        return int(word)
    name = {"sequence_length": "seq_length"}.get(word, word.replace(" ", "_"))
    for section in (config.data, config.model):
        if isinstance(value := getattr(section, name, None), int):
            return value
    raise ConfigError(
        f"mt plan does not know how large the field {sample_field.name} {sample_field.shape} of data.dataset_type="
        f'{config.data.dataset_type} is: neither [data] nor [model] has a number "{name}"'
    )
