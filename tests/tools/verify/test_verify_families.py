"""`mt verify layout` on every kind of model: each family, made small, on two processes and on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.covering import EXHAUSTIVE

from mt_core.config.checks import as_world
from mt_core.config.loading import load_config
from mt_core.config.schema import Config
from mt_core.plugins import load_plugins
from mt_tools.verify.comparison import compare
from mt_tools.verify.small_config import processes, shrink
from mt_tools.verify.small_runs import record

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[3] / "examples"
DATA, TP, EP, PP, CP = (
    "parallel.use_distributed_optimizer=true",
    "parallel.tensor_model_parallel_size=2",
    "parallel.expert_model_parallel_size=2",
    "parallel.pipeline_model_parallel_size=2",
    "parallel.context_parallel_size=2",
)
EXAMPLE_LAYOUTS = {"deepseek": EP, "mixtral-tiny": EP, "vision": TP}
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


def require_same(config: Config) -> None:
    small = shrink(config, load_plugins())
    assert processes(small.parallel) <= 4
    found, reference = record(small), record(whole(small), world=1)
    wrong = [str(difference) for difference in compare(found, reference) if difference.too_large]
    assert not wrong, wrong[:3]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLE_LAYOUTS)
def test_an_example_is_the_same_on_two_processes(name: str) -> None:
    require_same(example(name, EXAMPLE_LAYOUTS[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        # Its neighbours are found in 2 CPU seconds on each rank; tests/models/test_retro_tensor_parallel.py is quicker.
        pytest.param("retro", TP, marks=EXHAUSTIVE),
        ("hybrid", DATA),
        ("mamba", DATA),
        ("gemma", TP),
    ],
)
def test_a_slower_example_is_the_same_on_two_processes(name: str, layout: str) -> None:
    require_same(example(name, layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [PP, CP])
def test_a_tower_is_a_part_of_the_first_stage_and_whole_where_texts_are_divided(layout: str) -> None:
    """On two processes; tests/models/test_vision_tensor_parallel.py divides its tensors."""
    require_same(example("smolvlm", layout))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [[TP], [PP, 'model.freeze=["vision_model", "language_model"]']], ids=str)
def test_images_are_the_same_on_two_processes(settings: list[str]) -> None:
    """Whole, and in LLaVA's first stage, where only the projection is trained."""
    require_same(example("llava", *settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [[TP, "parallel.sequence_parallel=true"], [PP], pytest.param([DATA], marks=EXHAUSTIVE)], ids=str
)
def test_images_of_any_size_are_the_same_on_two_processes(settings: list[str]) -> None:
    require_same(example("qwen_vl", *settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESET_LAYOUTS)
def test_a_preset_is_the_same_on_two_processes(name: str) -> None:
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
    assert small["moe"]["moe_layer_freq"] == "[0]*1+[1]*1"
    assert (small["moe"]["moe_router_num_groups"], small["moe"]["moe_router_group_topk"]) == (4, 2)
    assert small["moe"]["moe_shared_expert_intermediate_size"] == small["moe"]["moe_ffn_hidden_size"] == 16
    assert (small["q_lora_rank"], small["kv_lora_rank"]) == (24, 16)
