"""GLM-4.7-Flash in GGUF, where it is a DeepSeek-V3: such a file is read as one."""

from __future__ import annotations

from typing import Any

from mt_models.blocks.gguf_decoder import tied_output
from mt_models.deepseek import gguf as deepseek
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily


def write(external: External) -> dict[str, Any]:
    deepseek.require_dense_first(external, "deepseek2")
    return {**deepseek.write(external), "expert_gating_func": deepseek.SIGMOID}


GLM = GGUFArchitecture(
    "deepseek2", "glm4_moe_lite", deepseek.KEYS, deepseek.read_v3, write, lambda metadata: False, predicts=False
)

GGUF = GGUFFamily(family="glm4_moe_lite", architectures=(GLM,), name_map=deepseek.name_map, copies=tied_output)
