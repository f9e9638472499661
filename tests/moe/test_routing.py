"""Scores, choice, weights, capacity and balance losses against formulas written out here, in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from tests.moe.moe_cases import EXPERTS, HIDDEN, fp64, options, tokens_of
from torch import Tensor

from mt_core.errors import TrainingError
from mt_core.nn.auxiliary import PostStepHook, ReportsMetrics
from mt_core.parallel.context import ParallelContext
from mt_moe.routing.balance import Load
from mt_moe.routing.router import Router
from mt_moe.routing.selection import (
    choose_experts,
    deal_in_turn,
    distribution,
    draw_at_random,
    expert_capacity,
    expert_weights,
    keep_within,
    log_scores,
    sinkhorn,
)
from mt_moe.tokens import share_tokens

FUNCTIONS = {
    "softmax": lambda z: z.exp() / z.exp().sum(-1, keepdim=True),
    "sigmoid": lambda z: 1 / (1 + (-z).exp()),
    "sqrtsoftplus": lambda z: (1 + z.exp()).log().sqrt(),
}


def logits_of(tokens: int, experts: int = EXPERTS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(tokens, experts, dtype=torch.float64, generator=generator)


def router_of(config, ctx: ParallelContext | None = None, *, bias: bool = False) -> Router:
    ctx = ctx or fp64()
    router = Router(config, HIDDEN, 3, ctx, init_std=0.5, bias=bias)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator))
        for name in ("bias", "expert_bias"):
            if getattr(router, name) is not None:
                getattr(router, name).copy_(torch.linspace(-1, 1, EXPERTS))
    return router


@pytest.mark.parametrize("function", FUNCTIONS)
def test_scores_are_their_formulas(function) -> None:
    z = logits_of(20)
    torch.testing.assert_close(log_scores(z, function).exp(), FUNCTIONS[function](z), rtol=1e-12, atol=1e-14)
    scores = FUNCTIONS[function](z)
    torch.testing.assert_close(distribution(z, function), scores / scores.sum(-1, keepdim=True), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_scores_that_vanish_keep_their_shares_and_gradients(function) -> None:
    """All scores below what fp32 holds: no epsilon takes the balance loss away."""
    z = (torch.tensor([[0.0, 1.0, 2.0]]) - 300.0).requires_grad_()
    shares = distribution(z, function)
    expected = {
        "softmax": [1, math.e, math.e**2],
        "sigmoid": [1, math.e, math.e**2],
        "sqrtsoftplus": [1, math.e**0.5, math.e],
    }
    wanted = torch.tensor([expected[function]])
    torch.testing.assert_close(shares, wanted / wanted.sum(), rtol=1e-4, atol=1e-6)
    (gradient,) = torch.autograd.grad(shares[0, 0], z)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0.05


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("pre_softmax", [False, True])
def test_weights_are_their_formulas(function, pre_softmax) -> None:
    z = logits_of(20)
    experts = choose_experts(z, options(moe_router_score_function=function, moe_router_topk=3), None)
    assert torch.equal(experts, z.topk(3).indices)  # every score grows with its logit
    chosen = FUNCTIONS[function](z).gather(1, experts)
    if not (function == "softmax" and pre_softmax):
        chosen = chosen / chosen.sum(-1, keepdim=True)
    torch.testing.assert_close(expert_weights(z, experts, function, pre_softmax), chosen, rtol=1e-11, atol=1e-13)


def test_one_expert_a_token_has_its_own_score_as_weight() -> None:
    z = logits_of(5)
    experts = z.topk(1).indices
    torch.testing.assert_close(expert_weights(z, experts, "sigmoid", False), z.gather(1, experts).sigmoid())


@pytest.mark.parametrize("score_topk", [1, 2])
def test_groups_are_chosen_by_their_best_scores(score_topk) -> None:
    config = options(
        moe_router_score_function="sigmoid",
        moe_router_topk=3,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_group_score_topk=score_topk,
    )
    z, bias = logits_of(50), torch.linspace(-0.4, 0.4, EXPERTS, dtype=torch.float64)
    found = choose_experts(z, config, bias)
    for row, experts in zip(z, found, strict=True):
        scores = row.sigmoid() + bias
        groups = [sorted(scores[2 * g : 2 * g + 2].tolist(), reverse=True) for g in range(4)]
        best = sorted(range(4), key=lambda g: -sum(groups[g][:score_topk]))[:2]
        allowed = [e for e in range(EXPERTS) if e // 2 in best]
        assert experts.tolist() == sorted(allowed, key=lambda e: -scores[e])[:3]


@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize("score_topk", [None, 1])
def test_groups_of_softmax_scores_are_ranked_as_megatron_core_ranks_them(pre_softmax, score_topk) -> None:
    """`topk_routing_with_score_function`: by logits with the softmax after top-k, by probabilities with it before."""
    keys = {"moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
    config = options(**keys, moe_router_pre_softmax=pre_softmax, moe_router_group_score_topk=score_topk)
    z = logits_of(200)
    ranked = z.softmax(-1) if pre_softmax else z
    grouped = ranked.view(len(z), 4, 2)
    group_scores = grouped.amax(-1) if score_topk == 1 else grouped.sum(-1)
    groups = group_scores.topk(2).indices
    allowed = torch.stack([(torch.arange(EXPERTS) // 2 == group[:, None]) for group in groups.T]).any(0)
    expected = ranked.masked_fill(~allowed, -math.inf).topk(4)
    found = choose_experts(z, config, None)
    assert torch.equal(found, expected.indices)
    weights = expected.values if pre_softmax else expected.values.softmax(-1)
    torch.testing.assert_close(expert_weights(z, found, "softmax", pre_softmax), weights)


@pytest.mark.parametrize("function", ["sigmoid", "sqrtsoftplus"])
def test_weights_of_vanishing_scores_are_normalized_with_an_epsilon(function) -> None:
    """DeepSeek-V3 and Megatron-Core divide by the sum of the chosen scores plus 1e-20."""
    z = torch.tensor([[-40.0, -45.0, -50.0], [-46.0, -47.0, -48.0], [-100.0, -90.0, -95.0]], dtype=torch.float64)
    z = z if function == "sigmoid" else 2 * z
    experts = z.topk(2).indices
    chosen = FUNCTIONS[function](z).gather(1, experts) if function == "sigmoid" else (z / 2).exp().gather(1, experts)
    expected = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    assert expected[1].sum() < 0.7
    torch.testing.assert_close(expert_weights(z, experts, function, False), expected, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_a_bias_is_added_to_probabilities_and_their_sum_is_not_too_small_to_divide_by(pre_softmax) -> None:
    """As ERNIE 4.5 has it: the last token's choice has probabilities that add up to less than 1e-12."""
    z = torch.cat([logits_of(20), torch.tensor([[0.0] * 2 + [-40.0] * (EXPERTS - 2)], dtype=torch.float64)])
    bias = torch.cat([-torch.ones(2), torch.linspace(0, 1, EXPERTS - 2)]).double()
    config = options(moe_router_topk=3, moe_router_enable_expert_bias=True, moe_router_pre_softmax=pre_softmax)
    experts = choose_experts(z, config, bias)
    assert torch.equal(experts, (z.softmax(-1) + bias).topk(3).indices)
    assert not torch.equal(experts, (z + bias).topk(3).indices)
    chosen = z.softmax(-1).gather(1, experts)
    expected = chosen if pre_softmax else chosen / chosen.sum(-1, keepdim=True).clamp(min=1e-12)
    assert chosen[-1].sum() < 1e-12
    found = expert_weights(z, experts, "softmax", pre_softmax, biased=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0.0)


