"""Small models with random weights, and their calibration in a layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mt_ckpt.model import expected_parameters
from mt_ckpt.native.save import save_checkpoint
from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.config.loading import config_from_dict
from mt_core.plugins import load_plugins
from mt_core.train.trained_model import load_trained_model
from mt_tools.calibration.options import CalibrationOptions
from mt_tools.calibration.run import CalibrationResult, calibrate_model
from mt_tools.calibration.samples import rank_batches
from mt_tools.calibration.store import calibration_store
from mt_tools.calibration.writing import write_calibrated

LLAMA: dict[str, Any] = {
    "family": "llama", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
    "ffn_hidden_size": 64, "max_position_embeddings": 64, "vocab_size": 50,
}  # fmt: skip
MOE = {
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_router_load_balancing_type": ["aux_loss"],
    "moe_aux_loss_coeff": [0.01],
}  # fmt: skip
LENGTH = 16


def save_model(path: Path, dtype: torch.dtype = torch.float32, **keys: Any) -> Path:
    host = load_plugins()
    tokenizer = {"tokenizer_type": "NullTokenizer", "vocab_size": 50}
    config = config_from_dict({"model": {**LLAMA, **keys}, "tokenizer": tokenizer}, host)
    generator = torch.Generator().manual_seed(1)
    state = {
        f"model.{name}": (torch.randn(layout.shape, generator=generator) * (0.3 if len(layout.shape) > 1 else 1)).to(
            dtype
        )
        for name, layout in expected_parameters(config, host).items()
    }
    save_checkpoint(path, state.items(), {"iteration": 1, "config": config.to_dict()}, {})
    return path


def samples(number: int, seed: int) -> list[Mapping[str, np.ndarray]]:
    drawn = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        tokens = drawn.integers(0, 50, LENGTH + 1)
        found.append({"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": np.ones(LENGTH, np.float32)})
    return found


def calibrated(
    source: Path, out: Path, options: CalibrationOptions, parallel: Mapping[str, Any] | None = None
) -> CalibrationResult:
    """Calibrate with 8 samples, measure with 4, write the folder."""
    host = load_plugins()
    settings = {} if parallel is None else {"parallel": dict(parallel)}
    trained = load_trained_model(source, host, device="cpu", settings=settings)
    stored = open_checkpoint(trained.checkpoint, host).dtypes()
    with calibration_store(out) as store:
        result = calibrate_model(
            trained,
            options,
            rank_batches(samples(8, 1), 1, trained.ctx),
            rank_batches(samples(4, 2), 1, trained.ctx),
            stored,
            store,
        )
        if trained.ctx.is_writer:
            write_calibrated(trained.checkpoint, out, options.scheme, store, result.as_values(), host)
    return result


def calibrate_rank(
    rank: int, world: int, source: Path, out: Path, options: CalibrationOptions, parallel: Mapping[str, Any]
) -> CalibrationResult:
    torch.set_num_threads(1)
    return calibrated(source, out, options, parallel)
