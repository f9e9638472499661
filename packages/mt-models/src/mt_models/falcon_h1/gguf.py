"""Falcon-H1 in GGUF, whose matrices contain the factors of the configuration: a file is read with factors of 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import (
    DENSE,
    OURS,
    THEIRS,
    attention,
    feed_forward,
    norms,
    read_shape,
    tied_output,
    write_shape,
)
from mt_models.blocks.gguf_mamba import mixer
from mt_models.falcon_h1.config import FalconH1Config
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require

Factor = float | tuple[tuple[int, float], ...]
"""Factor of a whole tensor, or pairs (rows, factor)."""


@dataclass(frozen=True)
class Multiplied(Rule):
    """The tensors of another rule, multiplied there. factors: one for each tensor."""

    rule: Rule = field(default_factory=lambda: Same("", ""))
    factors: tuple[Factor, ...] = ()

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.rule.import_value([times(x, f, -1) for x, f in zip(tensors, self.factors, strict=True)])

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [times(x, f, 1) for x, f in zip(self.rule.export_value(tensor), self.factors, strict=True)]


def times(tensor: Tensor, factor: Factor, power: int) -> Tensor:
    if factor == 1.0:
        return tensor
    values = torch.tensor(factor) if isinstance(factor, float) else row_factors(factor)
    return (tensor.float() * values.to(tensor.device) ** power).to(tensor.dtype)


def row_factors(parts: Sequence[tuple[int, float]]) -> Tensor:
    """[rows, 1]"""
    return torch.cat([torch.full((rows, 1), factor) for rows, factor in parts])


def multiplied(rules: Sequence[Rule], factors: dict[str, tuple[Factor, ...]]) -> list[Rule]:
    """factors: end of a canonical name -> those of the rule's tensors."""
    factors_by_rule = {rule: next((f for end, f in factors.items() if rule.ours.endswith(end)), None) for rule in rules}
    return [
        rule if rule_factors is None else Multiplied(rule.ours, rule.theirs, rule=rule, factors=rule_factors)
        for rule, rule_factors in factors_by_rule.items()
    ]


def name_map(config: FalconH1Config) -> NameMap:
    read, state = config.attention_in_multiplier, config.mamba_num_groups * config.mamba_state_dim
    rows = (config.mamba_inner_size, config.mamba_inner_size, state, state, config.mamba_heads)
    of_rows = zip(rows, (config.ssm_in_multiplier * factor for factor in config.ssm_multipliers), strict=True)
    gate, down = config.mlp_multipliers
    factors: dict[str, tuple[Factor, ...]] = {
        "linear_qkv.weight": (read, read * config.key_multiplier, read),
        "linear_proj.weight": (config.attention_out_multiplier,),
        "linear_fc1.weight": (gate, 1.0),
        "linear_fc2.weight": (down,),
        "mixer.in_proj.weight": (tuple(of_rows),),
        "mixer.out_proj.weight": (config.ssm_out_multiplier,),
        "word_embeddings.weight": (config.embedding_multiplier,),
        "output_layer.weight": (config.lm_head_multiplier,),
    }
    mamba = [rule for rule in mixer(config) if config.mamba_gated_norm or not rule.ours.endswith(".norm.weight")]
    # llama.cpp has the second norm without a suffix.
    second = Same(f"{OURS}pre_mlp_layernorm.weight", f"{THEIRS}ffn_norm")
    layer = [*norms({"input_layernorm": "attn_norm"}), second, *attention(config), *feed_forward(), *mamba]  # type: ignore[arg-type]
    final = norms({"decoder.final_layernorm": "output_norm"}, ours="", theirs="")
    around = [Same("embedding.word_embeddings.weight", "token_embd.weight")]
    if config.untie_embeddings_and_output_weights:
        around.append(Same("output_layer.weight", "output.weight"))
    return NameMap(multiplied([*around, *layer, *final], factors), config.num_layers)


# -- configuration -----------------------------------------------------------------------------------


def read(metadata: Metadata) -> dict[str, Any]:
    shape = read_shape(metadata)
    del shape["rope_scaling"]
    inner, heads = metadata.need("ssm.inner_size", int), metadata.need("ssm.time_step_rank", int)
    return {
        **shape,
        "mamba_d_ssm": inner,
        "mamba_d_head": inner // heads,
        "mamba_rms_norm": metadata.has_tensor("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def write(external: External) -> dict[str, Any]:
    require(external, "mamba_conv_bias", (True,), "falcon-h1")
    require(external, "mamba_proj_bias", (False,), "falcon-h1")
    require(external, "time_step_limit", ([0.0, float("inf")],), "falcon-h1")
    if external["tie_word_embeddings"]:
        # One matrix is embedding and LM head.
        require(external, "embedding_multiplier", (external["lm_head_multiplier"],), "falcon-h1 with one embedding")
    # A model that does not say for which length it was trained has no longest one.
    length = external.get("max_position_embeddings") or CONTEXT
    return {**write_shape(external), "context_length": length, "ssm.inner_size": external["mamba_d_ssm"]}


CONTEXT = 1 << 20
FALCON_H1 = GGUFArchitecture(
    name="falcon-h1",
    model_type="falcon_h1",
    keys=(
        *DENSE,
        Key("ssm.conv_kernel", "mamba_d_conv"),
        Key("ssm.state_size", "mamba_d_state"),
        Key("ssm.time_step_rank", "mamba_n_heads"),
        Key("ssm.group_count", "mamba_n_groups"),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family="falcon_h1", architectures=(FALCON_H1,), name_map=name_map, copies=tied_output)
