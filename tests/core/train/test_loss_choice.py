"""What `train.loss=auto` stands for, and that runs go on whichever implementation it was."""

from __future__ import annotations

import pytest

from mt_core.config.loading import load_config
from mt_core.errors import CheckpointError
from mt_core.parallel.context import ParallelContext
from mt_core.train import Trainer
from mt_core.train.auto_choices import with_resolved_loss
from mt_core.train.build import build_model
from mt_core.train.reporting.run_summary import run_summary

FUSED = "linear_cross_entropy_sum"
LARGE, SMALL = "model.vocab_size=8192", "model.vocab_size=8191"
UNTIED = "model.untie_embeddings_and_output_weights=true"
GPT = ("model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "train.train_iters=1")


@pytest.mark.parametrize(
    ("preset", "settings", "loss"),
    [
        ("gpt-tiny", [LARGE], FUSED),
        ("gpt-tiny", [SMALL], "cross_entropy"),
        ("gpt-tiny", [LARGE, "train.loss=cross_entropy"], "cross_entropy"),
        ("gpt-tiny", [SMALL, "train.loss=linear_cross_entropy"], "linear_cross_entropy"),
        ("gpt-tiny", [LARGE, "parallel.use_torch_fsdp2=true"], "cross_entropy"),
        ("gpt-tiny", [LARGE, "kernels.cross_entropy=torch"], "cross_entropy"),
        ("gpt-tiny", [LARGE, "precision.dtype=bf16"], FUSED),
        (
            "gpt-tiny",
            [LARGE, "precision.dtype=bf16", "precision.accumulate_allreduce_grads_in_fp32=false"],
            "cross_entropy",
        ),
        ("gpt-tiny", [LARGE, "precision.fp8_format=hybrid", "precision.fp8_output_proj=true", UNTIED], "cross_entropy"),
        (None, [LARGE, "model.family=gemma", "model.final_logit_softcapping=30.0"], "cross_entropy"),
        (None, [LARGE, "model.family=bert", "model.max_position_embeddings=16", "data.seq_length=16"], "bert"),
    ],
)
def test_what_auto_stands_for(preset, settings, loss, host) -> None:
    loaded = load_config(preset=preset, overrides=[*GPT, *settings], host=host)
    model = build_model(loaded.config, ParallelContext(), host)
    assert with_resolved_loss(loaded.config, model, host).train.loss == loss


def test_split_backward_passes_keep_the_logits(host, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    pipeline = ["parallel.pipeline_model_parallel_size=2", "parallel.pipeline_schedule=interleaved_zero_bubble"]
    config = load_config(preset="gpt-tiny", overrides=[*GPT, LARGE, "model.num_layers=4", *pipeline], host=host).config
    model = build_model(config, ParallelContext(), host)
    assert with_resolved_loss(config, model, host).train.loss == "cross_entropy"


def test_a_run_says_what_auto_is_and_goes_on_with_either(tiny, tmp_path) -> None:
    logits = (LARGE, "train.loss=cross_entropy")
    first = Trainer(tiny(LARGE, "train.exit_iteration=2"), run_dir=tmp_path)
    assert next(iter(run_summary(first))).endswith(f"attention sdpa, loss {FUSED}")
    first.train()
    for settings in ((LARGE, f"train.loss={FUSED}"), logits):
        assert Trainer(tiny(*settings), run_dir=tmp_path).state.iteration == 2


def test_bit_for_bit_only_the_same_implementation_goes_on(tiny, tmp_path) -> None:
    exact = (LARGE, "train.deterministic=true")
    Trainer(tiny(*exact, "train.exit_iteration=1"), run_dir=tmp_path).train()
    assert Trainer(tiny(*exact, f"train.loss={FUSED}"), run_dir=tmp_path).state.iteration == 1
    with pytest.raises(CheckpointError, match=rf"train.loss: {FUSED} in the checkpoint, cross_entropy now"):
        Trainer(tiny(*exact, "train.loss=cross_entropy"), run_dir=tmp_path)


@pytest.mark.slow
def test_both_have_the_same_losses_and_evaluation(tiny) -> None:
    auto, logits = (Trainer(tiny(LARGE, *more)) for more in ((), ("train.loss=cross_entropy",)))
    results = [trainer.train().losses for trainer in (auto, logits)]
    assert results[0] == pytest.approx(results[1], rel=1e-5)
