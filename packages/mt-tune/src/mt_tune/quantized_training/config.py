"""The section [quantize] of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mt_core.config.fields import Section
from mt_core.errors import ConfigError

if TYPE_CHECKING:
    from mt_core.config.schema import Config


class QuantizeConfig(Section):
    """Training with quantized weights: the forward pass multiplies by rounded weights, the gradients are those of the
    weights themselves (quantization-aware training)."""

    scheme: str | None = None
    """Scheme of `mt convert --quantize`: int8, fp8, w4a16-g32, nvfp4, mxfp4 and others; None: weights are not rounded.
    A checkpoint that is converted with the same scheme computes what training has computed."""
    inputs: bool | None = None
    """Round the inputs of matrices too, with a scale for each token. None: as readers of the scheme do (int8, fp8)."""


def is_fake_quantized(config: Config) -> bool:
    return config.section(QuantizeConfig).scheme is not None


ROWS = ("int8", "fp8")
"""Schemes with a scale for each row, whatever its length."""
SMALL = "int8"


def shrink_quantize(section: Mapping[str, Any], tree: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """For a small model, whose few columns no group fits: a scale for each row. Inputs are not rounded, since a
    difference in the last bit would turn some of them."""
    scheme = section.get("scheme")
    if scheme is None:
        return section
    return {**section, "scheme": scheme if scheme in ROWS else SMALL, "inputs": False}


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
