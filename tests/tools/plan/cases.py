"""Small configurations for plans, as trees."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from fake import host

from mt_core.config.checks import as_world
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_tools.plan.layouts import LayoutPlan, Planner
from mt_tools.plan.machines import get_machine
from mt_tools.plan.result_cache import ResultCache

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
EXPERTS = {"num_experts": 16, "moe_ffn_hidden_size": 16, "moe_router_force_load_balancing": True}
MOE = {**LLAMA, "moe": EXPERTS}
GPT_OSS = {**LLAMA, "family": "gpt_oss", "kv_channels": 8, "sliding_window": 8, "moe": EXPERTS}
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
T5 = {"family": "t5", "num_layers": 2, "decoder_num_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
# On CPUs torch writes out an attention with a trained bias whatever the backend is; by name it does so on both sides.
T5 |= {"vocab_size": 261, "attention_backend": "eager"}
PAIRS = {"dataset_type": "fake_pairs", "seq_length": 32, "decoder_seq_length": 16}
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"


def tree(model: dict[str, Any] | None = None, *, parallel: dict[str, Any] | None = None, **sections: Any) -> Tree:
    return {
        "model": model or MODEL,
        "data": {"dataset_type": "mock", "seq_length": 32, "split": "1,1,98"},
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
        return config_from_dict(values, host())


def planned(values: Tree, world: int, machine: str = "h100") -> LayoutPlan:
    return _planned(json.dumps(values), world, machine)


@cache  # several tests compare with the same plan
def _planned(values: str, world: int, machine: str) -> LayoutPlan:
    return plan_alone(json.loads(values), world, machine, results())


def plan_alone(values: Tree, world: int, machine: str = "h100", results: ResultCache | None = None) -> LayoutPlan:
    config = built(values, world)
    return Planner(config, host(), get_machine(machine), _results=results or ResultCache()).plan(config, world)


@cache
def results() -> ResultCache:
    """Of operations, for all plans: what test_plan_cache.py shows to change no number."""
    return ResultCache()
