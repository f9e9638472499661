"""RWKV-7 in Hugging Face's format, under the names of flash-linear-attention's RWKV7ForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily
from mt_models.rwkv7.config import Rwkv7Config
from mt_models.rwkv7.time_mixing import INPUTS

# -- configuration -------------------------------------------------------------------------------------

OF_KERNELS = "which kernel computed it; the result is the same"


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    hidden, layers = external.get("hidden_size", 2048), external.get("num_hidden_layers", 24)
    values = external.get("value_dim")
    if values not in (None, hidden, [hidden] * layers):
        raise ConfigError(f"value_dim={values} is not supported; it can be hidden_size={hidden} in every layer")
    return {"head_size": head_size(external, hidden), "ffn_hidden_size": inner_size(external, hidden)}


def head_size(external: Mapping[str, Any], hidden: int) -> int:
    size, heads = external.get("head_dim", 64), external.get("num_heads")
    if size is None:
        if not heads:
            raise ConfigError("neither head_dim nor num_heads is given; one of them has to be")
        return hidden // heads
    if heads not in (None, hidden // size):
        raise ConfigError(f"num_heads={heads} is not hidden_size={hidden} / head_dim={size}; remove what is wrong")
    return int(size)


def inner_size(external: Mapping[str, Any], hidden: int) -> int:
    width, ratio = external.get("intermediate_size"), external.get("hidden_ratio")
    # The class rounds up to whole 32s what it computes from the ratio.
    return int(width) if width is not None else -(-int(hidden * (4 if ratio is None else ratio)) // 32) * 32


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Rwkv7Config.model_validate(model)
    return {"num_heads": config.num_heads, "head_dim": config.head_size, "intermediate_size": config.ffn_size}


CONFIG = ConfigMap(
    architecture="rwkv7",
    fields=(
        Field("vocab_size", "vocab_size", default=32000),
        Field("num_hidden_layers", "num_layers", default=24),
        Field("hidden_size", "hidden_size", default=2048),
        Field("decay_low_rank_dim", "decay_lora_rank", default=64),
        Field("a_low_rank_dim", "rate_lora_rank", default=64),
        Field("v_low_rank_dim", "value_lora_rank", default=16),
        Field("gate_low_rank_dim", "gate_lora_rank", default=128),
        Field("max_position_embeddings", "max_position_embeddings", default=2048),
        Field("norm_eps", "norm_epsilon", default=1e-5),
        Field("initializer_range", "init_method_std", default=0.02),
        Field(
            "tie_word_embeddings",
            "untie_embeddings_and_output_weights",
            lambda tied: not tied,
            lambda untied: not untied,
            default=False,
        ),
    ),
    fixed=(
        Fixed("hidden_act", ("sqrelu",)),
        Fixed("norm_first", (True,)),
        Fixed("norm_bias", (True,)),
        # Layers of attention among the others.
        Fixed("attn", (None,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        "attn_mode": OF_KERNELS,
        **dict.fromkeys(("fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy"), OF_KERNELS),
        "use_l2warp": "a term of the loss that the class trains with",
    },
    import_extra=import_extra,
    import_extra_keys=("head_dim", "num_heads", "value_dim", "intermediate_size", "hidden_ratio"),
    export_extra=export_extra,
)


# -- names ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows(Rule):
    """The rows of a matrix [n, C], each as [1, 1, C] there."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([tensor.flatten() for tensor in tensors])

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [row.contiguous()[None, None] for row in tensor]


LAYER = "model.layers.{i}."
OURS = "decoder.layers.{i}."
MIXING = (
    ("key_scale", "k_k"),
    ("key_rate", "k_a"),
    ("bonus", "r_k"),
    ("linear_r.weight", "r_proj.weight"),
    ("linear_k.weight", "k_proj.weight"),
    ("linear_v.weight", "v_proj.weight"),
    ("linear_proj.weight", "o_proj.weight"),
    ("decay.down.weight", "w_lora.lora.0.weight"),
    ("decay.up.weight", "w_lora.lora.2.weight"),
    ("decay.up.bias", "w_lora.lora.2.bias"),
    ("rate.down.weight", "a_lora.lora.0.weight"),
    ("rate.up.weight", "a_lora.lora.2.weight"),
    ("rate.up.bias", "a_lora.lora.2.bias"),
    ("gate.down.weight", "g_lora.lora.0.weight"),
    ("gate.up.weight", "g_lora.lora.2.weight"),
    ("out_norm.weight", "g_norm.weight"),
    ("out_norm.bias", "g_norm.bias"),
)
VALUE_MIX = (
    ("down.weight", "lora.0.weight"),
    ("up.weight", "lora.2.weight"),
    ("up.bias", "lora.2.bias"),
)
FEED_FORWARD = (("mix", "x_k"), ("linear_fc1.weight", "key.weight"), ("linear_fc2.weight", "value.weight"))
NORMS = (
    ("embedding.layernorm", "model.layers.0.pre_norm"),
    (f"{OURS}input_layernorm", f"{LAYER}attn_norm"),
    (f"{OURS}pre_mlp_layernorm", f"{LAYER}ffn_norm"),
    ("decoder.final_layernorm", "model.norm"),
)


def name_map(config: Rwkv7Config) -> NameMap:
    mix = f"{OURS}time_mixing.mix"
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "model.embeddings.weight"),
        # Files of the class's first version have the six in one tensor.
        Rows(mix, tuple(f"{LAYER}attn.x_{name}" for name in INPUTS), others=(Same(mix, f"{LAYER}attn.x_x"),)),
        *(Same(f"{OURS}time_mixing.{ours}", f"{LAYER}attn.{theirs}") for ours, theirs in MIXING),
        *(Same(f"{OURS}mlp.{ours}", f"{LAYER}ffn.{theirs}") for ours, theirs in FEED_FORWARD),
        *(Same(f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in NORMS for kind in ("weight", "bias")),
    ]
    # The first layer's values are its own.
    rules += [
        Same(f"decoder.layers.{i}.time_mixing.value_mix.{ours}", f"model.layers.{i}.attn.v_lora.{theirs}")
        for i in range(1, config.num_layers)
        for ours, theirs in VALUE_MIX
    ]
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", "lm_head.weight"))
    return NameMap(rules, config.num_layers)


def copies(config: Rwkv7Config) -> Mapping[str, str]:
    return {} if config.untie_embeddings_and_output_weights else {"lm_head.weight": "model.embeddings.weight"}


HUGGING_FACE = HuggingFaceFamily(
    "rwkv7", {"rwkv7": CONFIG}, name_map, copies=copies, architectures={"rwkv7": "RWKV7ForCausalLM"}
)
