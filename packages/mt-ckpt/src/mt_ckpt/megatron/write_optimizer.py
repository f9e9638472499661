"""The optimizer's part of a rank's file, as Megatron without the distributed optimizer writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mt_ckpt.megatron.names import EXPERTS
from mt_ckpt.megatron.optimizer import MAIN, STEP
from mt_ckpt.megatron.rank_plan import RankEntry
from mt_core.nn.layout import ParameterLayout

Written = Mapping[str, Any]
"""State ("exp_avg", "main") -> the encoded tensor of an entry."""


def param_group(options: Mapping[str, Any], *, decayed: bool, of_experts: bool) -> dict[str, Any]:
    """What Megatron-Core 0.19 keeps of a group, without its parameters. options: `optimizer_options`."""
    return {
        "is_expert_parallel": of_experts,
        "default_config": True,
        "wd_mult": 1.0 if decayed else 0.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": options["max_lr"],
        "min_lr": options["min_lr"],
        "lr": options["lr"],
        "betas": (options["adam_beta1"], options["adam_beta2"]),
        "eps": options["adam_eps"],
        "weight_decay": options["weight_decay"] if decayed else 0.0,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        # AdamW: the decay is not part of the gradient.
        "decoupled_weight_decay": True,
    }


def optimizer_groups(
    layouts: Mapping[str, ParameterLayout], options: Mapping[str, Any], step: float, *, experts_apart: bool
) -> list[dict[str, Any]]:
    """The groups of a distributed optimizer, dense ones first; their parameters are not listed."""
    kinds = {
        # - of_experts: canonical experts have one dimension more than the tensor that Megatron sees.
        (len(layout.shape) - of_experts > 1 and not name.endswith(".bias"), of_experts and experts_apart)
        for name, layout in layouts.items()
        for of_experts in [EXPERTS in name]
        if layout.trained
    }
    # Dense before experts, with weight decay before without.
    ordered = sorted(kinds, key=lambda kind: (kind[1], not kind[0]))
    return [
        {**param_group(options, decayed=decayed, of_experts=of_experts), STEP: step} for decayed, of_experts in ordered
    ]


def groups_value(groups: Sequence[Mapping[str, Any]]) -> Any:
    """The value under `optimizer` beside `distrib_optim.pt`."""
    kinds = [[g for g in groups if g["is_expert_parallel"] == of_experts] for of_experts in (False, True)]
    made = [{"optimizer": {"param_groups": kind}} for kind in kinds if kind]
    return made[0] if len(made) == 1 else made


def optimizer_value(
    members: Sequence[tuple[RankEntry, int, Written]],
    options: Mapping[str, Any],
    step: Callable[[], Any],
    *,
    experts_apart: bool,
) -> Any:
    """The value under `optimizer`: a dictionary, or one for dense parameters and one for the experts'.

    members: each parameter with its number of dimensions in the file and its states. step: makes the encoded number of
    updates, a tensor for each parameter. experts_apart: as Megatron does with expert parallel ranks.
    """
    kinds = [
        [m for m in members if (experts_apart and m[0].expert is not None) == of_experts]
        for of_experts in (False, True)
    ]
    made = [_one(kind, options, step, of_experts=bool(i)) for i, kind in enumerate(kinds) if kind]
    return made[0] if len(made) == 1 else made


def _one(
    members: Sequence[tuple[RankEntry, int, Written]],
    options: Mapping[str, Any],
    step: Callable[[], Any],
    *,
    of_experts: bool,
) -> dict[str, Any]:
    groups, states, copies = [], {}, []
    count = 0
    # Megatron's order of groups: with weight decay first.
    for decayed in (True, False):
        chosen = [written for entry, dims, written in members if _decays(entry, dims) == decayed]
        if not chosen:
            continue
        numbers = list(range(count, count + len(chosen)))
        # Numbers go on from group to group, as torch's state_dict counts them.
        count += len(chosen)
        groups.append({**param_group(options, decayed=decayed, of_experts=of_experts), "params": numbers})
        for number, written in zip(numbers, chosen, strict=True):
            moments = {state: tensor for state, tensor in written.items() if state != MAIN}
            states[number] = {STEP: step(), **moments}
        # One list for each group, of its 16-bit parameters.
        copies.append([written[MAIN] for written in chosen if MAIN in written])
    inner = {"state": states, "param_groups": groups}
    return {"optimizer": inner, "fp32_from_fp16_params": copies} if any(copies) else inner


def _decays(entry: RankEntry, dims: int) -> bool:
    return dims > 1 and not entry.name.endswith(".bias")
