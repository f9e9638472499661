"""An engine on a running trainer's weights: in its memory, and in another layout, after steps of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.dist.in_turn import InTurn
from tests.dist.test_layouts import FSDP, GATHER, PP2, SMALL_BUCKETS, SP, TP2, ZERO, config
from tests.infer.engines import OPTIONS

from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_core.tensor_slice import TensorSlice
from mt_core.train import Trainer
from mt_infer import SamplingParameters, TextGenerator
from mt_infer.refit import plan_copies

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
ENGINE = tuple(f"inference.{key}={value}" for key, value in OPTIONS.items())
SAMPLING = SamplingParameters(temperature=1.0, seed=5, max_tokens=6, logprobs=0)


def outputs(generator: TextGenerator) -> list[tuple[list[int], list[float]]]:
    found = generator.generate([[5, 9, 3], [7] * 9], SAMPLING)
    return [(one.tokens, [own.token for own in one.logprobs]) for (one,) in found]


def before_and_after_training(rank: int, world: int, layout: str) -> Any:
    keys, own = LAYOUTS[layout]
    trainer = Trainer(config(*ENGINE, "optimizer.lr=0.05", *keys), host=load_plugins())
    generator = TextGenerator.of_engine(trainer.engine, own)
    found = []
    batches = trainer.engine.train_batches(trainer.train_data)
    for _ in range(2):
        if rank:
            generator.follow()
        else:
            found.append(outputs(generator))
            pieces = generator.stream([5, 9], SAMPLING)
            next(pieces)
            pieces.close()
            generator.close()
        for _ in range(2):
            trainer.engine.train_step(next(batches))
        waiting = None if rank else generator.submit([5, 9], SAMPLING)
        with pytest.raises(ConfigError, match="weights cannot change while requests run"):
            generator.refit(trainer.engine)
        if waiting is not None:
            generator.cancel(waiting)
        generator.refit(trainer.engine)
    return found


LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any] | None]] = {
    "one process": ((), None),
    "tp-sp, engine pp": ((TP2, SP), {PP: 2}),
    "fsdp, engine tp": ((FSDP,), {TP: 2}),
    "zero": ((ZERO, GATHER, SMALL_BUCKETS), None),
    "tp-pp, engine tp": ((TP2, PP2), {TP: 2}),
}
"""Keys of the training, and the layout of the engine; None: that of the training."""
WORLDS = dict(zip(LAYOUTS, (1, 2, 2, 2, 4), strict=True))
RUNS = InTurn(before_and_after_training, [(WORLDS[layout], layout) for layout in LAYOUTS])


@pytest.mark.long
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if WORLDS[layout] > 1])
def test_what_an_engine_generates_follows_the_training(layout: str) -> None:
    reference = RUNS.result(1, "one process")
    found = RUNS.result(WORLDS[layout], layout)
    assert [[tokens for tokens, _ in step] for step in found] == [[tokens for tokens, _ in step] for step in reference]
    for step, expected in zip(found, reference, strict=True):
        for (_, logprobs), (_, own_logprobs) in zip(step, expected, strict=True):
            assert logprobs == pytest.approx(own_logprobs, abs=1e-4)
    assert reference[0] != reference[1]


def test_every_element_is_copied_once_from_the_nearest_rank() -> None:
    """A matrix in halves by rows goes into halves by columns; what a rank has itself it does not receive."""
    rows = [{"w": (TensorSlice((4 * rank, 0), (4, 6)),)} for rank in range(2)]
    columns = [{"w": (TensorSlice((0, 3 * rank), (8, 3)),)} for rank in range(2)]
    (copies,) = plan_copies(rows, columns)
    counts = torch.zeros(8, 6)
    for copy in copies:
        counts[copy.tensor_slice.slices] += 1
    assert counts.eq(1).all()
    assert {(copy.source, copy.target) for copy in copies} == {(0, 0), (1, 0), (0, 1), (1, 1)}
    (own,) = plan_copies([rows[0] | {"w": (TensorSlice((0, 0), (8, 6)),)}] * 2, columns)
    assert {(copy.source, copy.target) for copy in own} == {(0, 0), (1, 1)}
    with pytest.raises(ValueError, match="no ranks of the trainer have all of w"):
        plan_copies(rows[:1], columns[:1])
