"""YaRN: rotary positions stretched for longer sequences (Peng et al., 2023), as Megatron's arguments say it.

Attention with heads has --position-embedding-type yarn and says everything; latent attention has --rope-type yarn and
takes some of it for granted. The two mscale arguments are the same for both.
"""

from __future__ import annotations

from typing import Any

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.families.shared import require
from mt_core.errors import ConfigError

YARN = "yarn"
PLAIN = (1.0, 0.0)
"""mscale and mscale_all_dim that mean what our configuration does without rope_mscale keys: m(1)."""


def yarn_section(args: Arguments) -> dict[str, Any]:
    """Of position_embedding_type yarn, whose arguments Megatron has no defaults for."""
    return {
        "rope_scaling_type": YARN,
        "rope_scaling_factor": float(args.get("rotary_scaling_factor", 1.0)),
        "original_max_position_embeddings": int(args.need("yarn_original_max_position_embeddings")),
        "rope_beta_fast": float(args.need("yarn_beta_fast")),
        "rope_beta_slow": float(args.need("yarn_beta_slow")),
        "rope_truncate": bool(args.need("yarn_correction_range_round_to_int")),
        **mscale_section(args),
    }


def mscale_section(args: Arguments) -> dict[str, Any]:
    """Megatron's factor is m(mscale) / m(mscale_all_dim) always; ours only with both above 0, else m(1)."""
    # m(x) = 0.1 x ln(factor) + 1, and m(0) = 1.
    given = float(args.get("mscale", PLAIN[0])), float(args.get("mscale_all_dim", PLAIN[1]))
    if given == PLAIN:
        return {}
    if not all(given):
        raise ConfigError(
            f"{args.origin}: mscale={given[0]:g} with mscale_all_dim={given[1]:g} is not read; both have to be above "
            "0, or they have to be 1 and 0"
        )
    return {"rope_mscale": given[0], "rope_mscale_all_dim": given[1]}


def yarn_arguments(model: Any) -> dict[str, Any]:
    """The other way. Raises ConfigError for a factor on queries and keys that is given as such."""
    require(model, "rope_attention_factor", (None,))
    return {
        "rotary_scaling_factor": model.rope_scaling_factor,
        "yarn_original_max_position_embeddings": model.original_max_position_embeddings
        or model.max_position_embeddings,
        "yarn_beta_fast": model.rope_beta_fast,
        "yarn_beta_slow": model.rope_beta_slow,
        "yarn_correction_range_round_to_int": model.rope_truncate,
        **mscale_arguments(model),
    }


def mscale_arguments(model: Any) -> dict[str, Any]:
    one, all_dim = model.rope_mscale, model.rope_mscale_all_dim
    if all_dim and not one:
        raise ConfigError(
            f"model.rope_mscale_all_dim={all_dim} without model.rope_mscale cannot be written as Megatron's arguments; "
            "set model.rope_mscale too"
        )
    # Without both, ours multiplies by m(1): Megatron's m(1) / m(0).
    mscale, mscale_all_dim = (one, all_dim) if one and all_dim else PLAIN
    return {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
