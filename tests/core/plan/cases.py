"""Small configurations for plans, as trees."""

from __future__ import annotations

from typing import Any

from mt_core.config.checks import as_world
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.plan.layouts import LayoutPlan, Planner
from mt_core.plan.machines import get_machine
from mt_core.plugins import load_plugins

Tree = dict[str, dict[str, Any]]

MODEL = {
    "family": "gpt",
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "vocab_size": 261,
}
LLAMA = {"family": "llama", "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
LLAMA |= {"vocab_size": 261, "max_position_embeddings": 32}
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"


def tree(model: dict[str, Any] | None = None, *, parallel: dict[str, Any] | None = None, **sections: Any) -> Tree:
    return {
        "model": model or MODEL,
        "data": {"dataset_type": "mock", "seq_length": 32},
        "parallel": parallel or {},
        "train": {
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "train_iters": 4,
            "device": "cpu",
            "eval_interval": None,
            "sample_prompt": None,
            "num_threads": 1,
        },
        "logging": {"progress": "none"},
        "checkpoint": {"save_interval": None},
        **sections,
    }


def built(values: Tree, world: int) -> Config:
    with as_world(world):
        return config_from_dict(values, load_plugins())


def planned(values: Tree, world: int) -> LayoutPlan:
    config = built(values, world)
    return Planner(config, load_plugins(), get_machine("h100")).plan(config, world)
