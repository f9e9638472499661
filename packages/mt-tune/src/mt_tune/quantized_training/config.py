"""The section [quantize] of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_core.config.fields import Section
from mt_core.errors import ConfigError

if TYPE_CHECKING:
    from mt_core.config.schema import Config


class QuantizeConfig(Section):
    """Training with quantized weights: the forward pass multiplies by rounded weights, the gradients are those of the
    weights themselves (quantization-aware training)."""

    scheme: str | None = None
    """As of `mt convert --quantize`: int8, fp8, w4a16-g32, nvfp4, mxfp4 and others; None: weights are not rounded. A
    checkpoint that is converted with the same scheme computes what training has computed."""
    inputs: bool | None = None
    """Round the inputs of matrices too, with a scale for each token. None: as readers of the scheme do (int8, fp8)."""


def is_fake_quantized(config: Config) -> bool:
    return config.section(QuantizeConfig).scheme is not None


def check_quantize(config: Config) -> None:
    """Raises ConfigError for keys that contradict another section."""
    from mt_tune.adapters.config import has_adapter

    quantize = config.section(QuantizeConfig)
    scheme = quantize.scheme
    if scheme is None:
        if quantize.inputs is not None:
            raise ConfigError("quantize.inputs counts with quantize.scheme only; name a scheme, or leave it out")
        return
    if config.precision.fp8_format != "none":
        raise ConfigError(
            f"quantize.scheme={scheme} and precision.fp8_format={config.precision.fp8_format} both round what matrices "
            "multiply; set one of them to none"
        )
    if has_adapter(config):
        raise ConfigError(
            f"quantize.scheme={scheme} rounds weights that are trained, and [adapter] trains others beside them; "
            "merging would change what was rounded. Leave one out"
        )
