"""Jamba in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import (
    DENSE,
    OURS,
    PRE_NORMS,
    THEIRS,
    attention,
    decoder_map,
    experts,
    feed_forward,
    norms,
    tied_output,
)
from mt_models.blocks.moe import MoEOptions
from mt_models.gguf import (
    External,
    GGUFArchitecture,
    GGUFFamily,
    Key,
    Metadata,
    NegativeExponential,
    Reshaped,
    require,
)
from mt_models.jamba.config import JambaConfig

GROUPS = "attention.head_count_kv"
"""0 for layers with a mixer."""
MIXER = {
    "in_proj.weight": "ssm_in.weight",
    "x_proj.weight": "ssm_x.weight",
    "dt_layernorm.weight": "ssm_dt_norm.weight",
    "b_layernorm.weight": "ssm_b_norm.weight",
    "c_layernorm.weight": "ssm_c_norm.weight",
    "dt_proj.weight": "ssm_dt.weight",
    "dt_proj.bias": "ssm_dt.bias",
    "conv1d.bias": "ssm_conv1d.bias",
    "D": "ssm_d",
    "out_proj.weight": "ssm_out.weight",
}


def name_map(config: JambaConfig) -> NameMap:
    sparse = [False] * config.num_layers if config.moe is None else MoEOptions(config).layers
    rules: list[Rule] = []
    for number, (attends, has_experts) in enumerate(zip(config.attention_layers, sparse, strict=True)):
        block = attention(config) if attends else mixer(config)
        second = experts(MoEOptions(config)) if has_experts else feed_forward()
        rules += [rule.for_layer(number) for rule in (*norms(PRE_NORMS), *block, *second)]
    return decoder_map(config, rules)


def mixer(config: JambaConfig) -> list[Rule]:
    kernel, state = config.mamba_conv_kernel, config.mamba_state_dim
    return [
        *(Same(f"{OURS}mixer.{ours}", f"{THEIRS}{theirs}") for ours, theirs in MIXER.items()),
        # [channels, 1, kernel] and [channels, state] here.
        Reshaped(f"{OURS}mixer.conv1d.weight", f"{THEIRS}ssm_conv1d.weight", here=(1, kernel), there=(kernel,)),
        NegativeExponential(f"{OURS}mixer.A_log", f"{THEIRS}ssm_a", here=(state,), there=(state,)),
    ]


# -- configuration -----------------------------------------------------------------------------------


def read(metadata: Metadata) -> dict[str, Any]:
    groups, layers = metadata.numbers(GROUPS), metadata.need("block_count", int)
    period, offset = period_of([number > 0 for number in groups])
    sparse = [metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(layers)]
    expert_period, expert_offset = period_of(sparse)
    return {
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "num_key_value_heads": max(groups),
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "mamba_expand": metadata.need("ssm.inner_size", int) // metadata.need("embedding_length", int),
        "num_experts": metadata.need("expert_count", int) if any(sparse) else 1,
        "num_experts_per_tok": metadata.get("expert_used_count", int) or 1,
        "expert_layer_period": expert_period,
        "expert_layer_offset": expert_offset,
    }


def period_of(layers: list[bool]) -> tuple[int, int]:
    """Distance of the layers of a kind, and the first of them; beyond the last layer where there is none."""
    numbers = [number for number, there in enumerate(layers) if there] or [len(layers)]
    return (numbers[1] - numbers[0] if len(numbers) > 1 else len(layers) + 1), numbers[0]


def write(external: External) -> dict[str, Any]:
    require(external, "mamba_conv_bias", (True,), "jamba")
    require(external, "mamba_proj_bias", (False,), "jamba")
    period, offset = external["attn_layer_period"], external["attn_layer_offset"]
    attends = [layer % period == offset for layer in range(external["num_hidden_layers"])]
    values = {
        GROUPS: [external["num_key_value_heads"] if there else 0 for there in attends],
        "vocab_size": external["vocab_size"],
        "ssm.inner_size": external["mamba_expand"] * external["hidden_size"],
    }
    if external["num_experts"] > 1:
        values |= {
            "expert_count": external["num_experts"],
            "expert_used_count": external["num_experts_per_tok"],
        }
    return values


JAMBA = GGUFArchitecture(
    name="jamba",
    model_type="jamba",
    keys=(
        *DENSE,
        Key("ssm.conv_kernel", "mamba_d_conv"),
        Key("ssm.state_size", "mamba_d_state"),
        Key("ssm.time_step_rank", "mamba_dt_rank"),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family="jamba", architectures=(JAMBA,), name_map=name_map, copies=tied_output)
