"""Megatron's T5 in Hugging Face's format: a Blenderbot computes the same function.

Both have learned positions, layer norms before each block and after each stack, biases everywhere and one for each id
on the logits. Blenderbot has a table of positions for each stack, here the same one twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import CheckpointError, ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule, Same
from mt_models.hugging_face import FURTHER_ACTIVATIONS, IGNORED, NOT_A_CHOICE, OF_GENERATION, OF_HEADS, require_value
from mt_models.t5.config import T5Config

# -- keys and values of cross attention in Hugging Face's formats ------------------------------------


@dataclass(frozen=True)
class HeadwiseKV(Rule):
    """Key and value matrices (or biases) there; rows head by head here, a head's keys before its values."""

    heads: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        # [N D, H] twice -> [N, D, H] twice -> [N, 2 D, H] -> [N 2 D, H]; of biases without H
        return torch.cat([x.unflatten(0, (self.heads, -1)) for x in tensors], dim=1).flatten(0, 1)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        by_head = tensor.unflatten(0, (self.heads, 2, -1))
        return [by_head[:, part].flatten(0, 1).contiguous() for part in (0, 1)]


KIND = "blenderbot"
ONE_TABLE = "shared_position_embeddings"
"""Key of config.json that mt writes beside those of the class: both tables of positions are one. Without it a file is
of the family bart, which has two."""
KINDS = ("weight", "bias")
NORM_EPSILON = 1e-5
"""Epsilon of torch's LayerNorm, which the class does not change."""
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
ACTIVATIONS |= FURTHER_ACTIVATIONS
OF_CHATTING = {"decoder_start_token_id": 0, "forced_eos_token_id": None, "encoder_no_repeat_ngram_size": 0}
"""What the class would do in generation by default. The tokenizer may say with which id the decoder begins."""
BOTH_STACKS = (("layers", "num_layers"), ("attention_heads", "num_attention_heads"), ("ffn_dim", "ffn_hidden_size"))


@dataclass(frozen=True)
class Twice(Rule):
    """One tensor here, two equal ones in Hugging Face's format."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        first, second = tensors
        if not first.is_meta and not first.equal(second):
            raise CheckpointError(
                f"{' and '.join(self.sources)} differ; a T5 has one table of positions for encoder and decoder"
            )
        return first

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor, tensor]


@dataclass(frozen=True)
class Row(Rule):
    """A vector here, a matrix of one row in Hugging Face's format."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].flatten()

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor[None]]


