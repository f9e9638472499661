"""RETRO sharded over tensor-parallel ranks: the logits' loss and every gradient of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.dist.in_turn import InTurn
from tests.models.plugin_host import host
from tests.models.test_retro import DATA, SHAPE, samples
from torch import Tensor, nn

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import initialize, parameter_layouts
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.specs import LOSSES, MODELS

pytestmark = pytest.mark.dist
KEYS = [f"model.{key}={value}" for key, value in SHAPE.items()]
BASE = ["model.family=retro", "model.init_method_std=0.2", "data.seq_length=16", "train.train_iters=1", *DATA, *KEYS]
CASES = {
    "learned": ["model.max_position_embeddings=24"],
    "rope, untied": [
        "model.position_embedding_type=rope",
        "model.normalization=RMSNorm",
        "model.activation=swiglu",
        "model.add_bias_linear=false",
        "model.untie_embeddings_and_output_weights=true",
    ],
    "grouped queries": ["model.position_embedding_type=rope", "model.num_query_groups=2"],
}


def loss_and_gradients(case: str, ctx: ParallelContext) -> tuple[Tensor, nn.Module]:
    """The model after backward; its partial gradients are summed."""
    config = load_config(overrides=[*BASE, *CASES[case]], host=host()).config
    model = host()[MODELS].get("retro").build.load()(config.model, ModelBuildContext(config, ctx, host()))
    initialize(model, 5, ctx)
    batch = samples()
    labels = {"labels": batch["tokens"].roll(-1, 1)}
    losses = host()[LOSSES].get("cross_entropy", key="train.loss").build.load()(config, ctx)(model(**batch), labels)
    losses.mean().backward()
    for name, layout in parameter_layouts(model).items():
        if "tp" in layout.partial_gradient and ctx.tp.size > 1:
            dist.all_reduce(model.get_parameter(name).grad, group=ctx.tp.group)
    return losses.mean().detach(), model


def differences(rank: int, world: int, case: str) -> list[tuple[float, float, list[str]]]:
    """Without and with sequence parallelism: both losses, and the names of gradients that differ from this rank's slice
    of the whole model's."""
    expected, whole = loss_and_gradients(case, ParallelContext())
    return [compared(world, case, sharded, expected, whole) for sharded in (False, True)]


def compared(
    world: int, case: str, sequence_parallel: bool, expected: Tensor, whole: nn.Module
) -> tuple[float, float, list[str]]:
    ctx = build_parallel_context(AxisSizes(tp=world), sequence_parallel=sequence_parallel)
    loss, model = loss_and_gradients(case, ctx)
    layouts, single = parameter_layouts(model), parameter_layouts(whole)
    wrong = []
    for name, parameter in model.named_parameters():
        canonical = single[name].to_canonical(whole.get_parameter(name).grad)
        part = layouts[name].to_local(canonical, ctx)
        if not torch.allclose(parameter.grad, part, atol=1e-6 + 2e-5 * canonical.abs().max().item(), rtol=1e-4):
            wrong.append(f"{name}: {(parameter.grad - part).abs().max():.2e} of {part.abs().max():.2e}")
    return loss.item(), expected.item(), wrong


RUNS = InTurn(differences, [(2, case) for case in CASES])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_loss_and_gradients_of_one(case) -> None:
    for of_rank in RUNS.of_ranks(2, case):
        assert len(of_rank) == 2
        for loss, expected, wrong in of_rank:
            assert loss == pytest.approx(expected, rel=1e-5)
            assert not wrong


def test_neighbours_that_ranks_cannot_share_equally(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    odd = ["model.retro_chunk_length=5", "data.retro_chunk_length=5", "data.seq_length=20"]
    odd += ["model.retro_num_retrieved_chunks=1", "data.retro_num_retrieved_chunks=1"]
    sharded = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
    with pytest.raises(ConfigError, match="sequence_parallel divides the 5 tokens of a neighbour.*multiple of 2"):
        load_config(overrides=[*BASE, *CASES["learned"], *odd, *sharded], host=host())
