"""Converts a dense checkpoint to MoE (Komatsuzaki et al., Sparse Upcycling, 2022; granularity: He et al., 2024).

Every dense feed-forward becomes an MoE of E experts of width F / g. The F inner channels are cut into g shards. The
experts form E / g groups, each with one expert per shard. The router has one random row for each group, repeated for
its experts, so that a token with k experts selects k / g whole groups. The weights sum to 1 over the k experts, thus to
1 / g over the experts of each shard; the weights are scaled by g, so the sum over experts is the dense feed-forward's
output for any router logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.checks import divisors, listed
from mt_core.config.loading import config_from_dict
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.activations import is_gated
from mt_core.nn.layout import stream_seed
from mt_core.plugins import PluginHost
from mt_moe.config import read_moe_config

MODEL = "model."
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Upcycling:
    """num_experts: in every layer. granularity: dense width over expert width. topk: experts of a token, a multiple of
    granularity; default: 2 granularity, at most num_experts. seed: of the routers' weights. moe: further keys of
    model.moe, such as losses."""

    num_experts: int
    granularity: int = 1
    topk: int | None = None
    seed: int = 0
    moe: Mapping[str, Any] = field(default_factory=dict)

    @property
    def experts_of_token(self) -> int:
        return self.topk or min(2 * self.granularity, self.num_experts)

    def check(self, ffn_size: int) -> None:
        """Raise ConfigError for numbers that are inconsistent."""
        grain = self.granularity
        if self.num_experts < 1 or grain < 1:
            raise ConfigError(f"num_experts={self.num_experts} and granularity={grain} have to be at least 1")
        if ffn_size % grain:
            raise ConfigError(
                f"granularity={grain} does not divide the dense feed-forward's width {ffn_size}; it can be "
                f"{listed(divisors(ffn_size))}"
            )
        if self.num_experts % grain:
            raise ConfigError(
                f"num_experts={self.num_experts} is no multiple of granularity={grain}: every shard of the dense "
                "feed-forward needs as many experts as any other"
            )
        topk = self.experts_of_token
        if topk % grain or not grain <= topk <= self.num_experts:
            raise ConfigError(
                f"topk={topk} has to be a multiple of granularity={grain} from {grain} to "
                f"num_experts={self.num_experts}, so that a token sees every shard equally often"
            )

    def options(self, ffn_size: int) -> dict[str, Any]:
        """`model.moe` of the new model. Raises ConfigError."""
        self.check(ffn_size)
        settings: dict[str, Any] = {
            "num_experts": self.num_experts,
            "moe_router_topk": self.experts_of_token,
            "moe_ffn_hidden_size": ffn_size // self.granularity,
            "moe_router_bias": False,
        }
        if self.granularity > 1:
            settings["moe_router_topk_scaling_factor"] = float(self.granularity)
        if self.experts_of_token == 1:
            # The softmax of one logit is 1 and has no gradient; a sigmoid would not be 1.
            raise ConfigError("topk=1 leaves the router no weight that adds up to 1 and has a gradient; use 2 or more")
        if conflicts := sorted({*settings, "moe_router_topk_scaling_factor"} & set(self.moe)):
            raise ConfigError(
                f"model.moe.{conflicts[0]}={self.moe[conflicts[0]]} is what upcycling sets itself; leave it out"
            )
        config = read_moe_config({**settings, **self.moe})
        for key, allowed in ALLOWED.items():
            if getattr(config, key) != allowed:
                raise ConfigError(
                    f"model.moe.{key}={getattr(config, key)} changes what the model computes; to start where the "
                    f"dense one stands it has to be {allowed}"
                )
        return {**settings, **self.moe}


ALLOWED: Mapping[str, Any] = {
    "moe_layer_freq": 1,
    "moe_latent_size": None,
    "moe_router_pre_softmax": False,
    "moe_router_num_groups": None,
    "moe_expert_capacity_factor": None,
    "moe_shared_expert_intermediate_size": None,
}
"""Options that have to be at their defaults: others would change the sum of the weights, or add other terms."""


class UpcycledReader:
    """A `CheckpointReader` of the MoE model over one of the dense model, one tensor at a time.

    Optimizer state belongs to the dense weights and is dropped. Raises ConfigError for a model that cannot have experts
    or already has some, CheckpointError for a checkpoint without feed-forwards.
    """

    def __init__(self, dense: CheckpointReader, upcycling: Upcycling, host: PluginHost) -> None:
        self.dense, self.upcycling = dense, upcycling
        model = _dense_model(dense, host)
        self._blocks = 2 if is_gated(model.activation) else 1
        options = upcycling.options(model.ffn_size)
        config = dense.metadata["config"]
        self._metadata = {**dense.metadata, "config": {**config, "model": {**config["model"], "moe": options}}}
        self._std: float = model.init_method_std
        self._hidden: int = model.hidden_size
        self._sources = dict(self._named())

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._metadata

    def files(self) -> Mapping[str, bytes]:
        return self.dense.files()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        before = self.dense.shapes()
        return {name: self._shape(name, before.get(source, ())) for name, source in self._sources.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        before = self.dense.dtypes()
        return {name: before[source] for name, source in self._sources.items()}

    def read(self, name: str) -> Tensor:
        """One full tensor on CPU."""
        source = self._sources[name]
        if name.endswith(ROUTER):
            return self._router(name, self.dense.dtypes()[source])
        tensor = self.dense.read(source)
        if ".mlp.experts.linear_fc1." in name:
            return self._repeated(self._first_shards(tensor))
        if name.endswith(".mlp.experts.linear_fc2.weight"):
            # [H, F] -> [g, H, F / g]
            return self._repeated(torch.stack(tensor.chunk(self.upcycling.granularity, 1)))
        if name.endswith(".mlp.experts.linear_fc2.bias"):
            # The bias is added once by the g shards of a group together.
            grain = self.upcycling.granularity
            # [H] -> [g, H]
            return self._repeated((tensor / grain).expand(grain, -1))
        return tensor

    def _named(self) -> Mapping[str, str]:
        """Name in the MoE model -> the dense tensor it is derived from (for a router: the one that gives its dtype)."""
        sources: dict[str, str] = {}
        for name in self.dense.shapes():
            if not name.startswith(MODEL):
                continue
            layer, dense, rest = name.partition(".mlp.linear_fc")
            if not dense:
                sources[name] = name
                continue
            sources[f"{layer}.mlp.experts.linear_fc{rest}"] = name
            # One router for each feed-forward.
            if rest == "1.weight":
                sources[layer + ROUTER] = name
        if not any(name.endswith(ROUTER) for name in sources):
            raise CheckpointError("the checkpoint has no dense feed-forward (decoder.layers.N.mlp.linear_fc1.weight)")
        return sources

    def _shape(self, name: str, dense: tuple[int, ...]) -> tuple[int, ...]:
        experts, grain = self.upcycling.num_experts, self.upcycling.granularity
        if name.endswith(ROUTER):
            return (experts, self._hidden)
        if ".mlp.experts.linear_fc1." in name:
            return (experts, dense[0] // grain, *dense[1:])
        if name.endswith(".mlp.experts.linear_fc2.weight"):
            return (experts, dense[0], dense[1] // grain)
        return (experts, *dense) if ".mlp.experts." in name else dense

    def _first_shards(self, tensor: Tensor) -> Tensor:
        """[blocks x F, ...] -> [g, blocks x F / g, ...]: each shard has its gate rows and its up rows."""
        grain = self.upcycling.granularity
        return tensor.unflatten(0, (self._blocks, grain, -1)).transpose(0, 1).flatten(1, 2)

    def _repeated(self, shards: Tensor) -> Tensor:
        """[g, ...] -> [E, ...]: the shards of the first group, of the second, ..."""
        groups = self.upcycling.num_experts // self.upcycling.granularity
        return shards.repeat(groups, *[1] * (shards.dim() - 1)).contiguous()

    def _router(self, name: str, dtype: torch.dtype) -> Tensor:
        """[E, H]: a random row for each group, repeated for all its experts."""
        grain = self.upcycling.granularity
        generator = torch.Generator().manual_seed(stream_seed(self.upcycling.seed, name.removeprefix(MODEL)))
        rows = torch.randn(self.upcycling.num_experts // grain, self._hidden, generator=generator) * self._std
        # Equal rows give equal logits, so the top-k takes groups as wholes.
        return rows.repeat_interleave(grain, 0).to(dtype)


ROUTER = ".mlp.router.weight"


def _dense_model(dense: CheckpointReader, host: PluginHost) -> Any:
    """The typed configuration of the checkpoint's model."""
    config = dense.metadata.get("config")
    if not isinstance(config, Mapping) or "model" not in config:
        raise CheckpointError("the checkpoint does not say what its model is: its metadata has no config.model")
    model = config_from_dict({"model": config["model"]}, host).model
    if "moe" not in type(model).model_fields:
        raise ConfigError(f"model.family={model.family} has no experts: its configuration has no model.moe")
    if getattr(model, "moe", None) is not None:
        raise ConfigError("the checkpoint has experts already (model.moe is set); upcycling starts from a dense model")
    return model


def upcycle(
    dense: CheckpointReader,
    host: PluginHost,
    *,
    num_experts: int,
    granularity: int = 1,
    topk: int | None = None,
    seed: int = 0,
) -> CheckpointReader:
    """The dense checkpoint as one with experts. See Upcycling. Raises ConfigError and CheckpointError."""
    return UpcycledReader(dense, Upcycling(num_experts, granularity, topk, seed), host)
