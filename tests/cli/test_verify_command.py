"""`mt verify`: a layout that computes the same, a resumed run, and what is refused."""

from __future__ import annotations

import pytest
import torch

from mt_core.verify.compare import compare
from mt_core.verify.record import RunRecord

pytestmark = pytest.mark.dist

CONFIG = """
preset = "gpt-tiny"
[parallel]
tensor_model_parallel_size = 2
use_distributed_optimizer = true
[train]
train_iters = 10
global_batch_size = 32
"""


def test_a_layout_is_verified_by_its_own_configuration(mt, tmp_path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    outcome = mt("verify", "layout", tmp_path / "run.toml")
    assert outcome.code == 0, outcome.err
    assert "4 processes, tensor_model_parallel_size 2, use_distributed_optimizer" in outcome.out
    assert outcome.out.rstrip().endswith("the same")


def test_a_resumed_run_is_verified_bit_for_bit(mt, tmp_path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    outcome = mt("verify", "resume", tmp_path / "run.toml")
    assert outcome.code == 0, outcome.out + outcome.err
    assert "(allowed 0e+00)" in outcome.out


def test_a_run_resumed_under_another_layout_is_verified(mt, tmp_path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    outcome = mt("verify", "resume", tmp_path / "run.toml", "--then", "parallel.pipeline_model_parallel_size=2")
    assert outcome.code == 0, outcome.out + outcome.err


def test_a_layout_is_keys_of_parallel(mt) -> None:
    outcome = mt("verify", "layout", "--preset", "gpt-tiny", "--set", "train.train_iters=9", "--against", "train.lr=1")
    assert outcome.code == 2
    assert "a layout is made of keys such as parallel.context_parallel_size=2" in outcome.err


def record(weight: float) -> RunRecord:
    return RunRecord([1.0], [2.0], {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.full((2,), weight)})


def test_the_first_difference_is_told() -> None:
    wrong = [difference for difference in compare(record(1.001), record(1.0)) if difference.too_large]
    assert [str(difference) for difference in wrong] == ["weights b: 1.0e-03 (allowed 1e-05)"]


def test_a_tensor_that_one_side_lacks_is_a_difference() -> None:
    short = record(1.0)
    del short.weights["b"]
    (missing,) = [difference for difference in compare(short, record(1.0)) if difference.too_large]
    assert str(missing) == "weights b: missing on one side"
