"""Dense ERNIE 4.5 models in GGUF. Adjacent channels are rotated here and there."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    PRE_NORMS,
    attention,
    decoder_map,
    feed_forward,
    norms,
    read_shape,
    require_scaling,
    tied_output,
    write_shape,
)
from mt_models.ernie4_5.config import Ernie45Config
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, require


def name_map(config: Ernie45Config) -> NameMap:
    return decoder_map(config, [*norms(PRE_NORMS), *attention(config), *feed_forward()])


def write(external: External) -> dict[str, Any]:
    require(external, "use_bias", (False,), "ernie4_5")
    require_scaling(external, ("default", "linear", "yarn"), "ernie4_5")
    return write_shape(external)


ERNIE45 = GGUFArchitecture(name="ernie4_5", model_type="ernie4_5", keys=DENSE, read=read_shape, write=write)

GGUF = GGUFFamily(family="ernie4_5", architectures=(ERNIE45,), name_map=name_map, copies=tied_output)
