"""Logits that are not finite where nobody looks at them: on a GPU, which would have to wait. What the step checks finds
them: its loss or its gradient norm. On a CPU the router looks (test_routing.py)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from tests.moe.moe_cases import EXPERTS, build_layer, fp64, options, tokens_of
from tests.moe.test_ranks import StandInBuffer
from torch import Tensor

from mt_core.config.loading import load_config
from mt_core.errors import TrainingError
from mt_core.nn.auxiliary import auxiliary_losses
from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.testing import run_ranks
from mt_core.train.trainer import Trainer
from mt_moe.dispatchers.flex import DeepEPDispatcher
from mt_moe.dispatchers.interface import expert_placement
from mt_moe.layer import MoeLayer
from mt_moe.permutation import RowKernels
from mt_moe.routing import router

MOE_MODELS = [
    {},
    {"moe_token_dispatcher_type": "allgather"},
    {"moe_router_pre_softmax": True},
    {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    {"moe_router_score_function": "sqrtsoftplus"},
    {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    {"moe_expert_capacity_factor": 0.5},
    {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True, "moe_token_drop_policy": "position"},
    {"moe_router_load_balancing_type": ["sinkhorn"]},
    {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"], "moe_z_loss_coeff": 0.1},
    {"moe_router_force_load_balancing": True},
]


@contextmanager
def unasked_router() -> Iterator[None]:
    with mock.patch.object(router, "require_finite"):
        yield


@pytest.fixture(autouse=True)
def unasked() -> Iterator[None]:
    with unasked_router():
        yield


def loss_and_norm(layer: MoeLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the step looks at. The gradient of x stands for those of the layers before."""
    x = x.requires_grad_()
    loss = layer(x).square().mean()
    loss.backward()
    gradients = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    layer.router.after_step()
    for auxiliary in auxiliary_losses(layer):
        auxiliary.take()
    return loss.detach(), torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])


@pytest.mark.parametrize("keys", MOE_MODELS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_loss_or_the_norm_shows_it(keys, bad) -> None:
    """Whether a token is bad, or a weight of the router."""
    layer, x = build_layer(options(**keys), fp64()), tokens_of(2, 6)
    assert all(value.isfinite() for value in loss_and_norm(layer, x.clone()))
    layer.zero_grad()
    bad_token = x.clone()
    bad_token[1, 4] = bad
    assert not all(value.isfinite() for value in loss_and_norm(layer, bad_token))
    layer.zero_grad()
    with torch.no_grad():
        layer.router.weight[3, 2] = bad
    assert not all(value.isfinite() for value in loss_and_norm(layer, x.clone()))


def with_a_bad_token(rank: int, world: int, dispatcher: str) -> tuple[bool, bool]:
    """Of rank 1, in its second sequence. Whether this rank's outputs are finite, and its gradients."""
    with unasked_router():
        ctx, x = build_parallel_context(AxisSizes(ep=world)), tokens_of(2, 6, torch.float32, seed=rank)
        name = "alltoall" if dispatcher == "flex" else dispatcher
        layer = build_layer(options(moe_token_dispatcher_type=name), ctx)
        if dispatcher == "flex":
            assert ctx.ep.group is not None
            placement = expert_placement(EXPERTS, ctx, RowKernels())
            layer.dispatcher = DeepEPDispatcher(placement, StandInBuffer(ctx.ep.group, EXPERTS))
        if rank == 1:
            x[1, 4] = math.nan
        loss, norm = loss_and_norm(layer, x)
        return bool(loss.isfinite()), bool(norm.isfinite())


@pytest.mark.dist
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
def test_no_rank_waits_for_another(dispatcher) -> None:
    """The other rank's tokens are as they were; the gradients of experts that took the bad one are not."""
    (loss, _), (bad_loss, bad_norm) = run_ranks(2, with_a_bad_token, dispatcher)
    assert loss
    assert not bad_loss
    assert not bad_norm


# -- the message of the step that failed ------------------------------------------------------------

SETTINGS = (
    "model.family=mixtral",
    "model.num_layers=4",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.vocab_size=263",
    "model.moe={num_experts = 4, moe_router_topk = 2}",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "train.train_iters=3",
    "train.eval_interval=null",
    "checkpoint.save_interval=null",
    "lr_schedule.lr_warmup_iters=1",
    "logging.progress=none",
)


def words_of_failed_run(rank: int, world: int, layout: tuple[str, ...]) -> str:
    """Of training with a bad weight in the router of layer 2."""
    with unasked_router():
        trainer = Trainer(load_config(overrides=[*SETTINGS, *layout]))
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if name == "decoder.layers.2.mlp.router.weight":
                    parameter[1, 3] = math.nan
        with pytest.raises(TrainingError) as failed:
            trainer.train()
        return str(failed.value)


@pytest.mark.parametrize("deferred", ["never", "always"])
def test_the_failed_step_names_the_router(deferred) -> None:
    words = words_of_failed_run(0, 1, (f"train.deferred_metrics={deferred}",))
    named = r"the loss is not finite at iteration 1 .*the logits of decoder\.layers\.2\.mlp\.router were the first\. "
    assert re.search(named, words)


@pytest.mark.slow
@pytest.mark.dist
def test_every_rank_names_it() -> None:
    """It is on the second pipeline stage, of two."""
    for words in run_ranks(2, words_of_failed_run, ("parallel.pipeline_model_parallel_size=2",)):
        assert "the logits of decoder.layers.2.mlp.router were the first" in words


def test_a_router_whose_logits_are_finite_has_no_fault() -> None:
    layer = build_layer(options(), fp64())
    loss_and_norm(layer, tokens_of(2, 6))
    assert layer.router.fault() is None
