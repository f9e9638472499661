"""What calibration does, and which schemes can take its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mt_ckpt.quantized.quantizer import PacksCodes, Quantizer
from mt_ckpt.quantized.schemes import FIXED, GROUPED, quantizer_named
from mt_core.errors import ConfigError

Method = Literal["rotate", "rotate-values", "smoothquant", "awq", "max", "percentile", "mse", "gptq"]
RANGES: tuple[Method, ...] = ("max", "percentile", "mse")
ROTATIONS: tuple[Method, ...] = ("rotate", "rotate-values")
FACTORS: tuple[Method, ...] = ("smoothquant", "awq")
METHODS: tuple[Method, ...] = (*ROTATIONS, *FACTORS, *RANGES, "gptq")
"""In the order in which they are applied."""


@dataclass(frozen=True)
class CalibrationOptions:
    """methods: rotations; smoothquant or awq, whose factors are folded into the layers before; at most one of max,
    percentile and mse, which chooses ranges (default: max); gptq, which chooses codes. percentile: of the magnitudes of
    a group. damping: part of the mean of the diagonal of second moments that GPTQ adds to it. by_activity: GPTQ rounds
    columns in the order of their mean squared input. min_tokens: with fewer, the weights of an expert are rounded by
    themselves."""

    scheme: str
    methods: tuple[Method, ...] = ("mse", "gptq")
    percentile: float = 99.9
    alpha: float = 0.5
    """SmoothQuant's: the part of the inputs' range that moves into the weights."""
    damping: float = 0.01
    by_activity: bool = True
    min_tokens: int = 64

    @property
    def range_method(self) -> Literal["max", "percentile", "mse"]:
        ranges = [method for method in self.methods if method in RANGES]
        return ranges[0] if ranges else "max"  # type: ignore[return-value]

    @property
    def uses_gptq(self) -> bool:
        return "gptq" in self.methods

    @property
    def factors(self) -> Literal["smoothquant", "awq"] | None:
        factors = [method for method in self.methods if method in FACTORS]
        return factors[0] if factors else None  # type: ignore[return-value]

    @property
    def needs_moments(self) -> bool:
        """Whether second moments of inputs are kept."""
        return self.uses_gptq or self.factors == "awq"

    def quantizer(self) -> Quantizer:
        """Raises ConfigError for a scheme that is not known, or whose rounding follows other rules."""
        quantizer = quantizer_named(self.scheme)
        if not isinstance(quantizer, PacksCodes):
            able = [name for name in (*FIXED, *GROUPED) if isinstance(quantizer_named(name), PacksCodes)]
            raise ConfigError(f"--scheme {self.scheme} cannot be calibrated; it can be {', '.join(able)}")
        return quantizer


def methods_named(names: Sequence[str]) -> tuple[Method, ...]:
    """Raises ConfigError for a method that is not known, and for several that exclude each other."""
    for name in names:
        if name not in METHODS:
            raise ConfigError(f"--method {name}: it can be {', '.join(METHODS)}")
    for group, what in ((RANGES, "chooses the ranges"), (FACTORS, "chooses factors of features")):
        if len([name for name in names if name in group]) > 1:
            raise ConfigError(f"--method {' --method '.join(names)}: one of {', '.join(group)} {what}")
    return tuple(method for method in METHODS if method in names)