def test_another_epsilon_is_added_to_the_sum_of_scores() -> None:
    z = torch.tensor([[-10.0, -12.0, -15.0]], dtype=torch.float64)
    experts = torch.tensor([[0, 1]])
    chosen = z[:, :2].sigmoid()
    found = expert_weights(z, experts, "sigmoid", False, epsilon=1e-4)
    torch.testing.assert_close(found, chosen / (chosen.sum() + 1e-4))


def test_a_matrix_in_fp32_stays_so_beside_others_in_bf16() -> None:
    ctx = ParallelContext(params_dtype=torch.bfloat16)
    kept = router_of(options(moe_router_weight_in_fp32=True), ctx)
    assert (kept.weight.dtype, router_of(options(), ctx).weight.dtype) == (torch.float32, torch.bfloat16)
    assert kept.logits(torch.ones(1, HIDDEN, dtype=torch.bfloat16)).dtype == torch.float32


def test_the_expert_bias_has_a_part_in_the_choice_and_none_in_the_weights() -> None:
    config = options(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    router, share = router_of(config), share_tokens(tokens_of(2, 6), fp64())
    routing = router(share)
    scores = (share.tokens @ router.weight.T).sigmoid()
    chosen = (scores + torch.linspace(-1, 1, EXPERTS)).topk(2).indices
    assert torch.equal(routing.experts, chosen)
    assert not torch.equal(chosen, scores.topk(2).indices)
    weights = scores.gather(1, chosen)
    torch.testing.assert_close(routing.weights, weights / weights.sum(-1, keepdim=True))


def test_logits_have_the_trained_bias_and_weights_the_scaling_factor() -> None:
    config = options(moe_router_topk_scaling_factor=2.5)
    router, share = router_of(config, bias=True), share_tokens(tokens_of(1, 6), fp64())
    z = share.tokens @ router.weight.T + torch.linspace(-1, 1, EXPERTS)
    torch.testing.assert_close(router(share).weights, 2.5 * z.topk(2).values.softmax(-1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("asked", "params", "logits"), [("fp32", "bfloat16", "float32"), ("fp64", "bfloat16", "float64")]
)
def test_the_router_computes_in_its_own_number_format(asked, params, logits) -> None:
    ctx = ParallelContext(params_dtype=getattr(torch, params))
    router = router_of(options(moe_router_dtype=asked), ctx)
    assert router.logits(tokens_of(1, 4, ctx.params_dtype)[0]).dtype == getattr(torch, logits)


def test_jitter_multiplies_the_input_in_training_only() -> None:
    router = router_of(options(moe_input_jitter_eps=0.1))
    share = share_tokens(torch.ones(1, 200, HIDDEN, dtype=torch.float64), fp64())
    noisy = router.jitter(share)
    assert 0.9 <= noisy.min() < 0.92
    assert 1.08 < noisy.max() <= 1.1
    assert router.eval().jitter(share) is share.tokens


def test_forced_balance_and_random_experts_ignore_the_scores() -> None:
    dealt = deal_in_turn(logits_of(12), 2)
    assert dealt.flatten().bincount(minlength=EXPERTS).tolist() == [3] * EXPERTS
    drawn = draw_at_random(logits_of(64), 3, 5)
    assert torch.equal(drawn, draw_at_random(logits_of(64, seed=9), 3, 5))
    assert not torch.equal(drawn, draw_at_random(logits_of(64), 3, 6))
    assert all(len(set(row)) == 3 for row in drawn.tolist())
    for keys, expected in (({"moe_router_force_load_balancing": True}, deal_in_turn(logits_of(6), 2)),
                           ({"moe_router_random_seed": 5}, draw_at_random(logits_of(6), 2, 5))):  # fmt: skip
        router, share = router_of(options(**keys)), share_tokens(tokens_of(1, 6), fp64())
        routing = router(share)
        assert torch.equal(routing.experts, expected)
        (gradient,) = torch.autograd.grad(routing.weights.square().sum(), router.weight)
        assert gradient.abs().max() > 0


def test_sinkhorn_evens_out_rows_and_columns() -> None:
    z = logits_of(40) + torch.linspace(0, 8, EXPERTS)  # all tokens like the last experts best
    plan = sinkhorn(z, 40, lambda x: x)
    torch.testing.assert_close(plan.sum(0), torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64), rtol=1e-3, atol=0)
    torch.testing.assert_close(plan.sum(1), torch.full((40,), 1 / 40, dtype=torch.float64), rtol=2e-2, atol=0)
    ratio = plan.log() - z  # = log row factor + log column factor: of rank one
    torch.testing.assert_close(ratio[:1] + ratio[1:, :1] - ratio[:1, :1], ratio[1:], rtol=1e-6, atol=1e-6)
    chosen = plan.argmax(1).bincount(minlength=EXPERTS)
    assert chosen.max() < z.argmax(1).bincount(minlength=EXPERTS).max()
    assert sinkhorn(z + 1000, 40, lambda x: x).isfinite().all()


def test_sinkhorn_is_for_training_and_weights_are_softmax() -> None:
    config = options(moe_router_load_balancing_type=["sinkhorn"])
    router, share = router_of(config), share_tokens(tokens_of(1, 12), fp64())
    z = router.logits(share.tokens)
    routing = router.eval()(share)
    assert torch.equal(routing.experts, z.topk(2).indices)
    torch.testing.assert_close(routing.weights, z.softmax(-1).topk(2).values)
    assert not torch.equal(router.train()(share).experts, routing.experts)


# -- capacity ---------------------------------------------------------------------------------------


def test_capacity_is_megatrons() -> None:
    assert expert_capacity(10, 2, 8, 1.0) == 3  # ceil(2.5)
    assert expert_capacity(16, 2, 8, 1.25) == 5
    assert expert_capacity(0, 2, 8, 1.0) == 0


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_each_expert_keeps_its_best_or_first_tokens(policy) -> None:
    z = logits_of(60)
    weights, experts = z.softmax(-1).topk(2)
    kept = keep_within(experts, weights, EXPERTS, 9, policy)
    for expert in range(EXPERTS):
        wishes = [(t, j) for t, row in enumerate(experts.tolist()) for j, e in enumerate(row) if e == expert]
        if policy == "probs":
            wishes.sort(key=lambda wish: -weights[wish])
        assert {wish for wish in wishes if kept[wish]} == set(wishes[:9])
    assert 0 < int((~kept).sum()) < kept.numel()


# -- balance losses ---------------------------------------------------------------------------------


def closed_form(probabilities: Tensor, experts: Tensor) -> Tensor:
    """E / (k T^2) sum_e c_e sum_t p_te"""
    tokens, k = experts.shape
    counts = torch.zeros(EXPERTS, dtype=torch.float64)
    for e in experts.flatten().tolist():
        counts[e] += 1
    return EXPERTS / (k * tokens**2) * (counts * probabilities.sum(0)).sum()


def reported(router: Router, x: Tensor) -> tuple[dict[str, float], Tensor]:
    """Values of the losses, and the router's gradient of their sum."""
    share = share_tokens(x.requires_grad_(), fp64())
    (0.0 * router(share).weights.sum()).backward()
    return {name: loss.take() for name, loss in router.losses.attached.items()}, router.weight.grad


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_balance_losses_are_their_closed_forms(function, coefficient) -> None:
    config = options(
        moe_router_score_function=function,
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"],
        moe_aux_loss_coeff=[coefficient, 2 * coefficient, 3 * coefficient],
        moe_z_loss_coeff=4 * coefficient,
    )
    router, x = router_of(config), tokens_of(3, 5)
    values, gradient = reported(router, x)
    weight = router.weight.detach().clone().requires_grad_()
    z = x.detach().flatten(0, 1) @ weight.T
    scores = FUNCTIONS[function](z)
    p, experts = scores / scores.sum(-1, keepdim=True), z.topk(2).indices
    whole = closed_form(p, experts)
    expected = {
        "aux_loss": coefficient * whole,
        "seq_aux_loss": 2 * coefficient * sum(map(closed_form, p.split(5), experts.split(5))) / 3,
        "global_aux_loss": 3 * coefficient * whole,  # one micro-batch on one rank
        "z_loss": 4 * coefficient * (z.exp().sum(-1).log() ** 2).mean(),
    }
    assert values == pytest.approx({name: float(value.detach()) for name, value in expected.items()}, rel=1e-6)
    (wanted,) = torch.autograd.grad(sum(expected.values()), weight)
    torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-10)
    assert (wanted.abs().max() > 0) == (coefficient > 0)


