"""Configuration of the OLMoE family."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mt_core.config.checks import must_divide
from mt_core.config.schema import Config
from mt_models.blocks.decoder_config import DecoderConfig, check_decoder
from mt_models.blocks.moe import MoEOptions


class OlmoeConfig(DecoderConfig):
    """OLMoE-1B-7B (Muennighoff et al., 2024)."""

    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""

    clip_qkv: Annotated[float, Field(gt=0)] | None = None
    """Queries, keys (both behind their norms) and values are clamped to this magnitude. Default: they are not."""

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        """Not of each head: the family has norms over all of them."""
        return False


def check_olmoe(config: Config) -> None:
    check_decoder(config)
    model = config.model
    assert isinstance(model, OlmoeConfig)
    MoEOptions(model)
    # The norm of the keys is sharded as the keys are: whole heads for each rank.
    size = config.parallel.tensor_model_parallel_size
    must_divide("parallel.tensor_model_parallel_size", size, "model.num_query_groups", model.query_groups)
