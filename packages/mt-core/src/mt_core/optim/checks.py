"""Rules of the [optimizer] section that span several keys."""

from __future__ import annotations

from mt_core.config.schema import Config, OptimizerConfig
from mt_core.errors import ConfigError
from mt_core.optim.configs import MuonConfig

QUINTIC_STEPS = 5


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise ConfigError for values that cannot work together."""
    _check_decoupled_lr(config)
    _check_weight_decay(config)
    if isinstance(config, MuonConfig):
        _check_muon(config)


def check_main_weights(config: Config) -> None:
    """Raise ConfigError where bf16 weights with 16-bit remainders cannot replace fp32 master weights."""
    if getattr(config.optimizer, "main_weights", None) == "remainders" and (why := remainders_objection(config)):
        raise ConfigError(f"optimizer.main_weights=remainders {why}, or optimizer.main_weights=auto")


def remainders_objection(config: Config) -> str | None:
    """Why bf16 weights with 16-bit remainders are not possible, and what to set instead; None: they are."""
    dtype = config.precision.dtype
    if dtype != "bf16":
        return f"completes bf16 weights, but precision.dtype={dtype}; set precision.dtype=bf16"
    if config.parallel.use_torch_fsdp2:
        return (
            "completes weights that are stored in bf16, and parallel.use_torch_fsdp2=true shards fp32 weights, which "
            "it casts when it gathers them; set parallel.use_distributed_optimizer=true in place of it"
        )
    return None


def _check_decoupled_lr(config: OptimizerConfig) -> None:
    if config.decoupled_lr is None:
        if config.decoupled_min_lr is not None:
            raise ConfigError(
                f"optimizer.decoupled_min_lr={config.decoupled_min_lr} needs optimizer.decoupled_lr, which is not set"
            )
        return
    key = "min_lr" if config.decoupled_min_lr is None else "decoupled_min_lr"
    lowest = getattr(config, key)
    if lowest > config.decoupled_lr:
        raise ConfigError(
            f"optimizer.{key}={lowest} is above optimizer.decoupled_lr={config.decoupled_lr}; "
            f"set optimizer.decoupled_min_lr to at most {config.decoupled_lr}"
        )


def _check_weight_decay(config: OptimizerConfig) -> None:
    if config.weight_decay_incr_style == "constant":
        return
    for key in ("start_weight_decay", "end_weight_decay"):
        if getattr(config, key) is None:
            raise ConfigError(
                f"optimizer.weight_decay_incr_style={config.weight_decay_incr_style} needs optimizer.{key}, "
                "which is not set"
            )


def _check_muon(config: MuonConfig) -> None:
    steps = config.muon_num_ns_steps
    if config.muon_coefficient_type == "quintic" and steps % QUINTIC_STEPS:
        raise ConfigError(
            f"optimizer.muon_num_ns_steps={steps} is no multiple of the {QUINTIC_STEPS} steps that "
            f"optimizer.muon_coefficient_type=quintic is made for; use {QUINTIC_STEPS} or "
            f"{2 * QUINTIC_STEPS}, or muon_coefficient_type=simple"
        )