def test_an_even_load_has_balance_one_and_a_single_expert_the_most() -> None:
    config = options(moe_aux_loss_coeff=[1.0])
    router = router_of(config)
    with torch.no_grad():
        router.weight.zero_()
    values, _ = reported(router, tokens_of(1, 8))
    assert values["aux_loss"] == pytest.approx(1.0)
    with torch.no_grad():
        router.weight[:2] = 1000.0
    values, _ = reported(router, tokens_of(1, 8).abs())
    assert values["aux_loss"] == pytest.approx(EXPERTS / 2)


def test_the_loss_sees_the_natural_choice_behind_bias_and_groups() -> None:
    """Counting biased choices would hide from the loss what the bias holds back."""
    keys = {"moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": [1.0]}
    plain, x = router_of(options(**keys)), tokens_of(2, 8)
    biased = router_of(options(**keys, moe_router_enable_expert_bias=True))
    grouped = router_of(
        options(**keys, moe_router_num_groups=4, moe_router_group_topk=1, moe_router_group_score_topk=1)
    )
    assert reported(biased, x)[0] == reported(plain, x)[0] == reported(grouped, x)[0]


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_the_sequence_loss_is_the_same_in_any_number_of_micro_batches(pieces) -> None:
    config = options(moe_router_load_balancing_type=["seq_aux_loss", "global_aux_loss"], moe_aux_loss_coeff=[1.0, 1.0])
    x = tokens_of(4, 6)
    expected, expected_gradient = reported(only(router_of(config), "seq_aux_loss"), x)
    router = only(router_of(config), "seq_aux_loss")
    router.losses.attached["seq_aux_loss"].scale = 1 / pieces
    total = 0.0
    for piece in x.detach().chunk(pieces):
        values, gradient = reported(router, piece)
        total += values["seq_aux_loss"] / pieces
    assert total == pytest.approx(expected["seq_aux_loss"], rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient)


