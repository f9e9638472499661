"""Engines over random weights, which are the same in every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tests.ckpt.convert_cases import MODELS
from torch import nn

from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.nn.layout import initialize
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.schedule_tables import ranks_of_stages
from mt_core.plugins import load_plugins
from mt_core.train import build
from mt_core.train.pipelining import build_stages
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine, PlacedStages
from mt_infer.lockstep import LockstepEngine
from mt_infer.requests import TokenEvent
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.speculation.building import DraftModel

OPTIONS = {"cache_memory_gb": 0.05, "cache_block_size": 4, "max_requests": 4, "max_tokens_per_step": 16}
"""Small: prompts take several steps, and sequences wait."""


def configuration(model: str | Mapping[str, Any], **sections: Mapping[str, Any]) -> Config:
    """A model of tests.ckpt.convert_cases by name, or its keys."""
    keys = MODELS[model] if isinstance(model, str) else model
    inference = {**OPTIONS, **sections.pop("inference", {})}
    return config_from_dict({"model": keys, "inference": inference, **sections}, load_plugins())


def new_model(config: Config) -> nn.Module:
    """With initial weights, in this process alone."""
    ctx = ParallelContext()
    model = build.build_model(config, ctx, load_plugins())
    initialize(model, 1, ctx)
    return model.eval()


def randomize(model: nn.Module, scale: float = 0.2) -> None:
    """Weights far from their initial values, norms and biases included, so that no term can hide."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("token_experts"):  # numbers of experts
                continue
            if name.endswith(("A_log", "dt_bias")):  # rates and time steps stay as large as they were
                parameter.add_(0.1 * noise)
            else:
                is_norm = parameter.ndim == 1 and bool((parameter == 1).all())
                parameter.copy_(1 + 0.1 * noise if is_norm else scale * noise)


def engine_of(
    config: Config,
    *,
    longest: int = 64,
    collective: bool = False,
    randomized: bool = False,
    model: nn.Module | None = None,
    draft_model: DraftModel | None = None,
) -> InferenceEngine:
    """collective: the layout of config.parallel, over the world of this process. model: in place of a new one."""
    if not collective:
        model = model or new_model(config)
        if randomized:
            randomize(model)
        return InferenceEngine(
            model,
            None,
            ParallelContext(),
            config.section(InferenceConfig),
            longest=longest,
            draft_model=draft_model,
            batch_invariant=config.numerics.batch_invariant,
        )
    host = load_plugins()
    device = torch.device("cpu")
    ctx = build.build_context(config, device)
    stages = build_stages(config, ctx, host)
    model = build.build_model(config, ctx, host, None if stages is None else stages.own)
    initialize(model, 1, ctx)
    placed = None
    if stages is not None:
        placed = PlacedStages(stages.all, ranks_of_stages(len(stages.all), ctx.pp.size, stages.schedule.placement))
    return InferenceEngine(
        model,
        None,
        ctx,
        config.section(InferenceConfig),
        longest=longest,
        placed=placed,
        batch_invariant=config.numerics.batch_invariant,
    )


def prompts(*lengths: int, vocab: int = 60) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, vocab, (length,), generator=generator).tolist() for length in lengths]


def run(
    engine: InferenceEngine | LockstepEngine,
    texts: Sequence[Sequence[int]],
    sampling: SamplingParameters | Sequence[SamplingParameters],
    inputs: Sequence[Mapping[str, torch.Tensor]] = (),
) -> list[list[TokenEvent]]:
    """The events of each request. inputs: what each is conditioned by."""
    each = [sampling] * len(texts) if isinstance(sampling, SamplingParameters) else sampling
    beside = inputs or [None] * len(texts)
    numbers = [engine.add(text, own, given) for text, own, given in zip(texts, each, beside, strict=True)]
    events: dict[int, list[TokenEvent]] = {number: [] for number in numbers}
    while not engine.is_idle:
        for event in engine.step():
            events[event.request].append(event)
    return [events[number] for number in numbers]


def tokens_of(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def logprobs_of(events: Sequence[TokenEvent]) -> list[float]:
    return [event.logprobs.token for event in events if event.logprobs is not None]
