"""ERNIE 4.5 in GGUF. Adjacent channels are rotated here and there."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    PRE_NORMS,
    attention,
    decoder_map,
    feed_forward,
    mixed_feed_forward,
    norms,
    read_shape,
    require_scaling,
    tied_output,
    write_shape,
)
from mt_models.ernie4_5.config import Ernie45Config
from mt_models.ernie4_5.hugging_face import COUNT, END, EXPERTS, INTERVAL, SHARED, START, TOPK, WIDTH
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require


def name_map(config: Ernie45Config) -> NameMap:
    blocks = feed_forward() if config.moe is None else mixed_feed_forward(config)
    return decoder_map(config, [*norms(PRE_NORMS), *attention(config), *blocks])


def write(external: External) -> dict[str, Any]:
    require(external, "use_bias", (False,), "ernie4_5")
    require_scaling(external, ("default", "linear", "yarn"), "ernie4_5")
    return write_shape(external)


ERNIE45 = GGUFArchitecture(name="ernie4_5", model_type="ernie4_5", keys=DENSE, read=read_shape, write=write)

SHARED_WIDTH = "expert_shared_feed_forward_length"


def read_experts(metadata: Metadata) -> dict[str, Any]:
    shared = metadata.get(SHARED_WIDTH, int) or 0
    return {**read_shape(metadata), SHARED: shared // metadata.need("expert_feed_forward_length", int)}


def write_experts(external: External) -> dict[str, Any]:
    require(external, END, (external["num_hidden_layers"] - 1,), ERNIE45_MOE.name)
    require_scaling(external, ("default", "linear", "yarn"), ERNIE45_MOE.name)
    shared = external[SHARED]
    width = {"expert_shared_count": shared, SHARED_WIDTH: shared * external[WIDTH]} if shared else {}
    return {**write_shape(external), **width}


ERNIE45_MOE = GGUFArchitecture(
    name="ernie4_5-moe",
    model_type=EXPERTS,
    keys=(
        *DENSE,
        Key("expert_count", COUNT),
        Key("expert_used_count", TOPK),
        Key("expert_feed_forward_length", WIDTH),
        Key("leading_dense_block_count", START),
        Key("interleave_moe_layer_step", INTERVAL),
    ),
    read=read_experts,
    write=write_experts,
)

GGUF = GGUFFamily(family="ernie4_5", architectures=(ERNIE45, ERNIE45_MOE), name_map=name_map, copies=tied_output)