def only(router: Router, name: str) -> Router:
    router.losses.coefficients = {name: 1.0}
    return router


def test_the_global_loss_counts_the_steps_micro_batches_so_far() -> None:
    config = options(moe_router_load_balancing_type=["global_aux_loss"], moe_aux_loss_coeff=[1.0])
    router, (first, second) = router_of(config), tokens_of(2, 6).split(1)
    reported(router, first.clone())
    values, _ = reported(router, second.clone())
    z = torch.cat([first, second], 1)[0] @ router.weight.detach().T
    frequencies = z.topk(2).indices.flatten().bincount(minlength=EXPERTS) / (2 * 12)
    expected = EXPERTS * (frequencies * z[6:].softmax(-1).mean(0)).sum()
    assert values["global_aux_loss"] == pytest.approx(float(expected), rel=1e-6)
    router.losses.losses["global_aux_loss"].after_step()
    fresh, _ = reported(router_of(config), second.clone())
    assert reported(router, second.clone())[0] == fresh


def test_no_loss_is_computed_in_an_evaluation() -> None:
    router, share = router_of(options(moe_aux_loss_coeff=[1.0])), share_tokens(tokens_of(1, 6), fp64())
    router.eval()(share)
    with torch.no_grad():
        router.train()(share)
    assert router.losses.attached["aux_loss"].take() == 0.0
    router.after_step()
    assert router.load is not None
    assert router.load.tokens.sum() == 0


