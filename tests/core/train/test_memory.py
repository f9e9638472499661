"""A model that cannot fit is refused with the numbers, before its memory is allocated."""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path

import pytest
import torch

from mt_core.config.loading import load_config
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.optim.finalize_grads import TiedWeights
from mt_core.optim.param_and_grad_buffer import ParamAndGradBuffer
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train import memory
from mt_core.train.build import build_initialized_model, build_model, build_weights
from mt_core.train.memory import free_bytes, needed_bytes

GIB = 2**30
SMALL = ("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=4", "model.vocab_size=263")


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return load_plugins()


def config(preset: str, *settings: str) -> Config:
    return load_config(preset=preset, overrides=["train.train_iters=20", *settings], host=load_plugins()).config


def address_space() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_175_billion_parameters_are_refused_within_seconds(host: PluginHost, monkeypatch) -> None:
    monkeypatch.setattr(memory, "_available_memory", lambda: 16.0 * GIB)
    monkeypatch.setattr(memory, "_left_of_cgroup", lambda: None)
    chosen = config("gpt3-175b", "model.vocab_size=50257", "precision.dtype=bf16")
    started, before = time.monotonic(), address_space()
    with pytest.raises(ConfigError, match="train.check_memory=false") as caught:
        build_initialized_model(chosen, ParallelContext(params_dtype=torch.bfloat16), host)
    assert time.monotonic() - started < 60  # drawing them takes most of an hour
    # `caught` holds the model by its traceback. What does not fit has no memory, be it untouched.
    assert address_space() - before < 32 * GIB
    found = re.search(r"hold ([\d,]+) parameters in ([\d.]+) GiB .*, and 16.0 GiB of cpu memory", str(caught.value))
    assert found is not None
    parameters, gib = int(found[1].replace(",", "")), float(found[2])
    assert parameters == pytest.approx(175e9, rel=0.01)
    # bf16: weights 2, gradients 4, fp32 copies 4 and Adam's moments 8 bytes a parameter.
    assert gib == pytest.approx(parameters * 18 / GIB, rel=0.001)


def test_the_run_starts_where_it_is_configured_to(host: PluginHost, monkeypatch) -> None:
    monkeypatch.setattr(memory, "_available_memory", lambda: 1000.0)
    with pytest.raises(ConfigError, match="rank 0 of 1 would hold"):
        build_initialized_model(config("gpt-tiny", *SMALL), ParallelContext(), host)
    anyway = config("gpt-tiny", *SMALL, "train.check_memory=false")
    assert not any(p.is_meta for p in build_initialized_model(anyway, ParallelContext(), host).parameters())


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("precision.dtype=bf16",),
        ("precision.dtype=bf16", "optimizer.main_weights=remainders"),
        ("precision.dtype=bf16", "precision.accumulate_allreduce_grads_in_fp32=false"),
        ("optimizer.optimizer=lion",),
    ],
    ids=lambda settings: "+".join(settings),
)
@pytest.mark.parametrize("shards", [1, 4])
def test_the_estimate_is_what_buckets_and_the_optimizer_hold(host: PluginHost, settings, shards: int) -> None:
    """Up to the padding of buckets."""
    chosen = config("gpt-tiny", *SMALL, *settings)
    parallel = chosen.parallel.model_copy(update={"use_distributed_optimizer": True})
    chosen = chosen.model_copy(update={"parallel": parallel})
    dtype = torch.bfloat16 if "precision.dtype=bf16" in settings else torch.float32
    ctx = ParallelContext(params_dtype=dtype, axes={name: Axis(shards, 0) for name in ("dp_cp", "shard")})
    model = build_model(chosen, ctx, host)
    needed = needed_bytes(model, chosen, ctx, host)
    weights = build_weights(chosen, model, ctx, TiedWeights(), host)
    assert isinstance(weights, ParamAndGradBuffer)
    own = sum(main.numel() for _, main in weights.named_parameters())
    beside = 2 if "optimizer.main_weights=remainders" in settings else 4
    copies = 0 if dtype == torch.float32 else beside * own
    moments = 4 * own if "optimizer.optimizer=lion" in settings else 8 * own
    assert needed.weights == pytest.approx(sum(b.weights.nbytes for b in weights.buckets), rel=0.02)
    assert needed.gradients == pytest.approx(sum(b.gradients.nbytes for b in weights.buckets), rel=0.02)
    assert needed.state == pytest.approx(copies + moments, rel=0.05)


def test_ranks_of_a_machine_share_its_memory() -> None:
    alone = free_bytes(torch.device("cpu"), {})
    assert alone
    assert free_bytes(torch.device("cpu"), {"LOCAL_WORLD_SIZE": "4"}) == pytest.approx(alone / 4, rel=0.3)
