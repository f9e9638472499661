"""Training steps of a real run: tokens/s, model FLOPs utilization (MFU), memory, and where the time goes."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mt_core.config.loading import load_config
from mt_core.config.schema import Config, LoggingConfig
from mt_core.data.loader import BatchReader
from mt_core.plugins import PluginHost
from mt_core.train.callbacks import Callback, Metrics, Run
from mt_core.train.reporting.step_metrics import peak_tflops, unknown_peak
from mt_core.train.trainer import Trainer
from mt_tools.bench.machine import Machine
from mt_tools.bench.report import Case
from mt_tools.bench.training_presets import BenchPreset
from mt_tools.plan.layouts import LayoutPlan, Planner
from mt_tools.plan.machines import get_machine

# -- time of a step by kind of kernel, from torch's profiler -----------------------------------------

KINDS = (
    ("attention", ("attention", "flash", "fmha", "sdpa")),
    ("optimizer", ("adam", "foreach", "multi_tensor")),
    ("loss", ("cross_entropy", "nll", "log_softmax")),
    ("products", ("gemm", "cutlass", "cublas", "nvjet", "addmm", "aten::mm", "aten::bmm", "matmul")),
    ("norms", ("norm",)),
    ("copies", ("memcpy", "memset", "copy_", "fill_", "zero_")),
)
"""The first kind with a pattern that occurs in the kernel's name; kernels without a match are elementwise."""


def kind_of(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, words in KINDS if any(word in lowered for word in words)), "elementwise and others")


def time_shares(step: Callable[[], None], steps: int, device: torch.device) -> dict[str, Any]:
    """{"time_shares": kind -> fraction of the busy time, "idle_share": fraction of the time in which the GPU is idle}.

    On a CPU there is no idle share.
    """
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        if cuda:
            torch.cuda.synchronize()
    if not cuda:
        # self time: an operator's own, without the operators it calls.
        rows = ((row.key, float(row.self_cpu_time_total)) for row in profiler.key_averages())
        return {"time_shares": shares(row for row in rows if row[0].startswith("aten::"))}
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    time_shares = shares((name, end - start) for name, start, end in spans)
    return {"time_shares": time_shares, "idle_share": idle_share([(start, end) for _, start, end in spans])}


