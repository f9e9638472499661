"""Names of Kimi delta attention in GGUF."""

from __future__ import annotations

from collections.abc import Mapping

from mt_core.name_map import Rule, Same
from mt_models.blocks.delta_net_config import DeltaNetKeys
from mt_models.blocks.gguf_decoder import OURS, THEIRS
from mt_models.blocks.hugging_face_delta_net import Blocks

DECAY = (f"{OURS}self_attention.A_log", f"{THEIRS}ssm_a")
"""Logarithms of the decays here, and the decays there; which form they have differs."""
LOW_RANK = {
    "forget_down_proj.weight": "ssm_f_a.weight",
    "forget_up_proj.weight": "ssm_f_b.weight",
    "gate_down_proj.weight": "ssm_g_a.weight",
    "gate_up_proj.weight": "ssm_g_b.weight",
}
"""Decays and output gates as products of two matrices."""
OUTPUT = {"dt_bias": "ssm_dt.bias", "out_norm.weight": "ssm_norm.weight", "out_proj.weight": "attn_output.weight"}


def kimi_delta_net(config: DeltaNetKeys, decay: Rule, gates: Mapping[str, str]) -> list[Rule]:
    """decay: rule of `A_log`. gates: names of the matrices of decays and output gates, within the block and in GGUF."""
    ours, width, heads = f"{OURS}self_attention.", config.linear_key_size, config.linear_num_key_heads
    projections = tuple(f"{THEIRS}{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "ssm_beta"))
    convolutions = tuple(f"{THEIRS}ssm_conv1d_{name}.weight" for name in "qkv")
    return [
        Blocks(f"{ours}in_proj.weight", projections, sizes=(width, width, width, heads)),
        # [channels, 1, kernel] here and there.
        Blocks(f"{ours}conv1d.weight", convolutions, sizes=(width, width, width)),
        decay,
        *(Same(ours + canonical, THEIRS + external) for canonical, external in {**gates, **OUTPUT}.items()),
    ]
