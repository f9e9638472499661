"""Converting the layers of a built model to FP8 matrix products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import nn

from mt_core.config.schema import Config, ModelConfig
from mt_core.errors import ConfigError
from mt_core.nn.embedding import VocabParallelOutput
from mt_core.nn.fp8.feed_forward import join_activations
from mt_core.nn.fp8.history import AdvanceHistories, AmaxHistory
from mt_core.nn.fp8.options import MICROSCALED, PRODUCTS, Fp8Options, resolve_options
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.linear import LinearModule
from mt_core.nn.model import NumberedLayers
from mt_core.parallel.context import ParallelContext

FIRST_OR_LAST = "a first or last layer"


@runtime_checkable
class UsesFp8(Protocol):
    """A module with products of its own kind (grouped ones of experts), which it can do in FP8."""

    def use_fp8(self, options: Fp8Options) -> str | None:
        """Do so from now on, or say why not."""
        ...


@dataclass
class Fp8Report:
    """Matrices of this process in FP8, and those of layers that stay in 16 bits, by reason. str() is a line for the
    log."""

    options: Fp8Options
    converted: int = 0
    left: Counter[str] = field(default_factory=Counter)

    def count(self, objection: str | None) -> None:
        if objection is None:
            self.converted += 1
        else:
            self.left[objection] += 1

    def __str__(self) -> str:
        config = self.options.config
        chosen = " (auto)" if config.fp8_implementation == "auto" else ""
        left = "".join(f"; {count} not: {reason}" for reason, count in sorted(self.left.items()))
        return (
            f"fp8 {config.fp8_format}, {config.fp8_recipe} scaling, by {self.options.implementation}{chosen}: "
            f"{self.converted} matrices of this process{left}"
        )


class Fp8State(nn.Module):
    """What a model in FP8 has beside its layers. advance: with delayed scaling."""

    def __init__(self, report: Fp8Report, histories: list[AmaxHistory], ctx: ParallelContext) -> None:
        super().__init__()
        self.report = report
        self.advance = AdvanceHistories(histories, ctx) if report.options.is_delayed else None


def use_fp8(model: nn.Module, config: Config, ctx: ParallelContext, kernels: Kernels) -> None:
    """Do the products of the model's layers as [precision] says: the matrices of attention, feed-forwards and experts.
    Embeddings, norms, routers, the core of attention and, unless fp8_output_proj is set, the output layer stay
    as they are.

    The model gets a child `fp8` with what was done (`fp8_report`). Raises ConfigError where it cannot be done.
    """
    if config.precision.fp8_format == "none":
        return
    report = Fp8Report(resolve_options(config.precision, ctx, kernels))
    histories: list[AmaxHistory] = []
    for layer, reason in _layers(model, config):
        # A list, since _convert adds modules while the loop runs.
        for module in list(layer.modules()):
            if isinstance(module, LinearModule):
                # A layer that stays in 16 bits has a reason, and is not converted.
                report.count(reason or _convert(module, report.options, histories))
            elif isinstance(module, UsesFp8):
                report.count(reason or module.use_fp8(report.options))
        if report.options.implementation in PRODUCTS and config.precision.fp8_recipe not in MICROSCALED:
            join_activations(layer, kernels)
    if config.precision.fp8_output_proj:
        for output in _output_layers(model, config):
            report.count(_convert(output, report.options, histories))
    _require_some(report)
    model.add_module("fp8", Fp8State(report, histories, ctx))


def fp8_report(model: nn.Module) -> Fp8Report | None:
    """What `use_fp8` did; None: nothing."""
    return next((module.report for module in model.modules() if isinstance(module, Fp8State)), None)


def _convert(module: LinearModule, options: Fp8Options, histories: list[AmaxHistory]) -> str | None:
    """Replace the product of a layer. Returns why it stays in 16 bits; None: it is in FP8."""
    objection = options.objection(module.weight.shape, options.multiple)
    # The layer keeps its product in 16 bits.
    if objection is not None:
        return objection
    history = options.history(module.ctx) if options.is_delayed else None
    if history is not None:
        # As a child: its history is saved under the layer's name.
        module.add_module("fp8", history)
        histories.append(history)
    module.multiply = options.multiply(module, history)
    return None


def _layers(model: nn.Module, config: Config) -> Iterator[tuple[nn.Module, str | None]]:
    """The layers of every stack, and why one stays in 16 bits as a whole."""
    precision = config.precision
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    for path, stack in model.named_modules():
        # Numbers are global: of a pipeline stage the first layer is not number 0.
        if not isinstance(stack, NumberedLayers):
            continue
        length = stack_length(path, config.model)
        for number in stack.numbers():
            at_end = length is not None and (number < start or number >= length - end)
            yield stack[number], FIRST_OR_LAST if precision.first_last_layers_bf16 and at_end else None


def stack_length(path: str, model: ModelConfig) -> int | None:
    """Layers of the whole stack at `path`, of which this process may hold a few; None: it has no first and last ones
    (those that predict further tokens)."""
    if "mtp" in path.split("."):
        return None
    owner = path.split(".")[-2] if "." in path else ""
    length = getattr(model, f"{owner}_layers", None) or getattr(model, "num_layers", None)
    return length if isinstance(length, int) else None


def _output_layers(model: nn.Module, config: Config) -> list[VocabParallelOutput]:
    layers = [module for module in model.modules() if isinstance(module, VocabParallelOutput)]
    if not layers and not getattr(config.model, "untie_embeddings_and_output_weights", True):
        raise ConfigError(
            "precision.fp8_output_proj=true: this model multiplies by its word embeddings, which stay in 16 bits; set "
            "model.untie_embeddings_and_output_weights=true or precision.fp8_output_proj=false"
        )
    return layers


def _require_some(report: Fp8Report) -> None:
    """Raises ConfigError where sizes kept every matrix out. A pipeline stage may have first and last layers alone."""
    reasons = [reason for reason in sorted(report.left) if reason != FIRST_OR_LAST]
    if report.converted or not reasons:
        return
    raise ConfigError(
        f"precision.fp8_format={report.options.config.fp8_format}: no matrix of this process can be in FP8: "
        f"{'; '.join(reasons)}. Set precision.fp8_format=none, or a larger model, another precision.fp8_recipe or "
        "a lower precision.fp8_min_features"
    )
