"""Writes the configuration of every pretraining recipe of Megatron-Bridge as YAML: dump_recipes.py FOLDER.

Runs with Megatron-Bridge on the path and without a GPU. wandb is replaced by an empty module, and Transformer Engine's
rotary kernel by a function that is never called: recipes require that both are there and use neither.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from pathlib import Path

GIVEN = {"mock": True, "train_iters": 10_000}
"""What a user would give: recipes' own lengths are shorter than their warm-up."""


def main(folder: Path) -> None:
    sys.modules["wandb"] = types.ModuleType("wandb")
    kernels = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    kernels.fused_apply_rotary_pos_emb = kernels.fused_apply_rotary_pos_emb_thd = len
    recipes = importlib.import_module("megatron.bridge.recipes")
    for path in sorted(Path(next(iter(recipes.__path__))).glob("*/*.py")):
        if path.parent.name == "utils":
            continue
        build = importlib.import_module(f"megatron.bridge.recipes.{path.parent.name}.{path.stem}").pretrain_config
        known = inspect.signature(build).parameters
        build(**{key: value for key, value in GIVEN.items() if key in known}).to_yaml(str(folder / f"{path.stem}.yaml"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