def name_map(config: T5Config) -> NameMap:
    tables = tuple(f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder"))
    return NameMap(
        [
            Same("embedding.word_embeddings.weight", "model.shared.weight"),
            Twice("embedding.position_embeddings.weight", tables),
            *_stack_rules(config, "encoder", config.num_layers),
            *_stack_rules(config, "decoder", config.decoder_layers),
            # [1, vocab] there: a buffer that is added to logits [B, T, vocab]
            Row("output_layer.bias", "final_logits_bias"),
        ],
        config.num_layers,
    )


def _stack_rules(config: T5Config, stack: str, layers: int) -> Iterable[Rule]:
    """Expanded: the two stacks may differ in their number of layers."""
    rules = [rule for kind in KINDS for rule in _layer_rules(config, stack, kind)]
    yield from (rule.for_layer(i) for rule in rules for i in range(layers))
    for kind in KINDS:
        yield Same(f"{stack}.final_layernorm.{kind}", f"model.{stack}.layer_norm.{kind}")


def _layer_rules(config: T5Config, stack: str, kind: str) -> list[Rule]:
    ours, theirs, heads = f"{stack}.layers.{{i}}.", f"model.{stack}.layers.{{i}}.", config.num_attention_heads
    names = {
        "input_layernorm": "self_attn_layer_norm",
        "self_attention.linear_proj": "self_attn.out_proj",
        "pre_mlp_layernorm": "final_layer_norm",
        "mlp.linear_fc1": "fc1",
        "mlp.linear_fc2": "fc2",
    }
    qkv = tuple(f"{theirs}self_attn.{x}_proj.{kind}" for x in "qkv")
    rules: list[Rule] = [GroupedQKV(f"{ours}self_attention.linear_qkv.{kind}", qkv, groups=heads, heads=heads)]
    if stack == "decoder":
        names |= {
            "pre_cross_attn_layernorm": "encoder_attn_layer_norm",
            "cross_attention.linear_q": "encoder_attn.q_proj",
            "cross_attention.linear_proj": "encoder_attn.out_proj",
        }
        kv = tuple(f"{theirs}encoder_attn.{x}_proj.{kind}" for x in "kv")
        rules.append(HeadwiseKV(f"{ours}cross_attention.linear_kv.{kind}", kv, heads=heads))
    return [*rules, *(Same(f"{ours}{name}.{kind}", f"{theirs}{there}.{kind}") for name, there in names.items())]


def copies(config: T5Config) -> Mapping[str, str]:
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    return dict.fromkeys(names, "model.shared.weight")


# -- configuration ---------------------------------------------------------------------------------


def require_blenderbot(config: T5Config) -> None:
    """Raises ConfigError for a T5 with learned positions that differs from Blenderbot."""
    even = config.hidden_size // config.num_attention_heads
    for key, values in (
        ("normalization", ("LayerNorm",)),
        ("norm_epsilon", (NORM_EPSILON,)),
        ("add_bias_linear", (True,)),
        ("scale_attention_scores", (True,)),
        ("add_output_bias", (True,)),
        ("untie_embeddings_and_output_weights", (False,)),
        ("scale_output", (False,)),
        ("kv_channels", (None, even)),
        ("activation", tuple(ACTIVATIONS.values())),
    ):
        require_value(config, key, values, KIND)


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for key, ours in BOTH_STACKS:
        encoder, decoder = external[f"encoder_{key}"], external[f"decoder_{key}"]
        # The number of layers may differ between the stacks; heads and widths are one key for both here.
        if key == "layers":
            values["decoder_num_layers"] = decoder
        elif encoder != decoder:
            raise ConfigError(f"encoder_{key}={encoder} and decoder_{key}={decoder} differ, which is not supported")
        values[ours] = encoder
    return {
        **values,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": NORM_EPSILON,
        "add_bias_linear": True,
        "scale_attention_scores": True,
        "add_output_bias": True,
        "scale_output": False,
    }


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = T5Config.model_validate(model)
    stacks = {"layers": config.num_layers, "attention_heads": config.num_attention_heads, "ffn_dim": config.ffn_size}
    return {
        "architectures": ["BlenderbotForConditionalGeneration"],
        ONE_TABLE: True,
        **OF_CHATTING,
        **{f"encoder_{key}": value for key, value in stacks.items()},
        **{f"decoder_{key}": value for key, value in {**stacks, "layers": config.decoder_layers}.items()},
    }


def import_activation(name: str) -> str:
    return ACTIVATIONS[require_known("activation_function", name, ACTIVATIONS)]


BLENDERBOT = ConfigMap(
    architecture=KIND,
    fields=(
        Field("vocab_size", "vocab_size", default=8008),
        Field("d_model", "hidden_size", default=2560),
        Field("max_position_embeddings", "max_position_embeddings", default=128),
        Field("dropout", "hidden_dropout", import_value=float, default=0.1),
        Field("attention_dropout", "attention_dropout", import_value=float, default=0.0),
        Field("init_std", "init_method_std", import_value=float, default=0.02),
        Field(
            "activation_function",
            "activation",
            import_activation,
            {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}.get,
            default="gelu",
        ),
    ),
    fixed=(
        Fixed("is_encoder_decoder", (True,)),
        Fixed("is_decoder", (False,)),
        Fixed("scale_embedding", (False,)),
        Fixed("tie_word_embeddings", (True,)),
        Fixed("activation_dropout", (0.0,)),
        Fixed("encoder_layerdrop", (0.0,)),
        Fixed("decoder_layerdrop", (0.0,)),
        Fixed("normalize_before", (True,)),
        Fixed("add_final_layer_norm", (True,)),
        *(entry for entry in NOT_A_CHOICE if entry.theirs not in ("is_encoder_decoder", "is_decoder")),
    ),
    ignored={
        **IGNORED,
        **dict.fromkeys(("encoder_no_repeat_ngram_size", "force_bos_token_to_be_generated"), OF_GENERATION),
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "hidden_size"), "repeats another field"),
        "classifier_dropout": OF_HEADS,
    },
    # Before the rest: a published Blenderbot has values that no T5 can have (scale_embedding).
    required={ONE_TABLE: "a table of positions for each stack is that of model.family=bart"},
    import_extra=import_extra,
    import_extra_keys=(ONE_TABLE, *(f"{stack}_{key}" for stack in ("encoder", "decoder") for key, _ in BOTH_STACKS)),
    export_extra=export_extra,
)
