"""`model.moe`: what is accepted, what is refused and in which words; placement; building through the plugin host."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError, PluginError
from mt_core.nn.feed_forward import DenseFeedForward
from mt_core.parallel.context import Axis, ParallelContext
from mt_moe.config import MoeConfig
from mt_moe.layer import MoeLayer, build_dispatcher, capture_objection, overlapping_dispatcher

TINY = [
    "model.num_layers=4",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.ffn_hidden_size=24",
    "model.vocab_size=32",
    "model.num_query_groups=2",
    "data.seq_length=16",
    "train.train_iters=1",
]


def load(host, moe: str, *overrides: str):
    return load_config(preset="llama3.2-1b", overrides=[*TINY, f"model.moe={{{moe}}}", *overrides], host=host).config


def build(host, moe: str, *overrides: str) -> torch.nn.Module:
    from mt_core.train.build import build_model

    return build_model(load(host, moe, *overrides), ParallelContext(), host)


PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
REFUSED = [
    (
        "num_experts=4, moe_dispatcher_options={expert_rank_capacity_factor = 1.5}",
        r"expert_rank_capacity_factor would be ignored: .*; set model\.moe\.moe_dispatcher_options\.static_shape=true",
    ),
    (
        "num_experts=4, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=true, "
        "moe_dispatcher_options={static_shape = true, expert_rank_capacity_factor = 1.5}",
        r"expert_rank_capacity_factor would be ignored: .*; leave one of the two out",
    ),
    (
        "num_experts=4, moe_dispatcher_options={static_shape = true, expert_rank_capacity_factor = 1.5}",
        r"expert_rank_capacity_factor would be ignored: .*expert_model_parallel_size=1",
    ),
    (
        'num_experts=4, moe_router_load_balancing_type=["none"], moe_aux_loss_score_function="softmax"',
        r"moe_aux_loss_score_function=softmax would be ignored: .*=\['none'\] has no loss; leave it out",
    ),
    ("num_expert=4", r"unknown key model\.moe\.num_expert \(from \[model\.moe\]\) \(did you mean \"num_experts\"\?\)"),
    ("", r"model\.moe\.num_experts is missing"),
    ("num_experts=4.5", r"model\.moe\.num_experts .*got 4\.5, expected an integer"),
    ("num_experts=4, moe_router_topk=5", r"moe_router_topk=5 is above model\.moe\.num_experts=4; .* 1 to 4"),
    ("num_experts=4, moe_router_topk=1", r"weight 1 and the router no gradient; set .*moe_router_pre_softmax"),
    ("num_experts=8, moe_router_num_groups=3, moe_router_group_topk=2", r"num_groups=3 does not divide .*1, 2, 4 or 8"),
    ("num_experts=8, moe_router_num_groups=4", r"num_groups is set; set model\.moe\.moe_router_group_topk too"),
    ("num_experts=8, moe_router_num_groups=4, moe_router_group_topk=5", r"group_topk=5 is above .*groups=4; .*1 to 4"),
    (
        "num_experts=8, moe_router_topk=3, moe_router_num_groups=4, moe_router_group_topk=1",
        r"moe_router_topk=3 is above the 2 experts of model\.moe\.moe_router_group_topk=1 groups of 2",
    ),
    (
        "num_experts=8, moe_router_topk=2, moe_router_num_groups=4, moe_router_group_topk=3",
        r"moe_router_group_score_topk=0 .*can be 1 to 2",
    ),
    (
        "num_experts=4, moe_router_weight_epsilon=1e-6",
        r"only counts when model\.moe\.moe_router_score_function is sigmoid or sqrtsoftplus, and that is softmax",
    ),
    ("num_experts=4, moe_router_bias_update_rate=0.5", r"only counts when .*enable_expert_bias is True"),
    (
        'num_experts=4, moe_router_score_function="sigmoid", moe_router_pre_softmax=true',
        r"only counts when model\.moe\.moe_router_score_function is softmax, and that is sigmoid",
    ),
    ('num_experts=4, moe_router_score_function="cosine"', r"got 'cosine'.*'softmax', 'sigmoid' or 'sqrtsoftplus'"),
    ('num_experts=4, moe_router_load_balancing_type=["none", "aux_loss"]', r"none stands alone"),
    ('num_experts=4, moe_router_load_balancing_type=["aux_loss", "aux_loss"]', r"names a type twice"),
    ('num_experts=4, moe_router_load_balancing_type="aux_loss"', r"got 'aux_loss', expected a list"),
    ("num_experts=4, moe_aux_loss_coeff=[0.1, 0.2]", r"has 2 values, and .* has 1 losses"),
    ('num_experts=4, moe_router_load_balancing_type=["none"], moe_aux_loss_coeff=[0.1]', r"has 1 values, .* 0 losses"),
    (
        'num_experts=4, moe_router_load_balancing_type=["sinkhorn"], moe_expert_capacity_factor=1.0',
        r"'sinkhorn'\] chooses experts by itself and excludes model\.moe\.moe_expert_capacity_factor",
    ),
    ("num_experts=4, moe_pad_expert_input_to_capacity=true", r"nothing is dropped; set .*capacity_factor"),
    ('num_experts=4, moe_token_drop_policy="position"', r"nothing is dropped; set .*capacity_factor"),
    ("num_experts=4, moe_shared_expert_gate=true", r"no shared expert; set .*intermediate_size"),
    ("num_experts=4, moe_input_jitter_eps=1.5", r"moe_input_jitter_eps=1\.5 has to be below 1"),
    ("num_experts=4, moe_router_random_seed=1, moe_router_force_load_balancing=true", r"at most one of"),
    ('num_experts=4, moe_token_dispatcher_type="flex"', r"flex needs DeepEP .*not installed; use alltoall"),
    ('num_experts=4, moe_layer_freq="[1]*3"', r"has 3 entries; it needs one for each of the model\.num_layers=4"),
    ("num_experts=4, moe_layer_freq=[0, 1]", r"has 2 entries; it needs one for each of the model\.num_layers=4"),
    ("num_experts=4, moe_layer_freq=[0, 1, 1, 2]", r"has the entry 2; entries are 0 and 1"),
    ('num_experts=4, moe_layer_freq="__import__(1)"', r"has '_', which is no part of a pattern"),
]  # fmt: skip


@pytest.mark.parametrize(("moe", "words"), REFUSED, ids=[moe for moe, _ in REFUSED])
def test_what_cannot_be_is_refused_before_anything_is_built(host, moe, words) -> None:
    with pytest.raises(ConfigError, match=words):
        load(host, moe)


def test_experts_have_to_divide_over_their_ranks(host, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"expert_model_parallel_size=4 does not divide .*num_experts=6; .*1, 2, 3"):
        load(host, "num_experts=6", "parallel.expert_model_parallel_size=4")
    with pytest.raises(ConfigError, match=r"expert_tensor_parallel_size=4 does not divide .*width 6 .*1, 2, 3 or 6"):
        load(host, "num_experts=4, moe_ffn_hidden_size=6", "parallel.expert_tensor_parallel_size=4")


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_static_shapes_need_equally_many_tokens_on_every_rank(host, monkeypatch, dispatcher) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    moe = f'num_experts=4, moe_token_dispatcher_type="{dispatcher}", moe_dispatcher_options={{static_shape=true}}'
    tensor, experts = "parallel.tensor_model_parallel_size=2", "parallel.expert_model_parallel_size=2"
    sizes = [tensor, experts, "parallel.expert_tensor_parallel_size=1", "train.micro_batch_size=1"]
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size=2 does not divide the 33 .*leave static_shape"):
        load(host, moe, *sizes, "data.seq_length=33")
    load(host, moe, *sizes, "data.seq_length=33", "train.micro_batch_size=2", "train.global_batch_size=2")


def test_a_dispatcher_that_nobody_registers_is_named(host) -> None:
    with pytest.raises(PluginError, match=r"moe_token_dispatcher_type.*alltoal.*did you mean \"alltoall\""):
        build(host, 'num_experts=4, moe_token_dispatcher_type="alltoal"')


def test_options_of_a_dispatcher_are_its_own(host) -> None:
    with pytest.raises(ConfigError, match=r"unknown key model\.moe\.moe_dispatcher_options\.fast"):
        build(host, "num_experts=4, moe_dispatcher_options={fast = true}")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("moe_permute_fusion=true", r"moe_permute_fusion=true: Triton kernels need a GPU, and the device is cpu"),
        ('moe_grouped_gemm="triton"', r"moe_grouped_gemm=triton cannot serve: .*use auto or loop"),
        ('moe_grouped_gemm="grouped", moe_ffn_hidden_size=18', r"multiples of 4, and one is 18; use auto or loop"),
    ],
)
def test_what_a_device_cannot_do_stops_the_run(host, monkeypatch, keys, words) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=words):
        build(host, f"num_experts=4, {keys}")


def test_a_dispatcher_that_cannot_overlap_says_so() -> None:
    class Plain:
        def dispatch(self, tokens, routing): ...
        def combine(self, expert_output, state): ...

    keys = {"num_experts": 4, "moe_shared_expert_intermediate_size": 8, "moe_token_dispatcher_type": "plain"}
    words = "the dispatcher plain does not let other work be done"
    with pytest.raises(ConfigError, match=words):
        overlapping_dispatcher(Plain(), MoeConfig(**keys, moe_shared_expert_overlap=True), ParallelContext())
    assert overlapping_dispatcher(Plain(), MoeConfig(**keys), ParallelContext()) is None


@pytest.mark.parametrize(
    ("keys", "ranks", "words"),
    [
        ({}, 1, None),
        ({"moe_expert_capacity_factor": 1.0}, 1, None),
        ({"moe_router_random_seed": 3}, 1, "chooses experts through the host"),
        ({"moe_input_jitter_eps": 0.1}, 1, "moe_input_jitter_eps is seeded by the host"),
        ({}, 2, "alltoall reads how many rows other ranks send"),
        (PADDED, 2, "moe_dispatcher_options.static_shape=true"),
        ({"moe_dispatcher_options": {"static_shape": True}}, 2, None),
    ],
)
def test_what_makes_the_host_wait_cannot_be_captured(host, keys, ranks, words) -> None:
    config, alone = MoeConfig(num_experts=4, **keys), ParallelContext()
    several = ParallelContext(axes={"ep": Axis(ranks)})
    objection = capture_objection(config, None, build_dispatcher(config, alone, host), several)
    assert objection is None if words is None else words in objection


@pytest.mark.parametrize("freq", ['"([0]*1+[1]*3)"', "[0, 1, 1, 1]"])
def test_the_pattern_says_which_layers_have_experts(host, freq) -> None:
    model = build(host, f"num_experts=4, moe_layer_freq={freq}")
    kinds = [type(model.decoder.layers[number].mlp) for number in range(4)]
    assert kinds == [DenseFeedForward, MoeLayer, MoeLayer, MoeLayer]
    names = dict(model.named_parameters())
    assert names["decoder.layers.1.mlp.router.weight"].shape == (4, 16)
    assert names["decoder.layers.1.mlp.experts.linear_fc1.weight"].shape == (4, 48, 16)
    assert names["decoder.layers.1.mlp.experts.linear_fc2.weight"].shape == (4, 16, 24)


def test_every_key_has_its_help() -> None:
    assert all(field.description for field in MoeConfig.model_fields.values())


def test_checking_needs_no_torch() -> None:
    code = (
        "import sys, mt_moe.plugin, mt_moe.checks, mt_moe.plot, mt_moe.plot;"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
