"""Configuration of DeepSeek-V4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.checks import divisors, listed, must_divide
from mt_core.config.fields import NonNegativeInt, PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import BY_LENGTH, RMSNormDecoderConfig, check_decoder, refuse_divided_sequences
from mt_models.blocks.moe import MoEOptions
from mt_models.blocks.prediction_config import PredictionKeys, check_prediction


class DeepseekV4Config(PredictionKeys, RMSNormDecoderConfig):
    """DeepSeek-V4 Flash and Pro (DeepSeek, 2026)."""

    kv_channels: PositiveInt = 512
    """Size of a head: of the queries, and of the one key and value of a position."""
    qk_pos_emb_head_dim: PositiveInt = 64
    """Channels of a head that positions rotate, its last ones."""
    q_lora_rank: PositiveInt = 1024
    """Channels of the latent of the queries, from which the queries of the indexer come, too."""
    o_groups: PositiveInt = 8
    """Groups of heads, whose outputs are each projected by a matrix of their own."""
    o_lora_rank: PositiveInt = 1024
    """Channels that a group of heads is projected to, before the output projection."""
    sliding_window: PositiveInt = 128
    """A position sees itself and the sliding_window - 1 before it one by one."""
    compress_ratios: list[NonNegativeInt] | None = None
    """For each layer how many positions become one entry that is seen beyond the window; 0: a layer with a window
    alone. Default: two layers with a window alone, then indexed_compress_ratio and 128 in turn."""
    indexed_compress_ratio: PositiveInt = 4
    """Layers with this ratio have entries that overlap, and an indexer that chooses among them."""
    compress_rotary_base: Annotated[float, Field(gt=0)] = 160000.0
    """Base of the rotary wavelengths in layers with entries, to which rope_scaling_type belongs. rotary_base is that of
    the others, whose frequencies are not scaled."""
    dsa_indexer_n_heads: PositiveInt = 64
    """Query heads of an indexer; they share one key."""
    dsa_indexer_head_dim: PositiveInt = 128
    """Channels of a query and key head of an indexer, of which the last qk_pos_emb_head_dim are rotated."""
    dsa_indexer_topk: PositiveInt = 512
    """Entries that a query attends to in layers with an indexer: those with the highest scores."""
    dsa_indexer_loss_coeff: Annotated[float, Field(ge=0)] = 0.0
    """What the loss of an indexer counts beside that of the next token: the KL divergence of its scores from the
    attention of its layer to entries. 0: the indexers are not trained."""
    dsa_indexer_use_sparse_loss: bool = False
    """The loss is about the chosen entries alone; otherwise about all that a query sees."""
    dsa_dense_warmup: bool = False
    """Attention is over all entries, while the indexer learns. train.frozen_parameters keeps all else as it is."""
    hyper_connection_streams: PositiveInt = 4
    """Residual streams."""
    hyper_connection_iterations: PositiveInt = 20
    """Iterations that make the sums of rows and columns of the matrices that mix streams 1."""
    hyper_connection_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the weights of streams, and to the sums of rows and columns."""
    attention_backend: Literal["auto", "eager"] = "auto"
    """What computes attention: torch, in blocks of queries."""

    @property
    def ratios(self) -> list[int]:
        """The ratio of each layer; of layers of multi-token prediction 0."""
        layers = self.num_layers - self._predicted_layers
        ratios = self.compress_ratios
        if ratios is None:
            ratios = ([0, 0] + [self.indexed_compress_ratio, 128] * layers)[:layers]
        return [*ratios, *[0] * self._predicted_layers]

    def compression_of(self, layer: int) -> int:
        return self.ratios[layer]

    def is_indexed(self, layer: int) -> bool:
        return self.compression_of(layer) == self.indexed_compress_ratio

    def window_of(self, layer: int) -> int | None:
        # Layers with entries see what is before the window, too.
        return None if self.compression_of(layer) else self.sliding_window

    @property
    def query_groups(self) -> int:
        return 1

    @property
    def rotary_dim(self) -> int:
        return self.qk_pos_emb_head_dim

    @property
    def rotary_dim_key(self) -> str:
        return "model.qk_pos_emb_head_dim"

    @property
    def rotary_interleaved(self) -> bool:
        return True

    @property
    def routes_by_token(self) -> bool:
        """Layers give the ids of tokens to their experts."""
        return True

    @property
    def activation(self) -> Literal["swiglu", "geglu_tanh", "clamped_swiglu", "limited_swiglu"]:
        return "limited_swiglu"

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return False

    @property
    def ffn_size(self) -> int:
        """The width of an expert: every layer has experts."""
        width: int | None = (self.moe or {}).get("moe_ffn_hidden_size")
        return width or super().ffn_size


