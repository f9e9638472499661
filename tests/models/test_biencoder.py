"""The biencoder: vectors, the retrieval loss in one process and over data-parallel ranks, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.testing import run_ranks
from mt_models.biencoder.model import RetrievalLoss, Vectors, build_retrieval_loss

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


def test_several_texts_of_a_question_are_encoded_as_single_ones(build, randomize) -> None:
    model = build(RETRIEVAL, **SMALL, family="biencoder")
    randomize(model)
    tokens = torch.randint(0, 50, (2, 3, 9), generator=torch.Generator().manual_seed(3))
    seen = torch.ones_like(tokens)
    seen[:, :, 6:] = 0
    context = model(tokens[:, 0], tokens, context_padding_mask=seen).context
    assert context.shape == (2, 3, 32)
    torch.testing.assert_close(context[1, 2], model.context_tower(tokens[1, 2:, :6])[0])


def test_a_shared_tower_encodes_both(build, randomize) -> None:
    model = build(RETRIEVAL, **SMALL, family="biencoder", biencoder_shared_query_context_model=True)
    randomize(model)
    assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {"shared_model"}
    tokens = batch()["query_tokens"]
    vectors = model(tokens, tokens)
    assert torch.equal(vectors.query, vectors.context)
    assert vectors.query.shape == (6, 32)


def test_metrics_of_validation() -> None:
    """Question 0 has rank 0, 1 a tie of its own text with another, 2 and 3 each other's text in front."""
    query, context = torch.eye(4), torch.eye(4)[[0, 1, 3, 2]]
    context[0, 1] = 1.0
    loss = RetrievalLoss(ParallelContext(), top_k=(1, 2))
    loss(Vectors(query.requires_grad_(), context), {})
    assert loss.take_metrics()["average_rank"] == 0.0  # training is not counted
    with torch.no_grad():
        loss(Vectors(query, context), {})
    # Of question 2 the scores are 0, 0, 0 and 1: its own is the third, and shares its score with two.
    assert loss.take_metrics() == {"average_rank": (0 + 0.5 + 2 + 2) / 4, "top1_acc": 0.5, "top2_acc": 0.5}
    assert loss.take_metrics() == {"average_rank": 0.0, "top1_acc": 0.0, "top2_acc": 0.0}


def vectors_with_negatives() -> tuple[Vectors, Tensor]:
    """6 questions with 3 texts each, of which some are missing."""
    generator = torch.Generator().manual_seed(4)
    query, context = (torch.randn(*shape, generator=generator) for shape in ((6, 8), (6, 3, 8)))
    present = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]] * 2)
    return Vectors(query.requires_grad_(), context.requires_grad_()), present


def rank_losses_with_negatives(rank: int, world: int) -> tuple[list, ...]:
    loss = RetrievalLoss(build_parallel_context(AxisSizes()), 2.0, top_k=(1,))
    whole, mask = vectors_with_negatives()
    own = Vectors(*(x.detach().chunk(world)[rank].clone().requires_grad_() for x in whole))
    batch = {"context_mask": mask.chunk(world)[rank]}
    losses = loss(own, batch)
    losses.sum().backward()
    with torch.no_grad():
        loss(own, batch)
    return losses.tolist(), own.query.grad.tolist(), own.context.grad.tolist(), loss.take_metrics()


@pytest.mark.dist
def test_negatives_of_all_ranks_are_scored_by_all_questions() -> None:
    """Against scores that are computed one at a time over the texts that there are."""
    (query, context), mask = vectors_with_negatives()
    texts = [(question, place) for question in range(6) for place in range(3) if mask[question, place]]
    losses, ranks = [], []
    for question in range(6):
        scores = torch.stack([(query[question] * context[where]).sum() / 2.0 for where in texts])
        own = texts.index((question, 0))
        losses.append(scores.double().exp().sum().log() - scores[own])
        ranks.append(int((scores > scores[own]).sum()))
    torch.stack(losses).sum().backward()
    parts = run_ranks(2, rank_losses_with_negatives)
    found, of_queries, of_contexts = (torch.tensor([x for part in parts for x in part[field]]) for field in range(3))
    torch.testing.assert_close(found.double(), torch.stack(losses).detach().double(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(of_queries, query.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(of_contexts, context.grad, atol=1e-6, rtol=1e-4)
    expected = {"average_rank": sum(ranks) / 6, "top1_acc": ranks.count(0) / 6}
    assert [part[3] for part in parts] == [pytest.approx(expected)] * 2


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
