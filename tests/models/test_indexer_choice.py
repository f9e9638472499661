"""What computes the scores of indexers, by the key `kernels.index_scores`."""

from __future__ import annotations

import torch
from tests.models import test_deepseek_v4 as deepseek_v4
from tests.models import test_deepseek_v32 as deepseek_v32
from tests.models import test_glm5_next as glm5_next
from torch import Tensor

from mt_core.nn.batch_invariance import batch_invariant
from mt_core.nn.kernels.choice import Choice, Kernels
from mt_models.blocks.indexer import UsesScores, index_scores, picked_scores, torch_index_scores


def marked(*_: Tensor) -> Tensor:
    """In the place of the function of an implementation."""
    return torch.tensor(7.0)


def scores_named(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(2, 5, *rest, generator=generator) for rest in ((3, 16), (3,), (16,))]
    scores = picked_scores(Kernels({"index_scores": name}, "cpu", "bfloat16"), 16)(*inputs)
    expected = torch_index_scores(*inputs)
    return scores if scores.dim() == 0 else (scores - expected).abs().max() + torch.zeros(())


def test_named_kernels_are_called_and_torch_is_torch(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(Choice, "load", lambda choice: marked)
    assert scores_named("triton").item() == 7.0
    assert scores_named("torch").item() == 0.0
    with batch_invariant():
        assert scores_named("triton").item() == 0.0


def test_auto_decides_at_each_call() -> None:
    """On a GPU Triton's kernel without gradients, else torch."""
    assert picked_scores(Kernels({}, "cpu", "bfloat16"), 16) is index_scores


def test_indexers_of_all_kinds_take_the_choice(build, host) -> None:
    """A kind that did not would say that nothing in the run uses the key."""
    for model in (
        build(family="deepseek_v32", **deepseek_v32.OURS),
        deepseek_v4.build(host),
        build(family="glm5_next", **glm5_next.OURS),
    ):
        indexers = [module for module in model.modules() if isinstance(module, UsesScores)]
        assert indexers
        for indexer in indexers:
            kernels = Kernels({"index_scores": "torch"}, "cpu", "float32")
            indexer.use_kernels(kernels)
            assert kernels.picked == {"index_scores"}
            assert indexer.score is not index_scores
