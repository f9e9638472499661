"""The biencoder: vectors, the retrieval loss in one process and over data-parallel ranks, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.testing import run_ranks
from mt_models.biencoder.loss import RetrievalLoss, build_retrieval_loss
from mt_models.biencoder.model import Vectors

SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50, "max_position_embeddings": 16}
RETRIEVAL = "train.loss=retrieval"


def batch(count: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    padding = (torch.arange(9)[None] < torch.arange(4, 4 + count)[:, None]).long()
    sides = {f"{side}_tokens": torch.randint(0, 50, (count, 9), generator=generator) for side in ("query", "context")}
    return {
        **sides,
        "query_padding_mask": padding,
        "context_padding_mask": padding.flip(0),
        "query_tokentype_ids": torch.zeros_like(padding),
        "context_tokentype_ids": torch.zeros_like(padding),
    }


def plain_loss(query: Tensor, context: Tensor, divisor: float) -> Tensor:
    """[B], one question at a time in fp64."""
    losses = []
    for i, q in enumerate(query.double()):
        scores = torch.stack([(q * c).sum() / divisor for c in context.double()])
        losses.append(scores.exp().sum().log() - scores[i])
    return torch.stack(losses)


@pytest.mark.parametrize("scaling", [False, True])
def test_the_loss_is_its_formula(build, randomize, scaling) -> None:
    model = build(RETRIEVAL, **SMALL, family="biencoder", biencoder_projection_dim=8, retriever_score_scaling=scaling)
    randomize(model, scale=0.1)
    vectors = model(**{name: batch()[name] for name in model.inputs})
    loss = RetrievalLoss(ParallelContext(), math.sqrt(32) if scaling else 1.0)
    losses = loss(vectors, {})
    expected = plain_loss(*vectors, math.sqrt(32) if scaling else 1.0)
    torch.testing.assert_close(losses.double(), expected, atol=1e-6, rtol=1e-5)
    gradients = torch.autograd.grad(losses.sum(), tuple(vectors), retain_graph=True)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected.sum(), tuple(vectors)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


def test_a_vector_is_the_projected_first_position_of_its_own_tower(build, randomize) -> None:
    model = build(RETRIEVAL, **SMALL, family="biencoder", biencoder_projection_dim=8)
    randomize(model)
    data = batch()
    vectors = model(**{name: data[name] for name in model.inputs})
    for side, tower in (("query", model.query_model), ("context", model.context_model)):
        states = tower.hidden_states(data[f"{side}_tokens"], padding_mask=data[f"{side}_padding_mask"])
        expected = states[:, 0] @ tower.projection_enc.weight.T + tower.projection_enc.bias
        torch.testing.assert_close(getattr(vectors, side), expected)
    assert not torch.equal(model.query_model(data["query_tokens"]), model.context_model(data["query_tokens"]))


def test_a_shared_tower_encodes_both(build, randomize) -> None:
    model = build(RETRIEVAL, **SMALL, family="biencoder", biencoder_shared_query_context_model=True)
    randomize(model)
    assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {"shared_model"}
    tokens = batch()["query_tokens"]
    vectors = model(tokens, tokens)
    assert torch.equal(vectors.query, vectors.context)
    assert vectors.query.shape == (6, 32)


def test_top_k_accuracy() -> None:
    query, context = torch.eye(4), torch.eye(4)[[0, 1, 3, 2]] + torch.tensor([0.1, 0.0, 0.2, 0.0])
    loss = RetrievalLoss(ParallelContext())
    assert loss.top_k_accuracy(Vectors(query, context), 1).item() == pytest.approx(0.5)
    assert loss.top_k_accuracy(Vectors(query, context), 9).item() == 1.0


def rank_gradients(rank: int, world: int, seed: int) -> list[list]:
    """Losses of a rank's rows, and the gradients of its vectors when the losses of all ranks are added."""
    ctx = build_parallel_context(AxisSizes())
    own = [x.detach().chunk(world)[rank].clone().requires_grad_() for x in random_vectors(seed)]
    losses = RetrievalLoss(ctx, 2.0)(Vectors(*own), {})
    losses.sum().backward()
    return [losses.tolist(), *(x.grad.tolist() for x in own)]


def random_vectors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 8, generator=generator).requires_grad_() for _ in range(2)]


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_data_parallel_ranks_together_have_the_loss_and_gradients_of_one_process(world) -> None:
    query, context = random_vectors(0)
    expected = plain_loss(query, context, 2.0)
    expected.sum().backward()
    parts = run_ranks(world, rank_gradients, 0)
    losses, of_queries, of_contexts = (
        torch.tensor([x for piece in pieces for x in piece]) for pieces in zip(*parts, strict=True)
    )
    torch.testing.assert_close(losses.double(), expected.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(of_queries, query.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(of_contexts, context.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "options", "words"),
    [
        ({}, ["train.loss=cross_entropy"], r'train.loss=cross_entropy takes logits.*use train.loss="retrieval"'),
        ({"num_attention_heads": 5}, [RETRIEVAL], r"not divisible by model.num_attention_heads=5"),
        ({"add_lm_head": True}, [RETRIEVAL], r"add_lm_head"),
        ({"max_position_embeddings": 8}, [RETRIEVAL], r"data.seq_length=16 is longer"),
    ],
)
def test_what_does_not_fit_is_refused(build, keys, options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(*options, **SMALL | keys, family="biencoder")


def test_the_loss_needs_a_biencoder(host) -> None:
    from mt_core.config.loading import load_config

    config = load_config(preset="bert-base-cased", overrides=["train.train_iters=1"], host=host).config
    with pytest.raises(ConfigError, match="model.family=bert does not give"):
        build_retrieval_loss(config)
