"""The loss without logits under layouts: tensor, sequence and context parallelism, and on the last pipeline stage."""

from __future__ import annotations

import pytest
import torch
from tests.dist.in_turn import InTurn

import mt_core.nn.loss
from mt_core.config.checks import as_world
from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.loss import build_linear_cross_entropy
from mt_core.parallel.context import ParallelContext
from mt_tools.verify.run_record import RunRecord, record_run

pytestmark = pytest.mark.dist

SETTINGS = (
    "model.num_layers=4",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.vocab_size=263",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "data.eod_mask_loss=true",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "train.train_iters=3",
    "train.eval_interval=null",
    "train.eval_iters=1",
    "checkpoint.save_interval=null",
    "lr_schedule.lr_warmup_iters=1",
    "logging.progress=none",
)
TP2, PP2 = "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"
SP, CP2 = "parallel.sequence_parallel=true", "parallel.context_parallel_size=2"
ZBV = "parallel.pipeline_schedule=zbv_zero_bubble"
UNTIED = "model.untie_embeddings_and_output_weights=true"


def run(rank: int, world: int, more: tuple[str, ...]) -> RunRecord | None:
    torch.set_num_threads(1)
    # Positions without weight are left out, few as they are here.
    mt_core.nn.loss.MOST_COUNTED = 1.0
    record = record_run(load_config(preset="gpt-tiny", overrides=[*SETTINGS, *more]))
    return record if rank == 0 else None


CASES = [
    ("linear_cross_entropy", (TP2,), ()),
    ("linear_cross_entropy", (TP2, SP), (UNTIED,)),
    ("linear_cross_entropy_sum", (TP2, SP), ()),
    ("linear_cross_entropy", (PP2,), ()),
    ("linear_cross_entropy_sum", (PP2,), (UNTIED,)),
    ("linear_cross_entropy", (PP2, ZBV), (UNTIED,)),
    ("linear_cross_entropy", (CP2,), ()),
]


def without_logits(loss: str, layout: tuple[str, ...], model: tuple[str, ...]) -> tuple[str, ...]:
    return (*model, *layout, f"train.loss={loss}")


RUNS = InTurn(run, [(2, without_logits(*case)) for case in CASES], [(1, model) for *_, model in CASES])


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "layout", "model"), CASES)
def test_layouts_compute_what_one_process_with_logits_does(loss, layout, model) -> None:
    reference, found = RUNS.result(1, model), RUNS.result(2, without_logits(loss, layout, model))
    assert found.losses == pytest.approx(reference.losses, rel=1e-5)
    assert found.norms == pytest.approx(reference.norms, rel=1e-4)
    assert found.evaluation == pytest.approx(reference.evaluation, rel=1e-5)
    for name, value in reference.gradients.items():
        off = (found.gradients[name] - value).norm() / value.norm().clamp(min=1e-12)
        assert off < 1e-5, f"the gradient of {name} differs by {off:.1e}"


def test_gradients_of_the_forward_pass_are_refused_where_backward_is_split() -> None:
    settings = [ZBV, "parallel.pipeline_model_parallel_size=2", "train.loss=linear_cross_entropy_sum"]
    words = r"pipeline_schedule=zbv_zero_bubble runs .*use train.loss=linear_cross_ent"
    with as_world(2), pytest.raises(ConfigError, match=words):
        load_config(preset="gpt-tiny", overrides=[*SETTINGS, *settings])


def test_it_is_refused_with_weights_that_are_sharded_after_the_forward_pass() -> None:
    settings = ["parallel.use_torch_fsdp2=true", "train.loss=linear_cross_entropy"]
    config = load_config(preset="gpt-tiny", overrides=[*SETTINGS, *settings]).config
    with pytest.raises(ConfigError, match=r"train.loss=linear_cross_entropy .*parallel.use_torch_fsdp2=true"):
        build_linear_cross_entropy(config, ParallelContext())
