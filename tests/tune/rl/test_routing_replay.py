"""Routing replay: rows have the experts that generation chose, and training goes through them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.dist.in_turn import InTurn
from tests.dist.test_layouts import PP2, TP2
from tests.tune.rl.runs import config
from tests.tune.rl.test_layouts import Lines, folder_of_all
from tests.tune.rl.test_rollouts import trained

from mt_core.errors import ConfigError
from mt_core.nn.batch_invariance import batch_invariant
from mt_core.train import Trainer
from mt_tune.rl.batching import rank_batch
from mt_tune.rl.routing_record import decoded
from mt_tune.rl.routing_replay import routers_of
from mt_tune.rl.samples import ROUTED_EXPERTS
from mt_tune.rl.source import RolloutSource

pytestmark = pytest.mark.slow
MIXTURE = (
    "model.family=mixtral",
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.num_query_groups=2",
    "model.ffn_hidden_size=32",
    "model.max_position_embeddings=64",
    "model.moe.num_experts=8",
    "model.moe.moe_router_topk=2",
)
REPLAY = ("rl.routing_replay=true", "inference.cuda_graphs=none")
CHANGED, LARGEST = "sampling/routing_changed_share", "sampling/sampling_logp_difference/max"


def source_of(trainer: Trainer) -> RolloutSource:
    source = trainer.source
    assert isinstance(source, RolloutSource)
    return source


@pytest.mark.parametrize("extra", [(), ("inference.max_tokens_per_step=6",)], ids=["", "chunks of prompts"])
def test_rows_have_the_experts_of_all_positions(tmp_path: Path, extra: tuple[str, ...]) -> None:
    """Also of prompts that the cache had from other completions: as a pass over the whole row chooses. 1 s"""
    loaded = config(tmp_path, *MIXTURE, *REPLAY, "numerics.batch_invariant=true", *extra)
    trainer = Trainer(loaded)
    next(trainer.source.batches())
    rows = source_of(trainer).rows
    assert len(rows) == 8
    for row in rows:
        experts = decoded(row.experts)
        assert experts is not None
        assert experts.shape == (row.positions, 2 * 2)
        whole = torch.tensor([[*row.prompt, *row.completion][:-1]])
        routers = list(routers_of(trainer.model))
        for router in routers:
            router.noted = []
        with torch.no_grad(), batch_invariant():
            trainer.model(whole)
        chosen = torch.cat([torch.cat(router.noted) for router in routers], 1)
        assert np.array_equal(experts, chosen.numpy())
        for router in routers:
            router.noted = None


def test_training_goes_through_given_experts(tmp_path: Path) -> None:
    """Each token through experts that it would not have chosen: as with a router that is forced to them. 1 s"""
    trainer = Trainer(config(tmp_path, *MIXTURE, *REPLAY))
    next(trainer.source.batches())
    batch = rank_batch(trainer, source_of(trainer).rows)
    (arrays, *_) = batch.micro_batches
    tokens, given = torch.tensor(arrays["tokens"]), torch.tensor(arrays[ROUTED_EXPERTS])
    other = torch.where(given < 0, given, (given + 3) % 8)
    plain, replayed, kept = (
        trainer.model(tokens),
        trainer.model(tokens, routed_experts=other),
        trainer.model(tokens, routed_experts=torch.full_like(given, -1)),
    )
    assert torch.equal(plain, kept)
    assert not torch.allclose(plain, replayed)
    forced = {router.layer: other[..., 2 * n : 2 * n + 2].long() for n, router in enumerate(routers_of(trainer.model))}
    for router in routers_of(trainer.model):
        router.choose = lambda logits, share, ids=None, layer=router.layer: torch.where(
            forced[layer].flatten(0, 1) >= 0, forced[layer].flatten(0, 1), logits.topk(2).indices
        )
    torch.testing.assert_close(trainer.model(tokens), replayed)
    for router in routers_of(trainer.model):
        del router.choose
    replayed.sum().backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in routers_of(trainer.model))


def test_with_batch_invariance_the_ratio_is_exactly_one(tmp_path: Path) -> None:
    _, lines = trained(tmp_path, *MIXTURE, *REPLAY, "numerics.batch_invariant=true", "rl.temperature=0.7")
    for line in lines:
        assert (line[LARGEST], line[CHANGED]) == (0.0, 0.0)
        assert line["sampling/importance_sampling_ratio/min"] == line["sampling/importance_sampling_ratio/max"] == 1.0


def test_generation_with_other_numbers_chooses_other_experts(tmp_path: Path) -> None:
    """An 8-bit cache changes hidden states and so some choices; with replay the deviation is smaller. 3 s"""
    other = (*MIXTURE, "inference.cuda_graphs=none", "inference.cache_dtype=int8", "rl.sampling_correction=none")
    wide = ("model.init_method_std=0.4", "optimizer.lr=0", "optimizer.min_lr=0", "train.global_batch_size=32")
    _, replayed = trained(tmp_path, *other, *wide, "rl.routing_replay=true", run="replayed")
    _, free = trained(tmp_path, *other, *wide, run="free")
    assert max(line[CHANGED] for line in replayed) > 0.0
    worst, worst_free = (max(line[LARGEST] for line in lines) for lines in (replayed, free))
    assert worst < worst_free


def test_a_resumed_run_replays_the_same_experts(tmp_path: Path) -> None:
    """Within a generation, with groups in progress. 3 s"""
    partial = ("rl.extra_groups=2", "rl.max_staleness=2", "inference.max_requests=3", "inference.max_tokens_per_step=6")
    keys = (*MIXTURE, *REPLAY, *partial, "rl.steps_per_generation=2", "train.train_iters=6")
    _, whole = trained(tmp_path, *keys, run="whole")
    _, first = trained(tmp_path, *keys, "train.exit_iteration=3", run="parts")
    _, rest = trained(tmp_path, *keys, run="parts")
    for name in ("loss", "grad_norm", CHANGED):
        assert [line.get(name) for line in first + rest] == [line.get(name) for line in whole]
    assert whole[-1][CHANGED] > 0.0


def replayed(rank: int, world: int, layout: tuple[str, ...]) -> Any:
    lines = Lines("loss", "grad_norm", LARGEST, CHANGED)
    keys = (*MIXTURE, *REPLAY, "train.micro_batch_size=2", "rl.num_iterations=2", *layout)
    Trainer(config(folder_of_all(world), *keys), callbacks=[lines]).train()
    return lines.lines


ALONE = "rl.generation_parallel={}"
RANKS = {"dp": (), "ep": ("parallel.expert_model_parallel_size=2",), "tp": (TP2, ALONE), "pp": (PP2, ALONE)}
RUNS = InTurn(replayed, [(1, ())], [(2, layout) for layout in RANKS.values()])


@pytest.mark.dist
@pytest.mark.parametrize("layout", RANKS)
def test_a_layout_replays_as_one_process(layout: str) -> None:
    """10 s for all"""
    for one, other in zip(RUNS.result(2, RANKS[layout]), RUNS.result(1, ()), strict=True):
        assert one == pytest.approx(other, rel=2e-3, abs=2e-6)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ((), 'set inference.cuda_graphs="none"'),
        (("inference.cuda_graphs=none", "rl.generation_parallel={tensor_model_parallel_size = 2}"), "whole tokens"),
        (("inference.cuda_graphs=none", "inference.speculative_method=ngram"), "speculative_method"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, keys: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, *MIXTURE, *keys, "rl.routing_replay=true")


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no model.moe"):
        Trainer(config(tmp_path, *REPLAY))
