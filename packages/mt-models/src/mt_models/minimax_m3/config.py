"""Configuration of MiniMax-M3, text, and its published size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from mt_core.config.fields import NonNegativeInt, PositiveInt
from mt_core.config.layer_pattern import read_pattern
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import PartialRotaryConfig, check_moe_decoder, refuse_divided_sequences

if TYPE_CHECKING:
    from mt_models.blocks.key_blocks import Selection

PATTERN = "model.sparse_attention_freq"


class MiniMaxM3Config(PartialRotaryConfig):
    """MiniMax-M3 (MiniMax, 2026) without its vision tower."""

    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""
    rotary_base: Annotated[float, Field(gt=0)] = 5000000.0
    """Base of the rotary wavelengths."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of each head that is rotated, its first channels."""
    sparse_attention_freq: PositiveInt | str = 1
    """Every so many layers, from the first on, one attends to chosen blocks of keys, and the others to all keys; or a
    pattern such as "([0]*3+[1]*57)" with a 1 for each layer with chosen blocks."""
    sparse_num_index_heads: PositiveInt | None = None
    """Query heads of an indexer; each chooses the blocks of num_attention_heads / sparse_num_index_heads query heads.
    Default: num_query_groups."""
    sparse_index_dim: PositiveInt = 128
    """Channels of a query and key head of an indexer, of which as many are rotated as of a head of attention."""
    sparse_block_size: PositiveInt = 128
    """Keys of a block."""
    sparse_topk_blocks: PositiveInt = 16
    """Blocks that a query attends to: those whose best key has the highest score of the indexer. Sequences of at most
    so many blocks attend to all keys."""
    sparse_local_blocks: NonNegativeInt = 1
    """A query's own block and those before it that are always among the chosen ones."""

    @property
    def sparse_layers(self) -> list[bool]:
        """For each layer whether it attends to chosen blocks. Raises ConfigError for a pattern that is none."""
        freq = self.sparse_attention_freq
        if isinstance(freq, int):
            return [layer % freq == 0 for layer in range(self.num_layers)]
        return read_pattern(freq, self.num_layers, PATTERN)

    @property
    def index_heads(self) -> int:
        return self.sparse_num_index_heads or self.query_groups

    @property
    def block_selection(self) -> Selection:
        # Imported here: configurations do without torch.
        from mt_models.blocks.key_blocks import Selection

        return Selection(self.sparse_block_size, self.sparse_topk_blocks, self.sparse_local_blocks)

    def leaves_blocks_out(self, seq_length: int) -> bool:
        """Whether some keys of a sequence of so many positions are not attended to."""
        return seq_length > self.sparse_block_size * self.sparse_topk_blocks and any(self.sparse_layers)

    # Fixed values for keys of the shared blocks.

    @property
    def activation(self) -> Literal["swiglu", "geglu_tanh", "clamped_swiglu", "limited_swiglu"]:
        return "clamped_swiglu"

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return True


def check_minimax_m3(config: Config) -> None:
    """Raise ConfigError for heads, blocks and layouts that do not fit together."""
    check_moe_decoder(config)
    model = config.model
    assert isinstance(model, MiniMaxM3Config)
    if any(model.sparse_layers):
        _check_index_heads(model, config.parallel.tensor_model_parallel_size)
        _check_blocks(model)
        refuse_divided_sequences(config)


def _check_index_heads(model: MiniMaxM3Config, ranks: int) -> None:
    heads, groups = model.index_heads, model.query_groups
    if model.num_attention_heads % heads or max(heads, groups) % min(heads, groups):
        raise ConfigError(
            f"model.sparse_num_index_heads={heads} has to divide "
            f"model.num_attention_heads={model.num_attention_heads}, and to be a divisor or a multiple of "
            f"model.num_query_groups={groups}"
        )
    if heads % ranks and ranks % heads:
        raise ConfigError(
            f"parallel.tensor_model_parallel_size={ranks} does not fit model.sparse_num_index_heads={heads}: each rank "
            "has the query heads of whole heads of the indexer, or a part of those of one; it has to be a divisor or a "
            "multiple"
        )


def _check_blocks(model: MiniMaxM3Config) -> None:
    if model.sparse_local_blocks > model.sparse_topk_blocks:
        raise ConfigError(
            f"model.sparse_local_blocks={model.sparse_local_blocks} is above model.sparse_topk_blocks="
            f"{model.sparse_topk_blocks}, of which they are a part"
        )
    if model.rotary_dim > model.sparse_index_dim:
        raise ConfigError(
            f"model.sparse_index_dim={model.sparse_index_dim} is below the channels that positions rotate "
            f"({model.rotary_dim_key})={model.rotary_dim}"
        )


def shrink_minimax_m3(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`. Half of the keys are left out at the end of a sequence; a pattern of layers keeps one
    that attends to all keys."""
    blocks = max(min(model["sparse_topk_blocks"], seq_length // 4), 1)
    keys: dict[str, Any] = {
        "sparse_index_dim": 8,
        "sparse_block_size": min(model["sparse_block_size"], 2),
        "sparse_topk_blocks": blocks,
        "sparse_local_blocks": min(model["sparse_local_blocks"], blocks),
        "sparse_num_index_heads": None,
    }
    if isinstance(model["sparse_attention_freq"], str):
        keys["sparse_attention_freq"] = f"[0]*1+[1]*{model['num_layers'] - 1}"
    return keys


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "minimax-m3": {
        "model": {
            "num_layers": 60,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "num_query_groups": 4,
            "kv_channels": 128,
            "ffn_hidden_size": 12288,
            "vocab_size": 200064,
            "max_position_embeddings": 1048576,
            "sparse_attention_freq": "([0]*3+[1]*57)",
            "moe": {
                "num_experts": 128,
                "moe_router_topk": 4,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": 2.0,
                "moe_ffn_hidden_size": 3072,
                "moe_shared_expert_intermediate_size": 3072,
                "moe_layer_freq": "([0]*3+[1]*57)",
            },
        },
        "data": {"seq_length": 4096},
    },
}

MEGATRON = MegatronMap(unsupported="Megatron-Core has no attention over blocks of keys that an indexer chooses")
