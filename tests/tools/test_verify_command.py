"""`mt verify`: a layout that computes the same, a resumed run, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.covering import EXHAUSTIVE

from mt_core.optim.finalize_grads import GradFinalizer
from mt_tools.commands.verify import _report
from mt_tools.verify import run_record
from mt_tools.verify.comparison import Difference, compare
from mt_tools.verify.run_record import RunRecord

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CONFIG = """
preset = "gpt-tiny"
[parallel]
tensor_model_parallel_size = 2
use_distributed_optimizer = true
[train]
train_iters = 20
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
    on_two = ("--set", "parallel.tensor_model_parallel_size=1")
    then = ("--then", "parallel.pipeline_model_parallel_size=2")
    outcome = mt("verify", "resume", tmp_path / "run.toml", *on_two, *then)
    assert outcome.code == 0, outcome.out + outcome.err


def test_a_layout_is_keys_of_parallel(mt) -> None:
    outcome = mt("verify", "layout", "--preset", "gpt-tiny", "--set", "train.train_iters=20", "--against", "train.lr=1")
    assert outcome.code == 2
    assert "a layout is made of keys such as parallel.context_parallel_size=2" in outcome.err


ON_MANY_GPUS = """
preset = "gpt3-175b"
[parallel]
tensor_model_parallel_size = 8
sequence_parallel = true
pipeline_model_parallel_size = 16
use_distributed_optimizer = true
[train]
train_iters = 10
global_batch_size = 64
cuda_graphs = "blocks"
compile = "blocks"
[precision]
dtype = "bf16"
"""


@pytest.mark.parametrize(
    "settings",
    [
        # That `shrink` resets the backend and keeps stages uneven: test_small_configuration.py.
        pytest.param(("model.attention_backend=cudnn",), marks=EXHAUSTIVE),
        ("parallel.pipeline_model_parallel_layout=Et*6|(t*6|)*14t*6L",),
        pytest.param(
            ("parallel.num_layers_in_first_pipeline_stage=5", "parallel.num_layers_in_last_pipeline_stage=7"),
            marks=EXHAUSTIVE,
        ),
    ],
)
def test_a_layout_for_many_gpus_is_verified(mt, tmp_path, settings: tuple[str, ...]) -> None:
    (tmp_path / "run.toml").write_text(ON_MANY_GPUS)
    chosen = [word for setting in settings for word in ("--set", setting)]
    outcome = mt("verify", "layout", tmp_path / "run.toml", *chosen, "--steps", 2)
    assert outcome.code == 0, outcome.out + outcome.err
    assert "8 processes, tensor_model_parallel_size 2, sequence_parallel, pipeline_model_parallel_size 4" in outcome.out
    assert "pipeline_model_parallel_size 16 -> 4" in outcome.out
    assert outcome.out.rstrip().endswith("the same")


def record_without_partial_gradients(
    rank: int, world: int, tree: Mapping[str, Mapping[str, Any]], steps: int, run_dir: Path | None
) -> RunRecord | None:
    """What tensor-parallel ranks saw of a gradient is not summed: a layout that computes something else."""
    if world > 1:
        GradFinalizer.finalize_model_grads = lambda self, named: None  # type: ignore[method-assign]
    return RECORD_ON_RANK(rank, world, tree, steps, run_dir)


RECORD_ON_RANK = run_record.record_on_rank


def test_a_wrong_layout_is_exit_code_1_and_named(mt, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "record_on_rank", record_without_partial_gradients)
    (tmp_path / "run.toml").write_text(CONFIG)
    outcome = mt("verify", "layout", tmp_path / "run.toml", "--set", "parallel.sequence_parallel=true", "--steps", 1)
    assert outcome.code == 1, outcome.out + outcome.err
    last = outcome.out.rstrip().splitlines()[-1]
    assert "differ; the first: " in last
    assert "(allowed " in last
    assert "the same" not in outcome.out


def test_a_rule_that_the_small_run_breaks_is_reported_without_a_traceback(mt) -> None:
    pattern = "model.window_attn_skip_freq=[1]*12+[0]*12"
    outcome = mt("verify", "layout", "--preset", "gpt-oss-20b", "--set", "train.train_iters=9", "--set", pattern)
    assert outcome.code == 2
    assert "made small to be checked, breaks a rule: model.window_attn_skip_freq" in outcome.err


def record(weight: float) -> RunRecord:
    return RunRecord([1.0], [2.0], {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.full((2,), weight)})


def test_the_first_difference_is_reported() -> None:
    wrong = [difference for difference in compare(record(1.001), record(1.0)) if difference.too_large]
    assert [str(difference) for difference in wrong] == ["weights b: 1.0e-03 (allowed 1e-05)"]


def test_a_difference_that_is_no_number_is_the_worst(capsys) -> None:
    assert _report([Difference("weights", name, off, 1e-5) for name, off in (("a", 1e-3), ("b", math.nan))]) == 1
    assert "2 x weights        worst weights b: nan" in capsys.readouterr().out


def test_a_tensor_that_one_side_lacks_is_a_difference() -> None:
    short = record(1.0)
    del short.weights["b"]
    (missing,) = [difference for difference in compare(short, record(1.0)) if difference.too_large]
    assert str(missing) == "weights b: missing on one side"
