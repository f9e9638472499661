"""Configuration of Qwen4-Exp's decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.fields import NonNegativeInt, PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import BY_LENGTH, RMSNormDecoderConfig, check_moe_decoder, refuse_divided_sequences
from mt_models.blocks.delta_net_config import DeltaNetKeys, check_delta_nets, linear_layers
from mt_models.blocks.moe import MoEOptions
from mt_models.blocks.ngram_ids import NGramTable, ngram_table
from mt_models.blocks.prediction_config import PredictionKeys, check_prediction


class Qwen4ExpConfig(PredictionKeys, DeltaNetKeys, RMSNormDecoderConfig):
    """Qwen4-Exp (Alibaba, 2026), text only."""

    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of each attention head that positions rotate, and as many channels of the indexer's heads."""
    linear_output_gate: Literal["silu", "sigmoid"] = "silu"
    """Activation of the output gate of gated delta nets."""
    residual_streams: Annotated[int, Field(ge=2)] = 4
    """Residual streams, which start as copies of the token's embedding."""
    residual_mix_rank: PositiveInt = 320
    """Rank of the gates by which a block's input is made of the streams."""
    qsa_indexer_n_heads: PositiveInt = 4
    """Heads of the indexer in layers of attention."""
    qsa_indexer_head_dim: PositiveInt = 128
    """Channels of an indexer's head."""
    qsa_budget: PositiveInt = 2048
    """Keys that a query attends to, those of the run that it is in not counted; a multiple of qsa_compress_ratio."""
    qsa_compress_ratio: PositiveInt = 4
    """Positions of a run, which the indexer chooses or leaves out as one."""
    ngram_layers: list[PositiveInt] | None = None
    """Layers, counted from 1, that add embeddings of n-grams to the streams. Default: none."""
    ngram_end_of_text_id: NonNegativeInt | None = None
    """The token id that ends a text: n-grams do not reach beyond it. Required with ngram_layers."""
    ngram_embed_dim: PositiveInt | None = None
    """Channels of the embeddings of all n-grams of a position. Default: hidden_size."""
    ngram_conv_kernel: PositiveInt = 4
    """Taps of the convolution behind them."""
    ngram_max_length: Annotated[int, Field(ge=2)] = 3
    """Tokens of the longest n-gram; there are those of each length from 2."""
    ngram_heads: PositiveInt = 8
    """Hash tables for each length of n-grams."""
    ngram_vocab_size_base: PositiveInt = 20000000
    """Rows of a hash table: the tables of all heads and layers have the primes from here on."""
    ngram_rows_divisible_by: PositiveInt = 128
    """The rows of a layer's tables together are filled up to a multiple of this."""
    ngram_seed: NonNegativeInt = 1234
    """Seed of the multipliers of the hashes."""
    ngram_file_parts: PositiveInt = 512
    """Tensors in which Hugging Face files hold a layer's tables. It changes nothing that is computed."""
    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""
    mtp_num_layers: Literal[0, 1] = 0
    """1: a further layer of attention predicts the token after the next one, in training."""

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_percent)

    @property
    def rotary_dim_key(self) -> str:
        return f"model.rotary_percent={self.rotary_percent} of {self.head_dim} channels"

    @property
    def linear_layers(self) -> list[bool]:
        """For each layer whether it is a gated delta net."""
        return linear_layers(self)

    @property
    def ffn_size(self) -> int:
        """No layer is dense: the width of the experts, so that nothing else divides by it."""
        return self.ffn_hidden_size or self.moe.get("moe_ffn_hidden_size") or super().ffn_size

    @property
    def layers_with_ngrams(self) -> list[int]:
        """In order, counted from 0."""
        return sorted({number - 1 for number in self.ngram_layers or ()})

    @property
    def ngram_embedding_size(self) -> int:
        return self.ngram_embed_dim or self.hidden_size

    def ngram_table_of(self, layer: int) -> NGramTable:
        """The hash tables of a layer, counted from 0, that has n-grams."""
        assert self.vocab_size is not None  # the trainer fills it in from the tokenizer
        return ngram_table(
            index=self.layers_with_ngrams.index(layer),
            vocab_size=self.vocab_size,
            longest=self.ngram_max_length,
            heads=self.ngram_heads,
            least_rows=self.ngram_vocab_size_base,
            seed=self.ngram_seed,
        )

    # Fixed values for keys of the shared blocks.

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return True

    @property
    def linear_allow_neg_eigval(self) -> bool:
        return False

    @property
    def linear_norm_epsilon(self) -> float:
        return self.norm_epsilon