def shares(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Kernel name and time -> kind and fraction of the sum, largest first."""
    sums: Counter[str] = Counter()
    for name, seconds in times:
        sums[kind_of(name)] += seconds  # type: ignore[assignment]
    total = sum(sums.values()) or 1.0
    return {kind: seconds / total for kind, seconds in sums.most_common()}


def idle_share(spans: Iterable[tuple[float, float]]) -> float:
    """The fraction of the time from the first start to the last end that no span covers."""
    ordered = sorted(spans)
    if not ordered:
        return 1.0
    busy, reached = 0.0, ordered[0][0]
    # Kernels of several streams may overlap: their union is counted, not their sum.
    for start, end in ordered:
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return 1.0 - busy / max(reached - ordered[0][0], 1e-12)


CONVENTION = "products forward and twice backward, attention over the keys that are seen, recomputation not counted"
WARM_UP = 5
PROFILED = 3


class RandomTokens:
    """Samples of random token ids, as many as requested. left_out: ids in whose place 0 is."""

    def __init__(self, vocabulary: int, sequence: int, left_out: Iterable[int] = ()) -> None:
        self.vocabulary, self.sequence, self.left_out = vocabulary, sequence, list(left_out)

    def __len__(self) -> int:
        return 10**12  # more than any benchmark takes

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        # Labels are the tokens shifted by one.
        ids = np.random.default_rng(index).integers(0, self.vocabulary, self.sequence + 1)
        ids[np.isin(ids, self.left_out)] = 0
        positions, mask = np.arange(self.sequence), np.ones(self.sequence, np.float32)
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask, "position_ids": positions}

    def describe(self, index: int) -> str:
        return f"random ids of seed {index}"


class LastLoss(Callback):
    loss = float("nan")

    def on_step_end(self, run: Run, metrics: Metrics) -> None:
        self.loss = float(metrics["loss"])


class TimedRun:
    """A trainer whose steps are run one at a time."""

    def __init__(self, settings: list[str], preset: str | None, host: PluginHost) -> None:
        loaded = load_config(preset=preset, overrides=settings, host=host)
        vocabulary = loaded.config.model.vocab_size
        assert vocabulary is not None  # each preset names it
        data = RandomTokens(vocabulary, loaded.config.data.seq_length, loaded.config.model.media_token_ids)
        self.last_loss = LastLoss()
        self.trainer = Trainer(loaded, host=host, train_data=data, valid_data={}, callbacks=[self.last_loss])
        self.trainer.model.train()
        steps = self.trainer.engine.remaining_steps()
        self._reader = BatchReader(data, steps, micro_size=loaded.config.train.micro_batch_size, workers=1)
        self._batches = iter(self.trainer.engine.device_batches.ahead(self._reader))

    def step(self) -> None:
        self.trainer.take_step(next(self._batches))

    def timed_steps(self, count: int) -> list[float]:
        """Seconds per step; on a GPU between events, since the host runs ahead."""
        if self.trainer.engine.device.type != "cuda":
            return [_elapsed(self.step) for _ in range(count)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        # Step by step in the stream: no synchronization between steps, which would empty the queue.
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]

    def close(self) -> None:
        self._reader.close()


def measure_training(
    name: str, preset: BenchPreset, precision: str, machine: Machine, steps: int, more: list[str], host: PluginHost
) -> Iterator[Case]:
    """One case: the median of `steps` steps after a warm-up, right after they were timed and again with the rest.

    more: the user's settings, applied last.
    """
    settings = [*preset.settings(precision, small=not machine.is_gpu), *more]
    run = TimedRun(settings, preset.preset, host)
    try:
        for _ in range(WARM_UP):
            run.step()
        if machine.is_gpu:
            # After the warm-up, which compiles and tunes kernels with memory of its own.
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(run.timed_steps(steps))
        config = run.trainer.config
        peak = peak_bytes(config) if machine.is_gpu else None
        tokens = config.data.seq_length * (config.train.global_batch_size or config.train.micro_batch_size)
        measured = {
            "name": f"{name} {precision}",
            "settings": settings,
            "main_weights": getattr(config.optimizer, "main_weights", None),  # as resolved where `settings` leave auto
            "steps": steps,
            "tokens_per_second": tokens / seconds,
            "step_ms": seconds * 1e3,
            "loss": run.last_loss.loss,
        }
        # A run that is ended while it profiles or plans has written what it was started for.
        yield measured
        shares = time_shares(run.step, PROFILED, machine.device)
    finally:
        run.close()
    plan = Planner(config, host, get_machine("h200")).plan(config, 1)
    yield {
        **measured,
        **_speed(tokens / seconds, flops_per_token(config, host), machine, config.logging),
        # The reference value of the preset, which is one of a GPU.
        **({"goal_tokens_per_second": preset.goals.get(precision)} if machine.is_gpu else {}),
        **_memory(peak, plan),
        **shares,
    }


def peak_bytes(config: Config) -> int:
    """Peak memory of the steps since the statistics were reset. A replayed graph allocates nothing: its memory is what
    torch reserves for it."""
    in_graphs = config.train.cuda_graphs != "none"
    return torch.cuda.max_memory_reserved() if in_graphs else torch.cuda.max_memory_allocated()


def flops_per_token(config: Config, host: PluginHost) -> float:
    """Counted on the meta device, by CONVENTION. A loss without logits computes more, which does not count."""
    train = config.train.model_copy(update={"loss": "cross_entropy"})
    counted = config.model_copy(update={"train": train})
    return Planner(counted, host, get_machine("h200")).plan(counted, 1).flops_per_token


def _speed(tokens: float, flops_per_token: float, machine: Machine, logging: LoggingConfig) -> dict[str, Any]:
    rate = tokens * flops_per_token
    return {
        "gflops_per_token": flops_per_token / 1e9,
        "convention": CONVENTION,
        "of_gemm_peak": rate / machine.gemm_rate,
        **(utilization(rate, machine.name, peak_tflops(machine.device, logging)) if machine.is_gpu else {}),
    }


def utilization(rate: float, device: str, peak: float | None) -> dict[str, Any]:
    """MFU of `rate` FLOP/s, with the peak in TFLOP/s that it is a fraction of; the reason where no peak is known."""
    if peak is None:
        return {"mfu_missing": unknown_peak(device)}
    return {"mfu": rate / (peak * 1e12), "mfu_peak_tflops": peak}


def _memory(peak: int | None, plan: LayoutPlan) -> dict[str, float]:
    planned = plan.largest.total
    if peak is None:
        return {"planned_gb": planned / 1e9}
    return {"peak_gb": peak / 1e9, "planned_gb": planned / 1e9, "peak_over_planned": peak / planned}


def _elapsed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
