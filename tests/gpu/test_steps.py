"""On a GPU: steps with CUDA graphs, copies of batches ahead, and what neither may wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mt_core.config.loading import LoadedConfig, load_config
from mt_core.plugins import load_plugins
from mt_core.train import Callback, Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYERS, MICRO_BATCHES = 2, 2
SMALL = [
    f"model.num_layers={LAYERS}",
    "model.hidden_size=256",
    "model.num_attention_heads=4",
    "data.seq_length=128",
    "data.num_workers=0",
    "train.micro_batch_size=2",
    f"train.global_batch_size={2 * MICRO_BATCHES}",
    "train.train_iters=10",
    "train.eval_interval=5",
    "train.eval_iters=1",
    "train.sample_prompt=null",
    "checkpoint.save_interval=null",
    "logging.progress=none",
    "precision.dtype=bf16",
    "optimizer.exp_avg_dtype=bf16",
]
EXPERTS = ["model.moe={num_experts=8, moe_ffn_hidden_size=128, moe_shared_expert_intermediate_size=128}"]
GROUPED = "model.moe.moe_grouped_gemm=grouped"
GRAPHS = ["train.cuda_graphs=blocks", "train.cuda_graph_warmup_steps=2"]
STEP_GRAPH = ["train.cuda_graphs=step", "train.cuda_graph_warmup_steps=2"]


def config(*more: str) -> LoadedConfig:
    return load_config(preset="gpt-tiny", overrides=[*SMALL, *more], host=load_plugins())


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, run, metrics) -> None:
        self.seen.append(metrics["loss"])


def losses(*more: str) -> list[float]:
    recorder = Losses()
    Trainer(config(*more), callbacks=[recorder]).train()
    return recorder.seen


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["train.compile=blocks"],
        ["optimizer.main_weights=copies"],
        ["precision.accumulate_allreduce_grads_in_fp32=false"],
        ["parallel.use_distributed_optimizer=true"],
        ["model.position_embedding_type=alibi"],
        EXPERTS,
        [*EXPERTS, GROUPED],
        ["precision.fp8_format=hybrid", "precision.fp8_min_features=1"],
        ["precision.fp8_format=hybrid", "precision.fp8_recipe=delayed", "precision.fp8_min_features=1"],
    ],
    ids=[
        *("bf16", "compiled", "copies", "gradients in bf16", "buckets", "alibi", "experts", "grouped experts"),
        *("fp8", "fp8 delayed"),
    ],
)
@pytest.mark.parametrize("graphs", [GRAPHS, STEP_GRAPH], ids=["blocks", "step"])
def test_graphs_train_as_layers_do(more: list[str], graphs: list[str]) -> None:
    if {"precision.fp8_format=hybrid", GROUPED} & {*more} and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a Hopper GPU")
    assert losses(*more, *graphs) == pytest.approx(losses(*more), rel=2e-3)


def test_remainders_are_kept_by_default() -> None:
    assert Trainer(config()).config.optimizer.main_weights == "remainders"


@contextmanager
def steps_of(trainer: Trainer, warm: int) -> Iterator[object]:
    """A function that takes a step, after `warm` others."""
    trainer.model.train()
    batches = trainer.engine.read_batches(trainer.train_data, trainer.engine.remaining_steps())
    ahead = trainer.engine.device_batches.ahead(batches)

    def step() -> None:
        trainer.take_step(next(ahead))

    for _ in range(warm):
        step()
    yield step
    batches.close()


@pytest.mark.parametrize("more", [[], EXPERTS, GRAPHS, STEP_GRAPH], ids=["plain", "experts", "blocks", "step"])
def test_a_steady_step_launches_without_waiting(more: list[str]) -> None:
    """The loss of the step before is waited for by its event, which is no synchronization of the device."""
    trainer = Trainer(config("train.eval_interval=null", *more))
    with steps_of(trainer, 5) as step:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("graphs", "expected"), [(GRAPHS, 2 * LAYERS * MICRO_BATCHES), (STEP_GRAPH, 1)], ids=["blocks", "step"]
)
def test_launches_of_graphs_in_a_step(graphs: list[str], expected: int) -> None:
    """A layer is two launches, of its forward and its backward pass; a step is one."""
    trainer = Trainer(config("train.eval_interval=null", *graphs))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with steps_of(trainer, 5) as step, torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    launches = sum(event.count for event in profile.key_averages() if event.key == "cudaGraphLaunch")
    assert launches == expected


def test_batches_are_copied_on_a_stream_of_their_own() -> None:
    trainer = Trainer(config("train.eval_interval=null"))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with steps_of(trainer, 3) as step, torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copying = {event.device_resource_id for event in events if "HtoD" in event.name and "Pinned" in event.name}
    computing = {event.device_resource_id for event in events if "gemm" in event.name or "nvjet" in event.name}
    assert copying - computing


def test_flash_attention_4() -> None:
    from tests.core.nn.kernels.test_attention_backends import request
    from tests.gpu.test_kernels import assert_same_attention, documents

    from mt_core.nn.attention import AttentionPattern
    from mt_core.nn.attention_backends.flash import build_flash_4, supports_flash_4

    asked = request(head_dim=64)
    answer = supports_flash_4(asked)
    if answer is not True:
        pytest.skip(str(answer))
    for pattern in (AttentionPattern(), AttentionPattern(segment_ids=documents())):
        assert_same_attention(build_flash_4(asked), pattern)