# -- rules -------------------------------------------------------------------------------------------


def check_qwen4_exp(config: Config) -> None:
    """Raise ConfigError for what cannot be built or combined."""
    check_moe_decoder(config)
    check_delta_nets(config)
    refuse_divided_sequences(config)
    model = config.model
    assert isinstance(model, Qwen4ExpConfig)
    _check_experts(model)
    _check_indexer(config, model)
    _check_ngrams(model)
    check_prediction(config, model)


def _check_experts(model: Qwen4ExpConfig) -> None:
    moe = MoEOptions(model)
    if not all(moe.layers):
        raise ConfigError(
            f"model.moe.moe_layer_freq={moe['moe_layer_freq']} leaves layers without experts, which "
            "model.family=qwen4_exp has not; it can be 1"
        )


def _check_indexer(config: Config, model: Qwen4ExpConfig) -> None:
    if model.qsa_budget % model.qsa_compress_ratio:
        raise ConfigError(
            f"model.qsa_budget={model.qsa_budget} is not a multiple of model.qsa_compress_ratio="
            f"{model.qsa_compress_ratio}"
        )
    if model.rotary_dim > model.qsa_indexer_head_dim:
        raise ConfigError(
            f"model.qsa_indexer_head_dim={model.qsa_indexer_head_dim} is below the channels that positions rotate, "
            f"{model.rotary_dim_key}={model.rotary_dim}"
        )
    if model.rope_scaling_type in BY_LENGTH:
        raise ConfigError(
            f"model.rope_scaling_type={model.rope_scaling_type} is not supported by model.family=qwen4_exp, whose runs "
            "of keys are rotated once; it can be none, linear, ntk, llama3 or yarn"
        )
    if config.numerics.batch_invariant:
        raise ConfigError(
            "numerics.batch_invariant cannot be combined with model.family=qwen4_exp: its kernels of attention have no "
            "keys that are left out; set it to false"
        )


def _check_ngrams(model: Qwen4ExpConfig) -> None:
    if not model.layers_with_ngrams:
        return
    layers, linear = model.num_layers, linear_layers(model)
    if wrong := [layer + 1 for layer in model.layers_with_ngrams if layer >= layers or not linear[layer]]:
        raise ConfigError(
            f"model.ngram_layers has {wrong[0]}; it can have the numbers of layers from 1 to {layers} that are gated "
            "delta nets"
        )
    tables = (model.ngram_max_length - 1) * model.ngram_heads
    if model.ngram_embedding_size % tables:
        raise ConfigError(
            f"model.ngram_embed_dim={model.ngram_embedding_size} is not divisible by the {tables} hash tables of a "
            "layer, model.ngram_heads for each length up to model.ngram_max_length"
        )
    end = model.ngram_end_of_text_id
    if end is None or (model.vocab_size is not None and end >= model.vocab_size):
        raise ConfigError(
            f"model.ngram_end_of_text_id={end} has to be a token id below model.vocab_size={model.vocab_size}, since "
            "model.ngram_layers is set"
        )


def shrink_qwen4_exp(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`. Half of the runs are left out."""
    return {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_attention_freq": 2,
        "linear_chunk_size": 8,
        "residual_streams": 3,
        "residual_mix_rank": 8,
        "qsa_indexer_n_heads": 3,
        "qsa_indexer_head_dim": 8,
        "qsa_compress_ratio": 2,
        "qsa_budget": max(seq_length // 4, 1) * 2,
        "ngram_layers": [1] if model["ngram_layers"] else None,
        "ngram_end_of_text_id": 0 if model["ngram_layers"] else None,
        "ngram_embed_dim": 16,
        "ngram_heads": 4,
        "ngram_max_length": 3,
        "ngram_vocab_size_base": 64,
        "ngram_file_parts": 1,
    }


MEGATRON = MegatronMap(unsupported="Megatron-Core's releases have neither streams with gates nor embeddings of n-grams")
