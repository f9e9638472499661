"""Keys that would have nothing to act on are refused by name."""

from __future__ import annotations

import pytest

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError


def moe(**options: str) -> list[str]:
    given = ", ".join(f"{key}={value}" for key, value in {"num_experts": "8", **options}.items())
    return ["model.family=mixtral", f"model.moe={{{given}}}"]


@pytest.mark.parametrize(
    ("world", "overrides", "words"),
    [
        (1, ["parallel.pipeline_model_parallel_layout=EttL"], r"parallel\.pipeline_model_parallel_layout=EttL names"),
        (1, ["parallel.num_layers_in_last_pipeline_stage=1"], r"parallel\.num_layers_in_last_pipeline_stage divides"),
        (
            1,
            ["parallel.cp_comm_type=a2a+p2p", "parallel.hierarchical_context_parallel_sizes=[2, 2]"],
            r"hierarchical_context_parallel_sizes=\[2, 2\] .* it can be \[1, 1\]",
        ),
        (2, ["parallel.expert_model_parallel_size=2"], r"parallel\.expert_model_parallel_size=2 divides experts"),
        (1, ["recompute.recompute_granularity=selective", "recompute.recompute_modules=[]"], "computes nothing again"),
        (1, moe(moe_layer_freq='"[0]*2"'), r"model\.moe\.moe_layer_freq='\[0\]\*2' gives no layer experts"),
        (1, moe(moe_layer_freq="0"), r"model\.moe\.moe_layer_freq=0: .* it can be 1 or more"),
        *(
            (1, moe(moe_router_load_balancing_type='["sinkhorn"]', **{key: value}), rf"excludes model\.moe\.{key}")
            for key, value in (
                ("moe_router_pre_softmax", "true"),
                ("moe_router_random_seed", "3"),
                ("moe_router_force_load_balancing", "true"),
            )
        ),
        (
            1,
            moe(moe_router_force_load_balancing="true", moe_router_num_groups="4", moe_router_group_topk="2"),
            r"moe_router_force_load_balancing chooses experts without groups",
        ),
    ],
)
def test_it_is_an_error(monkeypatch: pytest.MonkeyPatch, world: int, overrides: list[str], words: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(ConfigError, match=words):
        load_config(preset="gpt-tiny", overrides=["model.num_layers=2", *overrides])
