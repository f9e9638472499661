"""Whole steps as graphs: the same losses and weights as without, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tests.core.train.cuda_graphs.replayed import TapeRecorder
from tests.core.train.cuda_graphs.test_runs import SETTINGS, StepRecorder
from tests.covering import EXHAUSTIVE

from mt_core.errors import ConfigError
from mt_core.train import Engine, Trainer
from mt_core.train.cuda_graphs.rules import reason_against_step
from mt_core.train.cuda_graphs.steps import CapturedStep, StepGraphs

RAMP_UP = [
    "train.rampup_batch_size=[4, 4, 16]",
    "train.global_batch_size=8",
    "train.train_iters=null",
    "train.train_samples=48",
    "lr_schedule.lr_warmup_iters=null",
]
DEFERRED = ("train.deferred_metrics=always", "optimizer.exp_avg_dtype=bf16")


def trained(config, recorder: TapeRecorder | None) -> tuple[Trainer, StepRecorder]:
    steps = StepRecorder()
    trainer = Trainer(config, callbacks=[steps])
    if recorder is not None:
        engine = trainer.engine
        graphs = StepGraphs(engine.model, engine.weights, recorder, warmup_steps=2)
        engine.graphs = engine.step.capture = graphs
    trainer.train()
    return trainer, steps


SAME_AS_BLOCKS = (
    "several micro-batches",
    "bf16 with fp32 copies",
    "buckets",
    "remainders",
    "remainders, gradients in bf16",
    "fp8 by a history",
    "evaluated",
    "padded experts",
)
CASES = {name: SETTINGS[name] for name in SAME_AS_BLOCKS} | {
    "ramp-up": RAMP_UP,
    "ramp-up of experts": [*SETTINGS["experts"], *RAMP_UP],
}


ALSO_IN_BLOCKS = ("several micro-batches", "bf16 with fp32 copies", "remainders", "evaluated")
"""Parts of others here, whose options do not depend on what is captured."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=EXHAUSTIVE if name in ALSO_IN_BLOCKS else ()) for name in CASES]
)
def test_a_run_with_graphs_is_the_run_without(name, tiny) -> None:
    recorder, settings = TapeRecorder(), CASES[name]
    plain, expected = trained(tiny(*settings, *DEFERRED), None)
    graphed, found = trained(tiny(*settings, *DEFERRED), recorder)
    assert found.losses == expected.losses
    assert found.of_layers == expected.of_layers
    weights = dict(graphed.model.named_parameters())
    assert all(torch.equal(p, weights[key]) for key, p in plain.model.named_parameters())
    replays = [graph.replays for pool in recorder.pools for graph in pool]
    assert sum(replays) + recorder.runs_aside == len(expected.losses)
    assert len(replays) == (2 if name.startswith("ramp-up") else 1)
    assert any("CUDA graph of the step captured, for" in message for message in found.messages)


@pytest.mark.slow
def test_numbers_of_the_capture_would_show(tiny, monkeypatch) -> None:
    """Without copies into its inputs a replay repeats the captured step: the comparison above can fail."""
    replay = CapturedStep.replay
    monkeypatch.setattr(CapturedStep, "replay", lambda self, inputs: replay(self, self.inputs))
    assert trained(tiny(*DEFERRED), TapeRecorder())[1].losses != trained(tiny(*DEFERRED), None)[1].losses


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["parallel.use_distributed_optimizer=true", "parallel.overlap_param_gather=true"],
            "overlap_param_gather=true waits within a step",
        ),
        (["train.deferred_metrics=never"], "train.deferred_metrics=never reads the norm"),
        (["precision.dtype=fp16"], "precision.dtype=fp16 chooses the next loss scale"),
        (["logging.log_num_zeros_in_grad=true"], "log_num_zeros_in_grad=true counts on the host"),
    ],
)
def test_what_a_step_cannot_be_captured_with_is_refused_by_key(overrides, words, tiny) -> None:
    optimizer = Trainer(tiny()).engine.optimizer
    assert reason_against_step(tiny().config, optimizer) is None
    reason = reason_against_step(tiny(*overrides).config, optimizer)
    assert reason is not None
    assert words in reason


def test_logits_are_not_kept_from_a_replay(tiny, monkeypatch) -> None:
    monkeypatch.setattr("mt_core.train.engine.build_graphs", lambda *args: None)
    with pytest.raises(ConfigError, match=r"train.cuda_graphs=step replays the whole step.*return_logits"):
        Engine.build(tiny("train.cuda_graphs=step"), return_logits=True)
