"""What `optimizer.main_weights=auto` stands for, and that the run says so."""

from __future__ import annotations

import pytest

from mt_core.config.loading import load_config
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.request import KernelName
from mt_core.train import Trainer
from mt_core.train.auto_choices import updates_in_one_kernel, with_resolved_main_weights
from mt_core.train.reporting.run_summary import run_summary

pytest.importorskip("triton")

BF16 = "precision.dtype=bf16"
IN_BF16 = "precision.accumulate_allreduce_grads_in_fp32=false"
TP2 = "parallel.tensor_model_parallel_size=2"


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ([BF16], "remainders"),
        ([BF16, "parallel.use_distributed_optimizer=true"], "remainders"),
        ([BF16, TP2], "remainders"),
        ([BF16, IN_BF16], "remainders"),
        ([BF16, IN_BF16, TP2], "copies"),
        ([BF16, "parallel.use_torch_fsdp2=true"], "copies"),
        ([BF16, "optimizer.main_weights=copies"], "copies"),
        (["precision.dtype=fp16"], "copies"),
        ([], "copies"),
        ([BF16, "optimizer.optimizer=lion"], None),
    ],
)
def test_what_auto_stands_for(settings, form, host, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = load_config(preset="gpt-tiny", overrides=settings, host=host).config
    on_gpu = with_resolved_main_weights(config, in_one_kernel=True)
    assert getattr(on_gpu.optimizer, "main_weights", None) == form
    elsewhere = with_resolved_main_weights(config, in_one_kernel=False)
    assert getattr(elsewhere.optimizer, "main_weights", "copies") == "copies"


@pytest.mark.parametrize(
    ("device", "dtype", "wanted", "expected"),
    [
        ("cuda", "bfloat16", {}, True),
        ("cuda", "bfloat16", {"adamw": "torch"}, False),
        ("cuda", "float16", {}, False),
        ("cpu", "bfloat16", {}, False),
    ],
)
def test_where_one_kernel_updates_the_weights(
    device: str, dtype: str, wanted: dict[KernelName, str], expected: bool
) -> None:
    assert updates_in_one_kernel(Kernels(wanted, device, dtype)) == expected


def test_a_run_says_what_is_kept(tiny) -> None:
    assert next(iter(run_summary(Trainer(tiny(BF16))))).endswith(", master weights copies")
    assert "master weights" not in next(iter(run_summary(Trainer(tiny()))))