# -- load -------------------------------------------------------------------------------------------


def test_the_bias_moves_towards_an_even_load() -> None:
    config = options(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25
    )
    router, x = router_of(config), tokens_of(2, 8)
    before = router.expert_bias.clone()
    experts = router(share_tokens(x, fp64())).experts
    reported(router, x)
    router.after_step()
    counts = experts.flatten().bincount(minlength=EXPERTS).float()
    torch.testing.assert_close(router.expert_bias - before, 0.25 * (counts.mean() - counts).sign())
    assert not router.expert_bias.requires_grad
    assert router.expert_bias.dtype == torch.float32


def test_a_recomputed_forward_counts_once() -> None:
    from torch.utils.checkpoint import checkpoint

    router, x = router_of(options()), tokens_of(1, 6).requires_grad_()
    checkpoint(lambda x: router(share_tokens(x, fp64())).weights, x, use_reentrant=False).sum().backward()
    router.after_step()
    assert router.load is not None
    assert router.load.tokens.sum() == 12


def test_numbers_to_watch() -> None:
    load = Load(torch.tensor([6.0, 2.0, 0.0, 0.0, 4.0], dtype=torch.float64))
    assert load.max_over_mean == 3.0
    assert load.entropy == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4))
    assert load.dead_experts == 2
    assert load.dropped_share == 0.5
    even = Load(torch.tensor([5.0, 5.0, 5.0, 5.0, 0.0], dtype=torch.float64))
    assert (even.max_over_mean, even.entropy) == (1.0, pytest.approx(1.0))
    nothing = Load(torch.zeros(5, dtype=torch.float64))
    assert (nothing.max_over_mean, nothing.entropy, nothing.dead_experts) == (0.0, 0.0, 4)


def test_metrics_name_the_layer_and_the_trainer_finds_them() -> None:
    config = options(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_expert_capacity_factor=0.5
    )
    router = router_of(config)
    assert isinstance(router, PostStepHook)
    assert isinstance(router, ReportsMetrics)
    assert router.metrics() == {}
    reported(router, tokens_of(2, 8))
    router.after_step()
    found = router.metrics()
    assert set(found) == {
        f"moe/layer_3/{name}"
        for name in (
            "load_max_over_mean", "load_entropy", "dead_experts", "dropped_share", "expert_bias_min", "expert_bias_max",
        )
    }  # fmt: skip
    assert found["moe/layer_3/dropped_share"] >= 0.5
    assert found["moe/layer_3/expert_bias_max"] == pytest.approx(1.0, abs=2e-3)


def test_logits_that_are_not_finite_are_named() -> None:
    router, x = router_of(options()), tokens_of(1, 6)
    x[0, 4, 2] = torch.nan
    with pytest.raises(TrainingError, match=r"layers\.3\.mlp\.router: the logits of 1 of 6 tokens .*first: token 4"):
        router(share_tokens(x, fp64()))
