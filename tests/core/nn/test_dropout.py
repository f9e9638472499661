"""What dropout drops depends on the run's seed, the sample and the heads of a rank, and on nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mt_core.nn.dropout import AtSample, AttentionDropout, DropoutStreams, InnerDropout
from mt_core.parallel.context import Axis, AxisName, ParallelContext
from mt_core.train import Trainer


def attention_mask(axis: AxisName, rank: int, sample: int = 0) -> torch.Tensor:
    """[4, 4, 8, 8]: what a kernel drops that draws from torch's generator, on one of two ranks of an axis."""
    dropout = AttentionDropout(0.5, ParallelContext(axes={axis: Axis(2, rank, None, (0, 1))}))
    dropout.streams, dropout.site = DropoutStreams(1), "decoder.layers.0.self_attention"
    with AtSample(sample):
        return F.dropout(torch.ones(4, 4, 8, 8), dropout.begin())


def test_ranks_with_other_heads_drop_other_attention_weights() -> None:
    first, second = attention_mask("tp", 0), attention_mask("tp", 1)
    # Independent masks of 1024 elements agree in half of them; four standard deviations are 6 %.
    assert (first == second).float().mean().item() == pytest.approx(0.5, abs=0.0625)
    assert torch.equal(first, attention_mask("tp", 0))


@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_attention_dropout_depends_on_the_sample_and_not_on_who_has_it(axis) -> None:
    assert torch.equal(attention_mask(axis, 0, sample=3), attention_mask(axis, 1, sample=3))
    assert not torch.equal(attention_mask(axis, 0, sample=3), attention_mask(axis, 0, sample=4))


def test_ranks_drop_their_columns_of_a_feed_forward_as_one_rank_does() -> None:
    def dropped(x: torch.Tensor, context: ParallelContext) -> torch.Tensor:
        dropout = InnerDropout(0.5, context)
        dropout.streams, dropout.site = DropoutStreams(1), "decoder.layers.0.mlp.dropout"
        return dropout(x)

    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    whole = dropped(x, ParallelContext())
    parts = [
        dropped(part, ParallelContext(axes={"tp": Axis(2, rank, None, (0, 1))}))
        for rank, part in enumerate(x.chunk(2, -1))
    ]
    assert torch.equal(torch.cat(parts, -1), whole)
    assert torch.equal(whole, torch.where(whole == 0.0, 0.0, 2.0 * x))
    assert 0 < (whole == 0.0).sum() < whole.numel()


@pytest.mark.parametrize("kind", ["hidden", "attention"])
def test_the_seed_of_the_run_chooses_what_is_dropped(tiny, kind) -> None:
    """Models of the same weights on the same sample: with dropout their losses differ if their seeds do."""

    def loss(seed: int, rate: float) -> float:
        rates = {"hidden": 0.0, "attention": 0.0, kind: rate}
        keys = [f"model.{name}_dropout={value}" for name, value in rates.items()]
        trainer = Trainer(tiny(f"train.seed={seed}", "model.attention_backend=eager", *keys))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            tokens = torch.arange(16)[None]
            return float(trainer.model.train()(tokens=tokens, position_ids=tokens).double().square().mean())

    assert loss(1, 0.0) == loss(2, 0.0)
    assert loss(1, 0.5) == loss(1, 0.5)
    assert loss(1, 0.5) != loss(2, 0.5)
