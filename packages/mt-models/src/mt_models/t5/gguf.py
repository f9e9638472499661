"""T5, T5 1.1, mT5 and UMT5 in GGUF. llama.cpp does not scale the decoder's output, so that its last norm there contains
the factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mt_core.name_map import Concatenate, GroupedQKV, NameMap, Rule, Same
from mt_core.nn.activations import is_gated
from mt_models.blocks.gguf_decoder import norms
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require
from mt_models.t5.blenderbot import HeadwiseKV
from mt_models.t5.config import T5Config
from mt_models.t5.hugging_face import PADDING, UMT5


@dataclass(frozen=True)
class Multiplied(Rule):
    """The tensor times a factor there."""

    factor: float = 1.0

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return (tensors[0].float() / self.factor).to(tensors[0].dtype)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [(tensor.float() * self.factor).to(tensor.dtype)]


# -- tensors -----------------------------------------------------------------------------------------

PREFIXES = {"encoder": "enc.", "decoder": "dec."}
NORMS = {"input_layernorm": "attn_norm", "pre_mlp_layernorm": "ffn_norm"}
MATRICES = {"self_attention.linear_proj": "attn_o", "mlp.linear_fc2": "ffn_down"}
CROSS = {
    "pre_cross_attn_layernorm": "cross_attn_norm",
    "cross_attention.linear_q": "cross_attn_q",
    "cross_attention.linear_proj": "cross_attn_o",
}
UNREAD = ["dec.blk.0.cross_attn_rel_b.weight"]
"""Google's first checkpoints hold it; no program reads it."""


def name_map(config: T5Config) -> NameMap:
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "token_embd.weight"),
        *_stack(config, "encoder", config.num_layers),
        *_stack(config, "decoder", config.decoder_layers),
        Same("encoder.final_layernorm.weight", "enc.output_norm.weight"),
        _last_norm(config),
    ]
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", "output.weight"))
    return NameMap(rules, 0, ignored=UNREAD)


def _last_norm(config: T5Config) -> Rule:
    names = "decoder.final_layernorm.weight", "dec.output_norm.weight"
    return Same(*names) if config.output_scale == 1.0 else Multiplied(*names, factor=config.output_scale)


def _stack(config: T5Config, stack: str, layers: int) -> list[Rule]:
    ours, theirs = f"{stack}.layers.{{i}}.", f"{PREFIXES[stack]}blk.{{i}}."
    heads = config.num_attention_heads
    # The gate, to which the activation is applied, comes first.
    halves = ("ffn_gate", "ffn_up") if is_gated(config.activation) else ("ffn_up",)
    rules: list[Rule] = [
        *norms({**NORMS, **MATRICES}, ours=ours, theirs=theirs),
        GroupedQKV(
            f"{ours}self_attention.linear_qkv.weight",
            tuple(f"{theirs}attn_{part}.weight" for part in "qkv"),
            groups=heads,
            heads=heads,
        ),
        Concatenate(f"{ours}mlp.linear_fc1.weight", tuple(f"{theirs}{half}.weight" for half in halves)),
    ]
    if stack == "decoder":
        pair = tuple(f"{theirs}cross_attn_{part}.weight" for part in "kv")
        rules += norms(CROSS, ours=ours, theirs=theirs)
        rules.append(HeadwiseKV(f"{ours}cross_attention.linear_kv.weight", pair, heads=heads))
    return [*(rule.for_layer(i) for i in range(layers) for rule in rules), *_biases(config, stack, layers)]


def _biases(config: T5Config, stack: str, layers: int) -> list[Rule]:
    """In T5 the first layer has the table of all."""
    table = "relative_attention_bias.weight"
    if not config.relative_attention_bias_per_layer:
        return [Same(f"{stack}_relative_pos_emb.{table}", f"{PREFIXES[stack]}blk.0.attn_rel_b.weight")]
    return [
        Same(
            f"{stack}.layers.{i}.self_attention.relative_pos_emb.{table}",
            f"{PREFIXES[stack]}blk.{i}.attn_rel_b.weight",
        )
        for i in range(layers)
    ]


# -- configuration -----------------------------------------------------------------------------------

NAME, DISTANCE, PROJECTION, TIED = "t5", "relative_attention_max_distance", "feed_forward_proj", "tie_word_embeddings"
MAX_DISTANCE, POSITIONS = 128, 512
"""llama.cpp has the first fixed, and reads the second, for which T5 has no limit."""


def has_table_by_layer(metadata: Metadata) -> bool:
    return any(metadata.has_tensor(f"{prefix}blk.1.attn_rel_b.weight") for prefix in PREFIXES.values())


def read(metadata: Metadata) -> dict[str, Any]:
    return {
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "num_decoder_layers": metadata.get("decoder_block_count", int) or metadata.need("block_count", int),
        DISTANCE: MAX_DISTANCE,
        TIED: not metadata.has_tensor("output.weight"),
        PROJECTION: "gated-gelu" if metadata.has_tensor("enc.blk.0.ffn_gate.weight") else "relu",
    }


def read_t5(metadata: Metadata) -> dict[str, Any]:
    return {**read(metadata), "scale_decoder_outputs": False}


def write(external: External) -> dict[str, Any]:
    require(external, PROJECTION, ("relu", "gated-gelu"), NAME)
    require(external, "dense_act_fn", (None,), NAME)
    require(external, DISTANCE, (MAX_DISTANCE,), NAME)
    return {
        "context_length": POSITIONS,
        "vocab_size": external["vocab_size"],
        "decoder_block_count": external["num_decoder_layers"],
        "attention.value_length": external["d_kv"],
        "attention.layer_norm_rms_epsilon": float(external["layer_norm_epsilon"]),
        "decoder_start_token_id": PADDING,
    }


KEYS = (
    Key("block_count", "num_layers"),
    Key("embedding_length", "d_model"),
    Key("feed_forward_length", "d_ff"),
    Key("attention.head_count", "num_heads"),
    Key("attention.key_length", "d_kv"),
    Key("attention.relative_buckets_count", "relative_attention_num_buckets"),
    Key("attention.layer_norm_epsilon", "layer_norm_epsilon", float),
)
T5 = GGUFArchitecture(
    name=NAME,
    model_type="t5",
    keys=KEYS,
    read=read_t5,
    write=write,
    fits=lambda metadata: not has_table_by_layer(metadata),
)
UNSHARED = GGUFArchitecture(name=NAME, model_type=UMT5, keys=KEYS, read=read, write=write, fits=has_table_by_layer)

GGUF = GGUFFamily(family="t5", architectures=(T5, UNSHARED), name_map=name_map)