def check_deepseek_v4(config: Config) -> None:
    """Raise ConfigError for what cannot be built or combined."""
    check_decoder(config)
    refuse_divided_sequences(config)
    model = config.model
    assert isinstance(model, DeepseekV4Config)
    _check_unused(model)
    _check_sizes(config, model)
    _check_ratios(config, model)
    _check_experts(model)
    _check_training(config, model)


def _check_unused(model: DeepseekV4Config) -> None:
    if model.num_query_groups not in (None, 1):
        raise ConfigError(f"model.num_query_groups={model.num_query_groups}: this family has one key head; it can be 1")
    if model.ffn_hidden_size is not None:
        raise ConfigError(
            f"model.ffn_hidden_size={model.ffn_hidden_size} would be ignored: every layer has experts, whose width is "
            "model.moe.moe_ffn_hidden_size"
        )
    if not model.untie_embeddings_and_output_weights:
        raise ConfigError(
            "model.untie_embeddings_and_output_weights=false is not supported by model.family=deepseek_v4; it can be "
            "true"
        )
    if model.rope_scaling_type in BY_LENGTH:
        raise ConfigError(
            f"model.rope_scaling_type={model.rope_scaling_type} is not supported by model.family=deepseek_v4, whose "
            "entries are rotated once; it can be none, linear, ntk, llama3 or yarn"
        )


def _check_sizes(config: Config, model: DeepseekV4Config) -> None:
    for key in ("kv_channels", "dsa_indexer_head_dim"):
        if getattr(model, key) < model.qk_pos_emb_head_dim:
            raise ConfigError(
                f"model.{key}={getattr(model, key)} is below the channels that positions rotate "
                f"(model.qk_pos_emb_head_dim)={model.qk_pos_emb_head_dim}"
            )
    must_divide("model.o_groups", model.o_groups, "model.num_attention_heads", model.num_attention_heads)
    size = config.parallel.tensor_model_parallel_size
    if model.o_groups % size:
        raise ConfigError(
            f"parallel.tensor_model_parallel_size={size} does not divide model.o_groups={model.o_groups}, whole ones "
            f"of which a rank has; it can be {listed(divisors(model.o_groups))}"
        )


def _check_ratios(config: Config, model: DeepseekV4Config) -> None:
    ratios = model.compress_ratios
    if ratios is not None and len(ratios) != model.num_layers:
        raise ConfigError(
            f"model.compress_ratios has {len(ratios)} entries; it needs one for each of the model.num_layers="
            f"{model.num_layers}"
        )
    ratio = model.indexed_compress_ratio
    if model.dsa_indexer_loss_coeff and config.data.seq_length < ratio:
        raise ConfigError(
            f"data.seq_length={config.data.seq_length} is below model.indexed_compress_ratio={ratio}: indexers would "
            "have no entry to learn from (model.dsa_indexer_loss_coeff)"
        )


def _check_experts(model: DeepseekV4Config) -> None:
    moe = MoEOptions(model)
    if not all(moe.layers):
        raise ConfigError(
            f"model.moe.moe_layer_freq={moe['moe_layer_freq']} leaves layers without experts, which "
            "model.family=deepseek_v4 has not; it can be 1"
        )
    if moe["moe_router_hash_layers"] > model.num_layers:
        raise ConfigError(
            f"model.moe.moe_router_hash_layers={moe['moe_router_hash_layers']} is above model.num_layers="
            f"{model.num_layers}"
        )


def _check_training(config: Config, model: DeepseekV4Config) -> None:
    for key in ("dsa_indexer_use_sparse_loss", "dsa_dense_warmup"):
        if getattr(model, key) and not model.dsa_indexer_loss_coeff:
            raise ConfigError(f"model.{key}=true would be ignored: set model.dsa_indexer_loss_coeff too")
    check_prediction(config, model)
    if config.numerics.batch_invariant:
        raise ConfigError(
            f"numerics.batch_invariant cannot be combined with model.family={model.family}: its kernels of attention "
            "have no compressed entries; set it to false"
        )


# -- a small model for checks ------------------------------------------------------------------------


def shrink_deepseek_v4(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """All three kinds of layers stay where there are as many, and half of the entries are left out."""
    return {
        "kv_channels": 16,
        "qk_pos_emb_head_dim": 4,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 8,
        "sliding_window": 8,
        "compress_ratios": None,
        "dsa_indexer_n_heads": 3,
        "dsa_indexer_head_dim": 8,
        "dsa_indexer_topk": max(seq_length // 8, 1),
        "hyper_connection_streams": 3,
        "hyper_connection_iterations": 4,
    }


MEGATRON = MegatronMap(unsupported="Megatron-Core's releases have no compressed attention over one shared key head")
