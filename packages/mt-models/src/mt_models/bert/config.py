"""Configuration of the BERT family, with the rules that tie its keys together."""

from __future__ import annotations

from typing import Literal

from mt_core.config.checks import divisors, listed
from mt_core.config.schema import Activation, Config, ModelConfig, NonNegativeInt, PositiveInt, Probability
from mt_core.errors import ConfigError
from mt_models.blocks.checks import check_tensor_parallel
from mt_models.blocks.encoder_checks import refuse_divided_sequences
from mt_models.blocks.encoder_config import EncoderConfig


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
    """Of the feed-forward and of the masked-word head."""
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
    _check_objective(config, model)


def check_encoder(model: BertConfig, config: Config) -> None:
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


def _check_objective(config: Config, model: BertConfig) -> None:
    if getattr(config.data, "num_classes", None) is not None:
        raise ConfigError(
            f"data.dataset_type={config.data.dataset_type} has labels of texts, and model.family=bert predicts words; "
            "use model.family=bert_classification"
        )
    if config.data.dataset_type != "bert":
        return
    if not model.add_lm_head:
        raise ConfigError(
            "data.dataset_type=bert has masked words to predict, and model.add_lm_head=false leaves out the head for "
            "them; set it to true"
        )
    if config.train.loss == "cross_entropy":
        raise ConfigError(
            "train.loss=cross_entropy takes one tensor of logits, and model.family=bert has several heads; use "
            'train.loss="bert"'
        )
    pairs = getattr(config.data, "bert_binary_head", model.bert_binary_head)
    if pairs != model.bert_binary_head:
        raise ConfigError(
            f"data.bert_binary_head={str(pairs).lower()} and model.bert_binary_head="
            f"{str(model.bert_binary_head).lower()} must be equal: the head learns from pairs of texts"
        )
