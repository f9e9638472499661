"""`mt verify layout` on every kind of model: each family, made small, on two or four processes and on one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.covering import EXHAUSTIVE
from tests.dist.in_turn import InTurn, Run

from mt_core.config.checks import as_world
from mt_core.config.loading import load_config
from mt_core.config.schema import Config
from mt_core.errors import MtError
from mt_core.plugins import load_plugins
from mt_tools.verify.comparison import compare
from mt_tools.verify.run_record import RunRecord, record_on_rank
from mt_tools.verify.small_config import processes, shrink

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[3] / "examples"
DATA, TP, SP, EP, PP, CP = (
    "parallel.use_distributed_optimizer=true",
    "parallel.tensor_model_parallel_size=2",
    "parallel.sequence_parallel=true",
    "parallel.expert_model_parallel_size=2",
    "parallel.pipeline_model_parallel_size=2",
    "parallel.context_parallel_size=2",
)
STEPS = 2
"""Half a batch and a whole one. What shows later is found in test_verify_faults.py."""
MISTRAL4 = (
    *(f"model.language_model.{key}" for key in ("family=mistral4", "moe.num_experts=8", "moe.moe_router_topk=2")),
    'model.language_model.moe.moe_layer_freq="([0]*1+[1]*1)"',
)
"""Settings that put a Mistral 4 behind the tower of mistral3."""
PROJECTION = 'model.freeze=["vision_model", "language_model"]'
EXAMPLE_LAYOUTS = [
    ("deepseek", EP),
    ("gemma", TP),
    # Gradients of single numbers that are nearly 0.
    ("gpt-tiny", TP, SP, "model.enable_mhc_connections=true"),
    ("hybrid", DATA),
    (
        *("hybrid", TP, SP, "model.mamba_num_groups=2", "model.normalization=LayerNorm", "model.hidden_dropout=0.1"),
        "model.num_query_groups=1",  # one for both ranks
        *("model.position_embedding_type=learned_absolute", "model.max_position_embeddings=4096"),
    ),
    # Images in the first stage, where only the projection is trained.
    ("llava", PP, PROJECTION),
    ("llava", TP),
    ("mamba", DATA),
    ("mixtral-tiny", EP),
    # Images of any size.
    ("qwen3_vl", PP),
    ("qwen3_vl", TP, SP),
    # Images whose positions see one another.
    ("kimi_k25", PP),
    ("kimi_k25", TP, SP),
    ("gemma4_vl", PP),
    ("gemma4_vl", TP, SP),
    # A tower is a part of the first stage, and whole where texts are divided;
    # tests/models/test_vision_tensor_parallel.py divides its tensors.
    ("smolvlm", CP),
    ("vision", TP),
]
SLOW_EXAMPLE_LAYOUTS = [
    # What qwen3_vl has, without what it adds; gemma4_vl and llava are towers in a first stage, too.
    ("qwen_vl", PP),
    ("qwen_vl", TP, SP),
    # The features of images go along with the hidden states to the layer of multi-token prediction.
    ("qwen_next_vl", PP, "model.language_model.mtp_num_layers=1"),
    ("qwen_next_vl", TP, SP, "model.language_model.mtp_num_layers=1"),
    ("qwen3_omni", PP),
    ("mistral3", PP),
    *(("mistral3", *layout, *MISTRAL4) for layout in ((PP,), (EP,), (TP, SP))),
    ("smolvlm", PP),
    # Experts of deepseek.
    ("kimi_k25", EP),
    ("minimax_m3_vl", EP),
    ("minimax_m3_vl", PP),
    ("minimax_m3_vl", TP, SP),
    ("qwen_vl", DATA),
    # Its neighbours are found in 2 CPU seconds on each rank; tests/models/test_retro_tensor_parallel.py is quicker.
    ("retro", TP),
]
PRESET_LAYOUTS = {"gpt-tiny": PP, "llama3-8b": TP, "mixtral-8x7b": EP, "deepseek-v3": EP, "qwen3-30b-a3b": EP}


def example(name: str, *settings: str) -> Config:
    with as_world(2):
        return load_config(EXAMPLES / f"{name}.toml", overrides=list(settings), host=load_plugins()).config


def preset(name: str, *settings: str) -> Config:
    with as_world(2):
        return load_config(preset=name, overrides=["train.train_iters=20", *settings], host=load_plugins()).config


def whole(config: Config) -> Config:
    """The same in one process."""
    small: dict[str, Any] = dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "expert_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        ),
        1,
    )
    small["use_distributed_optimizer"] = False
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=small)})


def made_small(config: Config) -> Config:
    return shrink(config, load_plugins(), steps=STEPS)


def divided_run(small: Config) -> Run:
    return processes(small.parallel), json.dumps(small.to_dict())


def whole_run(small: Config) -> Run:
    return 1, json.dumps(whole(small).to_dict())


def record(rank: int, world: int, tree: str) -> RunRecord | MtError | None:
    return record_on_rank(rank, world, json.loads(tree), STEPS, None)


@cache
def recorded() -> InTurn:
    """Made by the first test that looks at it: the configurations take a second."""
    chosen = [example(*one) for one in EXAMPLE_LAYOUTS] + [preset(*one) for one in PRESET_LAYOUTS.items()]
    runs = [(divided_run(config), whole_run(config)) for config in map(made_small, chosen)]
    return InTurn(record, *zip(*runs, strict=True))


def require_same(config: Config) -> None:
    small = made_small(config)
    assert processes(small.parallel) <= 4
    found, reference = recorded().result(*divided_run(small)), recorded().result(*whole_run(small))
    assert isinstance(found, RunRecord), found
    assert isinstance(reference, RunRecord), reference
    wrong = [str(difference) for difference in compare(found, reference) if difference.too_large]
    assert not wrong, wrong[:3]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [*EXAMPLE_LAYOUTS, *(pytest.param(one, marks=EXHAUSTIVE) for one in SLOW_EXAMPLE_LAYOUTS)], ids=" ".join
)
def test_an_example_computes_the_same_on_several_processes(layout: tuple[str, ...]) -> None:
    require_same(example(*layout))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", PRESET_LAYOUTS)
def test_a_preset_computes_the_same_on_several_processes(name: str) -> None:
    require_same(preset(name, PRESET_LAYOUTS[name]))


def test_a_small_retro_keeps_its_sizes_together() -> None:
    small = shrink(example("retro"), load_plugins())
    model, data = small.model.model_dump(), small.data.model_dump()
    assert data["seq_length"] % model["retro_chunk_length"] == 0
    assert data["retro_chunk_length"] == model["retro_chunk_length"] < 32
    assert model["retro_cross_attention_layers"] == [model["num_layers"]]


def test_a_small_moe_model_keeps_dense_layers_groups_and_shared_experts() -> None:
    small = shrink(preset("deepseek-v3", EP), load_plugins()).model.model_dump()
    assert small["moe"]["num_experts"] == 8
    assert small["moe"]["moe_layer_freq"] == "([0]*1+[1]*1)"
    assert (small["moe"]["moe_router_num_groups"], small["moe"]["moe_router_group_topk"]) == (4, 2)
    assert small["moe"]["moe_shared_expert_intermediate_size"] == small["moe"]["moe_ffn_hidden_size"] == 16
    assert (small["q_lora_rank"], small["kv_lora_rank"]) == (24, 16)
