"""Options of the optimizers and schedules; apart from their code, so that reading a config needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mt_core.config.schema import (
    LRScheduleConfig,
    NonNegativeFloat,
    OptimizerConfig,
    PositiveFloat,
    PositiveInt,
    Probability,
    used_when,
)

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
    """Number format of both moments; bf16 is rounded stochastically."""


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
