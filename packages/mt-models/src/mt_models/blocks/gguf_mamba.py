"""Names of Mamba-2 mixers in GGUF."""

from __future__ import annotations

from mt_core.name_map import Rule, Same
from mt_models.blocks.gguf_decoder import OURS, THEIRS
from mt_models.blocks.mamba_config import MambaLayerConfig
from mt_models.gguf import NegativeExponential, Reshaped


def mixer(config: MambaLayerConfig, ours: str = f"{OURS}mixer.") -> list[Rule]:
    """ours: the prefix of a mixer's parameters, with its dot."""
    kernel, width = config.mamba_conv_kernel, config.mamba_inner_size // config.mamba_num_groups
    rules: list[Rule] = [
        Same(f"{ours}in_proj.weight", f"{THEIRS}ssm_in.weight"),
        # [channels, 1, kernel] here.
        Reshaped(f"{ours}conv1d.weight", f"{THEIRS}ssm_conv1d.weight", here=(1, kernel), there=(kernel,)),
        NegativeExponential(f"{ours}A_log", f"{THEIRS}ssm_a"),
        Reshaped(f"{ours}D", f"{THEIRS}ssm_d", there=(1,)),
        Same(f"{ours}dt_bias", f"{THEIRS}ssm_dt.bias"),
        Reshaped(f"{ours}norm.weight", f"{THEIRS}ssm_norm.weight", there=(width,)),
        Same(f"{ours}out_proj.weight", f"{THEIRS}ssm_out.weight"),
    ]
    if config.mamba_conv_bias:
        rules.append(Same(f"{ours}conv1d.bias", f"{THEIRS}ssm_conv1d.bias"))
    return rules
