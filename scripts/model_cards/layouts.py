"""A few training steps of a small model under layouts of two ranks, beside one process."""

from __future__ import annotations

from typing import Any

import torch
from tests.ckpt.convert_cases import MODELS
from tests.dist.test_family_layouts import LAYOUTS, SETTINGS, settings
from tests.dist.test_layouts import STEPS

from mt_core.config.loading import load_config
from mt_core.errors import MtError
from mt_core.plugins import load_plugins
from mt_core.testing import RankFailureError, run_ranks
from mt_tools.verify.run_record import RunRecord, record_run


def proved(name: str) -> dict[str, Any]:
    """layout -> the largest relative difference of a gradient or a weight, or why the layout is refused."""
    alone = run_ranks(1, run, name, (), timeout=120)[0]
    if isinstance(alone, str):
        return {"alone": alone}
    moe = "moe" in MODELS[name]
    return {label: compared(name, keys, alone) for label, keys in LAYOUTS.items() if label != "ep" or moe}


def compared(name: str, keys: tuple[str, ...], alone: RunRecord) -> float | str:
    try:
        found = run_ranks(2, run, name, keys, timeout=120)[0]
    except RankFailureError as error:
        return str(error).strip().splitlines()[-1]
    return found if isinstance(found, str) else difference(found, alone)


def difference(found: RunRecord, alone: RunRecord) -> float:
    pairs = [(getattr(found, kind), getattr(alone, kind)) for kind in ("gradients", "weights")]
    return max(
        ((mine[name] - value).norm() / value.norm().clamp(min=1e-12)).item()
        for mine, theirs in pairs
        for name, value in theirs.items()
    )


def run(rank: int, world: int, name: str, layout: tuple[str, ...]) -> RunRecord | str | None:
    torch.set_num_threads(1)
    host = load_plugins()
    keys = {**MODELS[name], "vocab_size": 263}
    if "moe" in keys:
        keys["moe"] = {**keys["moe"], "num_experts": 2 * keys["moe"]["num_experts"]}
    try:
        config = load_config(overrides=[*SETTINGS, *settings("model", keys), *layout], host=host)
        record = record_run(config, STEPS, host=host)
    except MtError as error:
        return str(error)
    return record if rank == 0 else None
