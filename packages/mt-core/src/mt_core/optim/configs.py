"""Options of the optimizers and schedules, and rules that span them; reading a config needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mt_core.config.fields import NonNegativeFloat, PositiveFloat, PositiveInt, Probability, used_when
from mt_core.config.schema import Config, LRScheduleConfig, OptimizerConfig
from mt_core.errors import ConfigError

AdamBeta = Annotated[float, Field(ge=0, lt=1)]
"""A moment that never changes would be divided by 0 when its bias is corrected."""
WSDTail = Literal["exponential", "linear", "cosine", "minus_sqrt"]
MuonScale = Literal["spectral", "unit_rms_norm", "shape_scaling"]
MuonCoefficients = Literal["quintic", "simple"]


class AdamConfig(OptimizerConfig):
    """AdamW: decoupled weight decay (Loshchilov and Hutter, 2019)."""

    adam_beta1: AdamBeta = 0.9
    """Decay of the first moment."""
    adam_beta2: AdamBeta = 0.999
    """Decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of the second moment. Above 0: where all gradients were 0 the update would be 0/0."""
    main_weights: Literal["auto", "copies", "remainders"] = "auto"
    """What 16-bit training keeps beside bf16 weights: fp32 copies, or only the 16 bits that bf16 leaves out. auto:
    remainders where a GPU's fused kernel trains the same bits with them, else copies."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of both moments; bf16 is rounded stochastically."""


class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    sgd_momentum: Probability = 0.9
    """Decay of the momentum."""


class LionConfig(OptimizerConfig):
    """Lion: the sign of a momentum (Chen et al., 2023). Learning rates are 3 to 10 times below AdamW's."""

    lion_beta1: Probability = 0.95
    """Weight of the momentum in the direction of a step."""
    lion_beta2: Probability = 0.98
    """Decay of the momentum."""


class MuonConfig(OptimizerConfig):
    """Muon: momentum made orthogonal, for matrices (Jordan et al., 2024). Embeddings, output layer, biases and other
    vectors are updated by muon_scalar_optimizer."""

    muon_momentum: Probability = 0.9
    """Decay of the momentum."""
    muon_nesterov: bool = False
    """Nesterov's momentum."""
    muon_num_ns_steps: PositiveInt = 5
    """Newton-Schulz steps."""
    muon_coefficient_type: MuonCoefficients = "quintic"
    """Coefficients of the steps: quintic has a set for each of five, simple repeats Jordan's."""
    muon_scale_mode: MuonScale = "spectral"
    """Size of an update [out, in]: sqrt(max(out, in)), sqrt(out / in), or sqrt(max(1, out / in))."""
    muon_extra_scale_factor: NonNegativeFloat = 1.0
    """Times this. 0.2 with spectral makes learning rates those of AdamW."""
    muon_split_qkv: bool = True
    """Queries, keys and values are three matrices, not one."""
    muon_fp32_matmul_prec: Literal["highest", "high", "medium"] = "medium"
    """How a GPU multiplies the fp32 matrices of these steps: fp32, TF32, or bf16."""
    muon_scalar_optimizer: Literal["adam", "lion"] = "adam"
    """What updates the rest."""
    adam_beta1: AdamBeta = used_when(0.9, muon_scalar_optimizer="adam")
    """Decay of the first moment."""
    adam_beta2: AdamBeta = used_when(0.999, muon_scalar_optimizer="adam")
    """Decay of the second moment."""
    adam_eps: PositiveFloat = used_when(1e-8, muon_scalar_optimizer="adam")
    """Added to the root of the second moment."""
    lion_beta1: Probability = used_when(0.95, muon_scalar_optimizer="lion")
    """Weight of the momentum in the direction of a step."""
    lion_beta2: Probability = used_when(0.98, muon_scalar_optimizer="lion")
    """Decay of the momentum."""


class WSDScheduleConfig(LRScheduleConfig):
    """Warm-up, stable, decay."""

    lr_wsd_decay_style: WSDTail = "exponential"
    """Shape of the tail."""
    lr_wsd_decay_iters: PositiveInt | None = None
    """Steps of the tail, which ends with the decay. Give this or lr_wsd_decay_samples."""
    lr_wsd_decay_samples: PositiveInt | None = None
    """The same in samples."""


# -- rules of the [optimizer] section that span several keys ----------------------------------------------

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
