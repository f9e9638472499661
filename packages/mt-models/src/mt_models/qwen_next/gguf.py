"""Qwen3-Next, Qwen3.5 and Qwen3.6 in GGUF, without layers of multi-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import (
    EPSILON,
    EXPERT_COUNTS,
    FEED_FORWARD,
    NORMS_BEHIND_ATTENTION,
    OURS,
    QK_NORMS,
    SIZES,
    THEIRS,
    SharedGate,
    decoder_map,
    experts,
    feed_forward,
    norms,
    read_shape,
    require_scaling,
    tied_output,
    write_shape,
)
from mt_models.blocks.hugging_face_decoder import FULL
from mt_models.blocks.hugging_face_delta_net import LINEAR, Blocks, GatedGroupedQKV, rows_of_key_head
from mt_models.blocks.moe import MoEOptions
from mt_models.gguf import (
    External,
    GGUFArchitecture,
    GGUFFamily,
    Key,
    Metadata,
    NegativeExponential,
    PlusOne,
    Reshaped,
    require,
)
from mt_models.qwen_next.config import QwenNextConfig
from mt_models.qwen_next.hugging_face import DENSE, NEXT, SPARSE

INTERVAL = "full_attention_interval"
SECTIONS = "rope.dimension_sections"
"""Pairs of channels that turn with time, height, width, and none with a fourth. llama.cpp needs them of Qwen3.5."""


# -- operations ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlocksAndPairs(Blocks):
    """Blocks, of which the last two are one matrix there: of each key head the rows of b, then those of a."""

    heads: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        *parts, pairs = tensors
        b, a = (x.flatten(0, 1) for x in pairs.unflatten(0, (self.heads, 2, -1)).unbind(1))
        return torch.cat([*parts, b, a])

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        *parts, b, a = super().export_value(tensor)
        by_head = [x.unflatten(0, (self.heads, -1)) for x in (b, a)]
        return [*parts, torch.cat(by_head, dim=1).flatten(0, 1).contiguous()]


@dataclass(frozen=True)
class TiledValues(Rule):
    """Tensors of another rule, with value heads in another order: here those of a key head stand together, there the
    first of every key head come first, then the second ones.

    heads, repeats: key heads, and value heads of each. starts: for each tensor where values begin, in dimension `dim`.
    """

    rule: Rule = field(default_factory=lambda: Same("", ""))
    heads: int = 1
    repeats: int = 1
    starts: tuple[int, ...] = (0,)
    dim: int = 0

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        order = (self.repeats, self.heads)
        return self.rule.import_value([self._moved(x, at, order) for x, at in zip(tensors, self.starts, strict=True)])

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        tensors, order = self.rule.export_value(tensor), (self.heads, self.repeats)
        return [self._moved(x, at, order) for x, at in zip(tensors, self.starts, strict=True)]

    def _moved(self, tensor: Tensor, start: int, order: tuple[int, int]) -> Tensor:
        before, values = tensor.tensor_split((start,), self.dim)
        moved = values.unflatten(self.dim, (*order, -1)).transpose(self.dim, self.dim + 1)
        return torch.cat((before, moved.flatten(self.dim, self.dim + 2)), self.dim).contiguous()


# -- tensors -------------------------------------------------------------------------------------------


def name_map(config: QwenNextConfig) -> NameMap:
    rules = [rule.for_layer(number) for number in range(config.num_layers) for rule in _layer(config, number)]
    return decoder_map(config, rules, norm_rule=PlusOne)


def _layer(config: QwenNextConfig, number: int) -> list[Rule]:
    sparse = config.moe is not None and MoEOptions(config).layers[number]
    # Norms are stored with one added, but those of delta nets.
    return [
        *norms(NORMS_BEHIND_ATTENTION, rule=PlusOne),
        *(_delta_net(config) if config.linear_layers[number] else _attention(config)),
        *(_experts(config) if sparse else feed_forward()),
    ]


def _attention(config: QwenNextConfig) -> list[Rule]:
    qkv = tuple(f"{THEIRS}attn_{part}.weight" for part in "qkv")
    ours = f"{OURS}self_attention.linear_qkv.weight"
    return [
        *norms(QK_NORMS, rule=PlusOne),
        GatedGroupedQKV(ours, qkv, groups=config.query_groups, heads=config.num_attention_heads),
        *norms({"self_attention.linear_proj": "attn_output"}),
    ]


def _experts(config: QwenNextConfig) -> list[Rule]:
    gate = SharedGate(f"{OURS}mlp.shared_experts.gate_weight", f"{THEIRS}ffn_gate_inp_shexp.weight")
    return [*experts(MoEOptions(config)), gate]


def _delta_net(config: QwenNextConfig) -> list[Rule]:
    ours, kernel = f"{OURS}self_attention.", config.linear_conv_kernel_dim
    q, k, v, z, b, a = (config.linear_num_key_heads * count for count in rows_of_key_head(config))
    qkvz = (f"{THEIRS}attn_qkv.weight", f"{THEIRS}attn_gate.weight")
    convolution = Reshaped(f"{ours}conv1d.weight", f"{THEIRS}ssm_conv1d.weight", here=(1, kernel), there=(kernel,))
    decay = NegativeExponential(f"{ours}A_log", f"{THEIRS}ssm_a", there=())
    bias = Same(f"{ours}dt_bias", f"{THEIRS}ssm_dt.bias")
    out = Same(f"{ours}out_proj.weight", f"{THEIRS}ssm_out.weight")
    norm = norms({"self_attention.out_norm": "ssm_norm"})
    if config.generation == NEXT:
        sizes, heads = (q + k + v, z, b, a), config.linear_num_key_heads
        projection: Rule = BlocksAndPairs(
            f"{ours}in_proj.weight", (*qkvz, f"{THEIRS}ssm_ba.weight"), sizes=sizes, heads=heads
        )
        return [projection, convolution, decay, bias, out, *norm]
    names = (*qkvz, f"{THEIRS}ssm_beta.weight", f"{THEIRS}ssm_alpha.weight")
    blocks = Blocks(f"{ours}in_proj.weight", names, sizes=(q + k + v, z, b, a))
    tiled = [_tiled(config, blocks, (q + k, 0, 0, 0)), _tiled(config, convolution, (q + k,))]
    tiled += [_tiled(config, rule, (0,)) for rule in (decay, bias)]
    return [*tiled, _tiled(config, out, (0,), dim=1), *norm]


def _tiled(config: QwenNextConfig, rule: Rule, starts: tuple[int, ...], dim: int = 0) -> Rule:
    heads = config.linear_num_key_heads
    repeats = config.linear_num_value_heads // heads
    return TiledValues(rule.ours, rule.theirs, rule=rule, heads=heads, repeats=repeats, starts=starts, dim=dim)


# -- configuration -------------------------------------------------------------------------------------


def read(metadata: Metadata) -> dict[str, Any]:
    shape = read_shape(metadata)
    values, rotated = metadata.need("ssm.time_step_rank", int), metadata.need("rope.dimension_count", int)
    interval, layers = metadata.get(INTERVAL, int) or 4, metadata.need("block_count", int)
    return {
        **shape,
        "partial_rotary_factor": rotated / shape["head_dim"],
        "layer_types": kinds_of(layers, interval),
        "linear_num_value_heads": values,
        "linear_value_head_dim": metadata.need("ssm.inner_size", int) // values,
    }


def read_with_sections(metadata: Metadata) -> dict[str, Any]:
    values, pairs = read(metadata), metadata.need("rope.dimension_count", int) // 2
    return {**values, "rope_scaling": _with_sections(values["rope_scaling"], metadata.numbers(SECTIONS)[:3], pairs)}


def _with_sections(scaling: dict[str, Any] | None, stated: list[int], pairs: int) -> dict[str, Any] | None:
    """rope_scaling with the sections of pictures, where the file states others than those of a model without them."""
    if stated == sections(pairs)[:3]:
        return scaling
    return {**(scaling or {"rope_type": "default"}), "mrope_section": stated, "mrope_interleaved": True}


def kinds_of(layers: int, interval: int) -> list[str]:
    return [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]


def write(external: External) -> dict[str, Any]:
    architecture = NAMES[str(external["model_type"])]
    require_scaling(external, ("default", "linear", "yarn"), architecture)
    kinds = list(external["layer_types"])
    interval = kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1
    if kinds != kinds_of(len(kinds), interval):
        raise ConfigError(
            f"layer_types={kinds} cannot be written as GGUF of the architecture {architecture}, in which every n-th "
            f"layer is {FULL}"
        )
    shape = write_shape(external)
    rotated = int(shape["attention.key_length"] * float(external["partial_rotary_factor"]))
    of_pictures = (external.get("rope_scaling") or {}).get("mrope_section")
    stated = None if of_pictures is None else [*of_pictures, 0]
    return {
        **shape,
        "rope.dimension_count": rotated,
        "ssm.inner_size": external["linear_value_head_dim"] * external["linear_num_value_heads"],
        INTERVAL: interval,
        # Channels that turn by the time, height and width of a picture; in text the three are equal.
        **({} if architecture == "qwen3next" else {SECTIONS: stated or sections(rotated // 2)}),
    }


def sections(pairs: int) -> list[int]:
    return [-(-pairs // 3), -(-(pairs - 1) // 3), -(-(pairs - 2) // 3), 0]


def write_next(external: External) -> dict[str, Any]:
    require(external, "mlp_only_layers", ([],), "qwen3next")
    require(external, "norm_topk_prob", (True,), "qwen3next")
    return write(external)


NAMES = {NEXT: "qwen3next", DENSE: "qwen35", SPARSE: "qwen35moe"}
COMMON = (
    *SIZES,
    EPSILON,
    Key("ssm.conv_kernel", "linear_conv_kernel_dim"),
    Key("ssm.state_size", "linear_key_head_dim"),
    Key("ssm.group_count", "linear_num_key_heads"),
    Key("ssm.time_step_rank", "linear_num_value_heads"),
)
EXPERTS = (
    Key("expert_count", "num_experts"),
    *EXPERT_COUNTS,
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)
ARCHITECTURES = (
    GGUFArchitecture(NAMES[NEXT], NEXT, (*COMMON, FEED_FORWARD, *EXPERTS), read, write_next, predicts=False),
    GGUFArchitecture(NAMES[DENSE], DENSE, (*COMMON, FEED_FORWARD), read_with_sections, write, predicts=False),
    GGUFArchitecture(NAMES[SPARSE], SPARSE, (*COMMON, *EXPERTS), read_with_sections, write, predicts=False),
)

GGUF = GGUFFamily(family="qwen_next", architectures=ARCHITECTURES, name_map=name_map, copies=tied_output)
