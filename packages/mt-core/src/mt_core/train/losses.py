"""The loss of the steps: the configured one or the caller's, wrapped by the caller if requested, and keeping logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mt_core.config.loss import configured_loss
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.use import use_kernels
from mt_core.nn.loss import Loss
from mt_core.nn.model import model_options
from mt_core.optim.environment import OptimizerEnvironment
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.kept_logits import KeptLogits
from mt_core.train.loss_choice import require_options, with_logits_loss, with_resolved_loss

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
    environment: OptimizerEnvironment,
    host: PluginHost,
    given: Loss | None,
    wrap: WrapLoss | None,
    *,
    return_logits: bool,
) -> Losses:
    """given, wrap, return_logits: as the arguments of `Engine.build`."""
    model, ctx = environment.model, environment.ctx
    needs_logits = wrap is not None or return_logits
    # Without logits in the model's output there is nothing to wrap or to keep, so the fused loss is not chosen.
    config = with_logits_loss(config, host) if needs_logits else with_resolved_loss(config, model, host)
    loss = given or _configured_loss(config, ctx, host, environment.kernels)
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
