"""Values to start from: `mt train --preset conv-tiny`."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "conv-tiny": {
        "model": {"num_layers": 4, "hidden_size": 96},
        "data": {"seq_length": 128},
        "train": {"micro_batch_size": 16, "train_iters": 200},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1},
        "lr_schedule": {"lr_decay_style": "cosine", "lr_warmup_iters": 20},
    }
}
