"""Routing replay (rl.routing_replay): experts that routers chose while completions were drawn are used in training.

A forward pass in another order of sums chooses other experts for some tokens, and the probabilities of what follows
jump. With the experts of generation they differ as those of a dense model do (R3: Ma et al., 2025). Router weights
are those of the training pass, so that gradients reach the router.

A model transform gives the model the input `routed_experts` [B, S, routers x k] and lets its routers note their choice.
Routers are recognized by what they have, since this package does not import mt_moe.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from mt_core.config.layer_pattern import layers_with_experts
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.parallel.pipeline.stage import Stage
from mt_tune.rl.config import RLConfig
from mt_tune.rl.recorded import Reduction
from mt_tune.rl.routing_record import RoutingRecorder
from mt_tune.rl.samples import ROUTED_EXPERTS


def has_replay(config: Config) -> bool:
    return config.section(RLConfig).routing_replay


def add_replay(model: nn.Module, config: Config, context: ModelBuildContext) -> nn.Module:
    """The model with routers that note and replay. Raises ConfigError for one without routers, or no causal decoder."""
    experts = getattr(config.model, "moe", None)
    if not experts:
        raise ConfigError(
            f"rl.routing_replay=true is of mixtures of experts, and model.family={config.model.family} has no "
            "model.moe; set it to false"
        )
    if not hasattr(model, "run_stage") or not hasattr(model, "decode_stage"):
        raise ConfigError(
            f"rl.routing_replay=true needs a causal decoder, and model.family={config.model.family} is none"
        )
    for router in routers_of(model):
        router.__class__ = replaying_router(cast(type, type(router)))
    model.__class__ = replaying_model(cast(type, type(model)))
    return model


def routers_of(model: nn.Module) -> Iterator[Any]:
    """The routers of this rank's layers, by layer."""
    routers = [module for module in model.modules() if hasattr(module, "choose") and hasattr(module, "expert_bias")]
    return iter(sorted(routers, key=lambda router: cast(Any, router).layer))


# -- routers -----------------------------------------------------------------------------------------


class ReplayingRouter:
    """Precedes the class of a router."""

    replayed: Tensor | None = None
    """[B, S, k] experts of tokens, -1 where the router chooses."""
    noted: list[Tensor] | None = None
    """The choices [T, k] of each call, while they are noted."""
    changed: list[Tensor]
    """[] of each replay: the share of tokens for which it would have chosen other experts."""

    def choose(self, logits: Tensor, share: Any, ids: Tensor | None = None) -> Tensor:
        """[T, E] -> experts [T, k]"""
        experts: Tensor = super().choose(logits, share, ids)  # type: ignore[misc]
        if self.noted is not None:
            self.noted.append(experts.to(torch.int16))
        if self.replayed is None:
            return experts
        replayed = _own(self.replayed.flatten(0, 1), len(experts), self.ctx.tp)  # type: ignore[attr-defined]
        known = replayed >= 0
        if torch.is_grad_enabled():
            differs = (experts.sort(1).values != replayed.sort(1).values).any(1) & known[:, 0]
            self.changed.append(differs.sum() / known[:, 0].sum().clamp(min=1))
        return torch.where(known, replayed, experts)


def _own(tokens: Tensor, count: int, tp: Any) -> Tensor:
    """Those that this rank routes: equal slices over tensor-parallel ranks, of which the last may be short."""
    first = min(-(-len(tokens) // tp.size) * tp.rank, len(tokens))
    return tokens[first : first + count].long()


@cache
def replaying_router(base: type) -> type:
    return type(f"Replaying{base.__name__}", (ReplayingRouter, base), {})


# -- models ------------------------------------------------------------------------------------------


class ReplayingModel:
    """Precedes the class of a causal decoder."""

    replays = True
    """False for models that choose themselves, such as a reference."""
    recorder: RoutingRecorder | None = None
    _given: Tensor | None = None

    def forward(self, *arguments: Any, routed_experts: Tensor | None = None, **options: Any) -> Any:
        self._given = routed_experts
        return super().forward(*arguments, **options)  # type: ignore[misc]

    def run_stage(
        self, stage: Stage, hidden: Any, *arguments: Any, routed_experts: Tensor | None = None, **options: Any
    ) -> Any:
        replayed = self._given if routed_experts is None else routed_experts
        self._given = None
        routers = list(routers_of(cast(nn.Module, self)))
        for router in routers:
            router.replayed, router.changed = None, getattr(router, "changed", [])
            if replayed is not None and self.replays:
                k = router.config.moe_router_topk
                # Slots are those of all layers with experts; a stage has some of them.
                slot = self._slots().index(router.layer)
                router.replayed = replayed[..., slot * k : (slot + 1) * k]
        return super().run_stage(stage, hidden, *arguments, **options)  # type: ignore[misc]

    def decode_stage(self, stage: Stage, hidden: Any, cache: Any) -> Any:
        if self.recorder is None:
            return super().decode_stage(stage, hidden, cache)  # type: ignore[misc]
        routers = list(routers_of(cast(nn.Module, self)))
        for router in routers:
            router.noted = []
        try:
            out = super().decode_stage(stage, hidden, cache)  # type: ignore[misc]
            self.recorder.add(cache, [torch.cat(router.noted) for router in routers])
        finally:
            for router in routers:
                router.noted = None
        return out

    def _slots(self) -> list[int]:
        """Numbers of the layers with experts."""
        config = cast(Any, self).config
        frequency = config.moe.get("moe_layer_freq", 1)
        return [layer for layer, has in enumerate(layers_with_experts(frequency, config.num_layers)) if has]


@cache
def replaying_model(base: type) -> type:
    inputs = (*base.inputs, ROUTED_EXPERTS)  # type: ignore[attr-defined]
    return type(f"Replaying{base.__name__}", (ReplayingModel, base), {"inputs": inputs})


def changed_shares(model: nn.Module) -> Iterator[tuple[str, float, Reduction]]:
    """A metric of each replay in training since the last call."""
    for router in routers_of(model):
        changed, router.changed = getattr(router, "changed", []), []
        yield from (("sampling/routing_changed_share", float(share), "mean") for share in changed)
