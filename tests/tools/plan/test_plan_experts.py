"""Plans of mixtures of experts against formulas worked out by hand."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from cases import EP, ETP, EXPERTS, MOE, TP, built, planned, tree

from mt_core.config.checks import as_world
from mt_core.config.loading import load_config
from mt_core.plugins import load_plugins
from mt_tools.plan.layout_search import QuickPlanner, search
from mt_tools.plan.layouts import LayoutPlan, Planner
from mt_tools.plan.ledger import Ledger, RecordingGroup
from mt_tools.plan.machines import get_machine
from mt_tools.plan.report import search_values
from mt_tools.plan.routing import RoutedTokens, assign_round_robin, assign_to_few

FP8 = {"fp8_format": "hybrid", "fp8_min_features": 16}
BF16 = ("precision.dtype=bf16", "parallel.use_distributed_optimizer=true", "train.train_iters=100")


@cache
def plan_of_preset(name: str, world: int, *settings: str) -> LayoutPlan:
    host = load_plugins()
    with as_world(world):
        config = load_config(preset=name, overrides=[*BF16, "train.micro_batch_size=1", *settings], host=host).config
    return Planner(config, host, get_machine("h100")).plan(config, world)


@pytest.mark.slow
def test_mixtral_has_the_published_parameters_and_each_rank_its_experts() -> None:
    """46.7e9 parameters, 12.9e9 active (Jiang et al., Mixtral of Experts, 2024)."""
    plan = plan_of_preset("mixtral-8x7b", 64, f"parallel.{EP}=8", "train.global_batch_size=64")
    assert plan.parameters.total == pytest.approx(46.7e9, rel=1e-3)
    assert plan.parameters.active == pytest.approx(12.9e9, rel=2e-3)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert plan.parameters.experts == experts
    (row,) = plan.ranks
    own = plan.parameters.total - experts + experts // 8
    assert row.weights.parameters == own
    # bf16: weights and fp32 gradients of what a rank has; of remainders and moments, 1/64 of what all ranks have and
    # 1/8 of the experts that 8 ranks have.
    dense = plan.parameters.total - experts
    sharded = 10 * (dense / 64 + experts / 8 / 8)
    assert row.weights.total == pytest.approx(6 * own + sharded, rel=1e-4)


@pytest.mark.slow
def test_mixtral_sends_what_its_tokens_need() -> None:
    """Each of 4096 tokens goes to 2 experts and back, forward and backward: 4 times 2 rows of 4096 numbers in bf16 and
    twice 2 weights in fp32, in each of 32 layers."""
    plan = plan_of_preset("mixtral-8x7b", 8, f"parallel.{EP}=8", "data.seq_length=4096", "train.global_batch_size=8")
    (row,) = plan.ranks
    rows = 32 * 4096 * 2 * (4 * 4096 * 2 + 2 * 4)
    assert row.flow.bytes["ep", "all_to_all"] == rows


def test_only_the_chosen_experts_compute() -> None:
    """6 for each active weight of a product, and the causal half of the scores."""
    plan = plan_of_preset("mixtral-8x7b", 8, f"parallel.{EP}=8", "data.seq_length=4096", "train.global_batch_size=8")
    products = plan.parameters.active - 32000 * 4096
    assert plan.flops_per_token == pytest.approx(6 * products + 6 * 32 * 4096 * 4096, rel=1e-3)


@pytest.mark.slow
def test_deepseek_v3_is_planned_on_2048_ranks() -> None:
    """671e9 parameters and 11.5e9 of the layer that predicts further (DeepSeek-V3, 2024)."""
    plan = plan_of_preset(
        "deepseek-v3",
        2048,
        f"parallel.{EP}=64",
        "parallel.pipeline_model_parallel_size=16",
        "train.global_batch_size=15360",
        "recompute.recompute_granularity=full",
    )
    assert plan.parameters.total == pytest.approx(682.6e9, rel=1e-3)
    assert sum(row.count for row in plan.ranks) == 2048
    assert {"ep", "dp", "edp", "pp"} <= {axis for axis, _ in plan.largest.flow.bytes}


@pytest.mark.slow
def test_qwen3_30b_is_planned() -> None:
    plan = plan_of_preset("qwen3-30b-a3b", 32, f"parallel.{EP}=32", "train.global_batch_size=32")
    assert plan.parameters.total == pytest.approx(30.5e9, rel=2e-3)
    assert plan.parameters.active == pytest.approx(3.3e9, rel=2e-2)
    (row,) = plan.ranks
    assert {"router", "permuted_tokens", "experts"} <= set(row.activations)


@pytest.mark.slow
def test_flops_of_a_token_do_not_depend_on_the_layout() -> None:
    one = planned(tree(MOE), 1).flops_per_token
    assert planned(tree(MOE, parallel={EP: 2, TP: 2}), 4).flops_per_token == one


def test_a_rank_that_all_tokens_choose_keeps_the_tokens_of_all() -> None:
    """All tokens of both ranks choose the experts 0 and 1: the rank that has them keeps twice the rows."""
    values = tree(MOE, parallel={EP: 2})
    (row,) = planned(values, 2).ranks
    assert row.imbalanced_activations is not None
    of_rows = row.activations["permuted_tokens"] + row.activations["experts"]
    # All that experts keep follows their rows.
    assert row.imbalanced_activations - row.activation_bytes == of_rows
    assert planned(tree(), 1).ranks[0].imbalanced_activations is None


@pytest.mark.parametrize(
    "option", [{"moe_permute_fusion": True}, {"moe_grouped_gemm": "triton"}, {"moe_router_random_seed": 3}]
)
def test_kernels_that_need_a_device_are_planned_without_one(option: dict[str, object]) -> None:
    plain = planned(tree(MOE), 1).ranks[0]
    other = planned(tree({**MOE, "moe": {**MOE["moe"], **option}}), 1).ranks[0]
    assert other.activations == plain.activations


@pytest.mark.slow
def test_tokens_that_a_product_gathers_are_not_kept_as_rows() -> None:
    """On a GPU, by default: 64 tokens of 32 numbers in fp32, with 2 rows of each in each of 4 layers. The tokens are
    kept by the router too."""

    def kept(product: str, fusion: bool | None, dtype: str = "fp32", machine: str = "h100", **fp8: object) -> float:
        experts = {**EXPERTS, "moe_grouped_gemm": product, "moe_permute_fusion": fusion}
        values = tree({**MOE, "moe": experts}, precision={"dtype": dtype, **fp8})
        values["train"]["device"] = "cuda"
        return planned(values, 1, machine).ranks[0].activation_bytes

    rows = kept("triton", False)
    assert kept("grouped", None) == rows
    assert rows - kept("triton", None) == rows - kept("auto", None) == 4 * 64 * 2 * 32 * 4
    # In bf16 the router keeps a copy in fp32, so that the product keeps the tokens: one row less of each.
    for machine in ("h100", "a100"):
        assert kept("grouped", None, "bf16", machine) - kept("auto", None, "bf16", machine) == 4 * 64 * 32 * 2
    # The products in FP8 do not permute.
    assert kept("auto", None, "bf16", **FP8) == kept("grouped", None, "bf16", **FP8)


@pytest.mark.slow
def test_room_for_a_ranks_rows_is_kept_whatever_the_load() -> None:
    """Room for 1.5 times the mean; with exact sizes the mean, and twice of it where all tokens choose one rank."""
    rows = []
    for own in ({}, {"static_shape": True, "expert_rank_capacity_factor": 1.5}):
        experts = {**EXPERTS, "moe_dispatcher_options": own}
        rows.append(planned(tree({**MOE, "moe": experts}, parallel={EP: 2}), 2).ranks[0])
    exact, bounded = (row.activations["experts"] for row in rows)
    assert bounded == 1.5 * exact
    assert rows[1].imbalanced_activations == rows[1].activation_bytes


@pytest.mark.slow
def test_a_search_proposes_how_to_divide_experts_and_says_why() -> None:
    machine = get_machine("h100")
    planner = QuickPlanner(built(tree({**MOE, "num_layers": 1}), 1), load_plugins(), machine)
    found = search(planner, 4, 1.0)
    tried = {tuple(one.choice["parallel"][axis] for axis in (EP, ETP)) for one in found.candidates}
    assert {(2, 1), (4, 1)} <= tried
    values = search_values(found, machine, 3)
    assert values["experts_because"]
    assert all(reason.startswith("expert parallel ") for reason in values["experts_because"])


def test_choices_are_dealt_and_counted() -> None:
    scores = torch.empty(6, 4, device="meta")
    with RoutedTokens(assign_round_robin):
        chosen = scores.topk(2).indices
        assert chosen.tolist() == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [2, 3]]
        assert chosen.flatten().bincount(minlength=4).tolist() == [3, 3, 3, 3]
        rows = torch.empty(6, 8, device="meta", requires_grad=True)[chosen.flatten() // 2]
        assert (rows.device.type, rows.shape) == ("meta", (12, 8))
    with RoutedTokens(assign_to_few):
        assert scores.topk(2).indices.unique().tolist() == [0, 1]


def test_a_group_gives_what_ranks_alike_would() -> None:
    group, own = RecordingGroup("ep", 3, Ledger(), rank=1), torch.tensor([1, 2, 3, 4, 5, 6])
    gathered, exchanged = torch.zeros(18, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    group.all_gather_single(gathered, own)
    assert gathered.tolist() == [*own.tolist()] * 3
    group.all_to_all_single(exchanged, own)
    assert exchanged.tolist() == [3, 4] * 3
    group.all_to_all_single(exchanged, own, [2, 2, 2], [1, 2, 3])
    assert exchanged.tolist() == [2, 3] * 3


def test_keys_that_an_indexer_chooses_have_no_values() -> None:
    """Experts' numbers decide sizes, those of keys do not: [1, S, topk] of them would be computed and spread."""
    with RoutedTokens(assign_round_robin):
        experts, keys = torch.empty(2, 512, device="meta").topk(8), torch.empty(2, 4096, device="meta").topk(2048)
    assert experts.indices.device.type == "cpu"
    assert (keys.indices.device.type, keys.indices.shape) == ("meta", (2, 2048))
