"""The loss of the steps: the configured one or the caller's, wrapped by the caller if requested, and keeping logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.config.metrics import configured_loss
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.embedding import gather_logits
from mt_core.nn.kernels.choice import Kernels, use_kernels
from mt_core.nn.loss import Loss
from mt_core.nn.model import contract, model_options
from mt_core.optim.base import OptimizerBuildContext
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.auto_choices import require_options, with_logits_loss, with_resolved_loss

# -- logits, for callers that look at them beside the loss -------------------------------------------


class KeptLogits:
    """A loss that keeps the logits of the micro-batches that it is given, from `begin` until they are taken.

    Raises ConfigError under context parallelism, where no process has the logits of a whole sequence, and for steps
    that are replayed from a graph.
    """

    def __init__(self, loss: Loss, config: Config, ctx: ParallelContext, model: nn.Module) -> None:
        if ctx.cp.size > 1:
            raise ConfigError(
                f"parallel.context_parallel_size={ctx.cp.size}: no process has the logits of a whole sequence; set it "
                "to 1, or build the engine without return_logits"
            )
        if config.train.cuda_graphs == "step":
            raise ConfigError(
                "train.cuda_graphs=step replays the whole step, and no Python that could keep logits; set it to blocks "
                "or none, or build the engine without return_logits"
            )
        self.loss, self.config, self.ctx = loss, config, ctx
        self._over_vocabulary = contract(model).predicts_tokens
        self._logits: list[Tensor] | None = None

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        # None outside of begin() ... take(): evaluation of a whole data set keeps nothing.
        if self._logits is not None:
            self._logits.append(logits_of(output).detach())
        return self.loss(output, batch)

    def begin(self) -> None:
        self._logits = []

    def take(self) -> Tensor | None:
        """[rows, S, vocabulary] (of classes or choices: [rows, C]); None on ranks without the last pipeline stage.
        Collective over tensor-parallel ranks."""
        kept, self._logits = self._logits, None
        if not kept:
            return None
        logits = torch.cat(kept)
        return whole_vocabulary(logits, self.config, self.ctx) if self._over_vocabulary else logits


def logits_of(output: Any) -> Tensor:
    """Logits in a model's output. Raises ConfigError for one that has none."""
    logits = output.logits if hasattr(output, "logits") else output
    if not isinstance(logits, Tensor):
        raise ConfigError(f"{type(output).__name__} has no logits")
    return logits


def whole_vocabulary(logits: Tensor, config: Config, ctx: ParallelContext) -> Tensor:
    """[..., ids of this rank] -> [..., vocab_size]"""
    assert config.model.vocab_size is not None
    return gather_logits(logits, config.model.vocab_size, config.model.make_vocab_size_divisible_by, ctx)


WrapLoss = Callable[[Loss, Config, ParallelContext], Loss]
"""(configured loss, configuration, context) -> the loss to train with"""


@dataclass(frozen=True)
class Losses:
    """config: with train.loss resolved. trained: the loss of the steps. kept_logits: the same, if it keeps logits."""

    config: Config
    trained: Loss
    kept_logits: KeptLogits | None


def build_losses(
    config: Config,
    environment: OptimizerBuildContext,
    host: PluginHost,
    loss: Loss | None,
    wrap: WrapLoss | None,
    *,
    return_logits: bool,
) -> Losses:
    """loss, wrap, return_logits: as the arguments of `Engine.build`."""
    model, ctx = environment.model, environment.ctx
    needs_logits = wrap is not None or return_logits
    # Without logits in the model's output there is nothing to wrap or to keep, so the fused loss is not chosen.
    config = with_logits_loss(config, host) if needs_logits else with_resolved_loss(config, model, host)
    loss = loss or _configured_loss(config, ctx, host, environment.kernels)
    if wrap is not None:
        loss = wrap(_require_outputs(loss, config), config, ctx)
    kept = KeptLogits(_require_outputs(loss, config), config, ctx, model) if return_logits else None
    require_options(model, kept or loss, config)
    return Losses(config, kept or loss, kept)


def _configured_loss(config: Config, ctx: ParallelContext, host: PluginHost, kernels: Kernels) -> Loss:
    loss = configured_loss(config, host).build.load()(config, ctx)
    use_kernels([loss], kernels)
    return loss


def _require_outputs(loss: Loss, config: Config) -> Loss:
    """Raises ConfigError for a loss that needs something else from the model than its outputs."""
    if options := model_options(loss):
        raise ConfigError(
            f"train.loss={config.train.loss} needs {', '.join(options)} from the model in place of its logits, which "
            "are required here; set it to auto or cross_entropy"
        )
    return loss
