"""Configuration of the BERT family: keys, the rules that tie them together, published sizes and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mt_core.config.checks import divisors, listed
from mt_core.config.fields import NonNegativeInt, PositiveInt, Probability
from mt_core.config.schema import Activation, Config, ModelConfig
from mt_core.errors import ConfigError
from mt_models.blocks.config import EncoderConfig, check_tensor_parallel, refuse_divided_sequences
from mt_models.flops import (
    Flops,
    LayerFlopConfigLike,
    core_flops,
    dense_feed_forward_flops,
    output_flops,
    projection_flops,
)


class BertConfig(ModelConfig, EncoderConfig):
    """A bidirectional encoder."""

    max_position_embeddings: PositiveInt
    """Rows of the table of learned positions, the longest sequence that the model can take."""
    num_tokentypes: NonNegativeInt = 2
    """Rows of the table of token types (0: the first text, 1: the second); 0 leaves the table out."""
    layernorm_placement: Literal["pre", "post"] = "pre"
    """pre: norms before attention and feed-forward and one behind the last layer, as in Megatron's BERT. post:
    norms behind the embedding and behind each sum, as in the original BERT."""
    activation: Activation = "gelu"
    """Activation of the feed-forward and of the masked-word head."""
    add_lm_head: bool = True
    """The head that predicts masked words."""
    bert_binary_head: bool = True
    """The head that predicts whether two texts are in their order."""
    add_pooler: bool | None = None
    """The layer tanh(W x + b) over the first position. Default: as bert_binary_head, which needs it."""
    hidden_dropout: Probability = 0.1
    """Dropout after the embedding, the attention and the feed-forward."""
    attention_dropout: Probability = 0.1
    """Dropout on the attention weights."""

    @property
    def has_pooler(self) -> bool:
        return self.bert_binary_head if self.add_pooler is None else self.add_pooler


def check_bert(config: Config) -> None:
    """Raise ConfigError for a BERT that cannot be built, or whose samples or loss are made for another."""
    model = config.model
    assert isinstance(model, BertConfig)
    check_encoder(model, config)
    if model.bert_binary_head and not model.has_pooler:
        raise ConfigError(
            "model.bert_binary_head=true reads the pooler, which model.add_pooler=false leaves out; set one of them "
            "to the other's value"
        )
    check_masked_words(config, add_lm_head=model.add_lm_head)
    pairs = getattr(config.data, "bert_binary_head", model.bert_binary_head)
    if config.data.dataset_type == "bert" and pairs != model.bert_binary_head:
        raise ConfigError(
            f"data.bert_binary_head={str(pairs).lower()} and model.bert_binary_head="
            f"{str(model.bert_binary_head).lower()} must be equal: the head learns from pairs of texts"
        )


class EncoderConfigLike(LayerFlopConfigLike, Protocol):
    """What check_encoder reads from the configuration of an encoder."""

    @property
    def max_position_embeddings(self) -> int: ...


def check_encoder(model: EncoderConfigLike, config: Config) -> None:
    """Raise ConfigError when heads do not divide the width, ranks not the heads, or sequences are too long."""
    seq_length = config.data.seq_length
    if model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not divisible by model.num_attention_heads="
            f"{model.num_attention_heads}; the number of heads can be {listed(divisors(model.hidden_size))}"
        )
    check_tensor_parallel(config, query_groups=model.num_attention_heads, ffn_size=model.ffn_size)
    refuse_divided_sequences(config)
    if seq_length > model.max_position_embeddings:
        raise ConfigError(
            f"data.seq_length={seq_length} is longer than model.max_position_embeddings="
            f"{model.max_position_embeddings}; use at most {model.max_position_embeddings}, or more positions"
        )


def check_masked_words(config: Config, *, add_lm_head: bool) -> None:
    """Raise ConfigError for samples or a loss that are not made for predicting masked words."""
    family = config.model.family
    if getattr(config.data, "num_classes", None) is not None:
        raise ConfigError(
            f"data.dataset_type={config.data.dataset_type} has labels of texts, and model.family={family} predicts "
            "words; use model.family=bert_classification"
        )
    if config.data.dataset_type != "bert":
        return
    if not add_lm_head:
        raise ConfigError(
            "data.dataset_type=bert has masked words to predict, and model.add_lm_head=false leaves out the head for "
            "them; set it to true"
        )
    if config.train.loss == "cross_entropy":
        raise ConfigError(
            f"train.loss=cross_entropy takes one tensor of logits, and model.family={family} has several outputs; use "
            'train.loss="bert"'
        )


# -- published sizes: the original BERTs (post-norm), Megatron's 345M (pre-norm), a small one for a CPU


def _original(layers: int, hidden: int, heads: int, vocab: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "max_position_embeddings": 512,
            "layernorm_placement": "post",
            "norm_epsilon": 1e-12,
            "use_scaled_init_method": False,
            "vocab_size": vocab,
        },
        "data": {"seq_length": 512},
    }


def _megatron(vocab: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": 24,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "max_position_embeddings": 512,
            "norm_epsilon": 1e-12,
            "vocab_size": vocab,
        },
        "data": {"seq_length": 512},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "bert-base-uncased": _original(12, 768, 12, 30522),
    "bert-base-cased": _original(12, 768, 12, 28996),
    "bert-large-uncased": _original(24, 1024, 16, 30522),
    "bert-large-cased": _original(24, 1024, 16, 28996),
    "megatron-bert-345m-uncased": _megatron(30592),
    "megatron-bert-345m-cased": _megatron(29056),
}


# -- FLOPs of BERT and the biencoder (counted as in mt_models.flops) ---------------------------------
#
# Every position attends to all others, so that there is one convention. Operations per sequence are averaged over its
# tokens.


@dataclass(frozen=True)
class EncoderFlops(Flops):
    """Forward FLOPs for each token, over all layers."""

    attention_projections: float
    """Queries, keys, values and the output of attention."""
    attention_core: float
    """Scores and their product with the values."""
    feed_forward: float


@dataclass(frozen=True)
class BertFlops(EncoderFlops):
    """Forward FLOPs for each token, over all layers, and of the heads."""

    lm_head: float
    """The layer before the MLM logits."""
    output: float
    """MLM logits."""
    pooler: float
    binary_head: float


def flops_per_token(config: BertConfig, seq_length: int) -> BertFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    hidden, layers = config.hidden_size, encoder_flops(config, seq_length)
    return BertFlops(
        attention_projections=layers.attention_projections,
        attention_core=layers.attention_core,
        feed_forward=layers.feed_forward,
        lm_head=2 * hidden**2 if config.add_lm_head else 0.0,
        output=output_flops(hidden, config.vocab_size) if config.add_lm_head else 0.0,
        # One position of the sequence, averaged over its tokens
        pooler=2 * hidden**2 / seq_length if config.has_pooler else 0.0,
        binary_head=4 * hidden / seq_length if config.bert_binary_head else 0.0,
    )


def encoder_flops(config: BertConfig, seq_length: int) -> EncoderFlops:
    """FLOPs of the layers."""
    return EncoderFlops(
        attention_projections=config.num_layers * projection_flops(config),
        attention_core=config.num_layers * core_flops(config, seq_length),
        feed_forward=config.num_layers * dense_feed_forward_flops(config),
    )


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
