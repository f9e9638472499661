"""NEFTune's noise by each segment's own length, the loss `dft`, and learning rates by layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tune.sft.chats import settings, write_chats

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.loss import cross_entropy
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train.engine import Engine
from mt_tune.sft.dft import build_dft
from mt_tune.sft.neftune import EmbeddingNoise, segment_lengths


def test_lengths_of_segments() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    assert segment_lengths(positions).tolist() == [[3, 3, 3, 2, 2, 1], [6] * 6]
    # A rank's cut may begin within a document.
    assert segment_lengths(torch.tensor([[4, 5, 0]])).tolist() == [[2, 2, 1]]


def test_noise_fills_the_range_of_each_segment_and_ends_with_training() -> None:
    noise = EmbeddingNoise(5.0, ParallelContext(device=torch.device("cpu")))
    noise.positions = torch.cat([torch.arange(4), torch.arange(60)])[None]
    x = torch.zeros(1, 64, 32)
    drawn = noise(x)[0].abs()
    for part, length in ((slice(0, 4), 4), (slice(4, 64), 60)):
        bound = 5.0 / (length * 32) ** 0.5
        assert 0.9 * bound < drawn[part].max() <= bound
        assert drawn[part].mean() == pytest.approx(bound / 2, rel=0.15)
    noise.eval()
    assert noise(x).eq(0).all()


def test_dft_is_minus_p_log_p_with_the_gradient_of_p() -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, 3, 5, requires_grad=True)
    labels = torch.tensor([[1, 2, 0], [4, 3, -1]])
    batch = {"labels": labels, "loss_mask": (labels >= 0).float()}
    losses = build_dft(None, None)(logits, batch)  # type: ignore[arg-type]
    plain = cross_entropy(logits, batch)
    assert torch.allclose(losses, plain * (-plain).exp())
    seen = labels >= 0
    (gradient,) = torch.autograd.grad(losses[seen].sum(), logits)
    probabilities = logits.softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    (expected,) = torch.autograd.grad(-probabilities[seen].sum(), logits)
    assert torch.allclose(gradient, expected, atol=1e-6)


def rates(path: Path, *more: str) -> dict[str, float]:
    host = load_plugins()
    engine = Engine.build(load_config(preset="gpt-tiny", overrides=settings(path, *more), host=host), host=host)
    return {name: group.get("lr_mult", 1.0) for group in engine.optimizer.param_groups for name in group["names"]}


@pytest.mark.slow
def test_rates_by_layer_and_by_name(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl")
    found = rates(path, "tune.layer_lr_decay=0.5", "tune.lr_multipliers={'*.linear_fc1.*' = 3.0}")
    assert found["embedding.word_embeddings.weight"] == 0.25
    assert found["decoder.layers.0.self_attention.linear_proj.weight"] == 0.5
    assert found["decoder.layers.0.mlp.linear_fc1.weight"] == 1.5
    assert found["decoder.layers.1.self_attention.linear_proj.weight"] == 1.0
    assert found["decoder.final_layernorm.weight"] == 1.0
    with pytest.raises(ConfigError, match=r"tune\.lr_multipliers has \"\*\.mpl\.\*\""):
        rates(path, "tune.lr_multipliers={'*.mpl.*' = 3.0}")
