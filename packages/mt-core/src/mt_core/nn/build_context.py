"""Context of building a model, beside its own configuration: layout, plugins, whole config, choice of backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.interfaces import AttentionRequest
from mt_core.nn.attention import AttentionCore
from mt_core.nn.context_parallel.core import check_dropout
from mt_core.nn.context_parallel.zigzag import check_sequence_length
from mt_core.nn.kernels.choice import AUTO, Kernels, configured_kernels
from mt_core.nn.offload import CORE as OFFLOADED_CORE
from mt_core.nn.offload import offloaded_core
from mt_core.nn.recompute import Recompute, recomputed
from mt_core.parallel.context import AxisName, ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_core.plugins import PluginHost
from mt_core.specs import (
    ATTENTION_BACKENDS,
    CONTEXT_PARALLEL_METHODS,
    FEED_FORWARDS,
    MODEL_TRANSFORMS,
    ContextParallelMethodSpec,
    ModelTransformSpec,
)

BATCH_INVARIANT = "batch_invariant"
"""The attention backend of numerics.batch_invariant."""


@dataclass(frozen=True)
class ModelBuildContext:
    """Passed to `ModelSpec.build`; gets from the plugin host the parts that other plugins bring."""

    config: Config
    parallel: ParallelContext
    host: PluginHost
    stages: tuple[Stage, ...] | None = None
    """The pipeline stages that this process holds; None: the whole model."""
    given_kernels: Kernels | None = field(default=None, repr=False)
    """Those of the run, that its other parts use too."""
    all_stages: tuple[Stage, ...] | None = None
    """The pipeline stages of all processes, so that each finds what is wrong with any; None: the whole model."""
    _context_cores: dict[AttentionRequest, AttentionCore] = field(default_factory=dict, repr=False)

    @cached_property
    def kernels(self) -> Kernels:
        """Picks implementations as the section `kernels` says. Modules that have `use_kernels` are given it."""
        return self.given_kernels or configured_kernels(self.config, self.parallel)

    @property
    def recompute(self) -> Recompute:
        """How stacks of layers are run, and which modules are recomputed."""
        return Recompute(self.config.recompute, self.parallel)

    @property
    def planned_capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU that a plan on the meta device is for; None in a run, whose device is there."""
        return None

    def layers(self, num_layers: int) -> list[int]:
        """Numbers of the layers to build, of a stack of `num_layers`."""
        if self.stages is None:
            return list(range(num_layers))
        return sorted(number for stage in self.stages for number in stage.layers)

    @property
    def has_first(self) -> bool:
        """Whether to build what comes before the layers."""
        return self.stages is None or any(stage.first for stage in self.stages)

    @property
    def has_last(self) -> bool:
        """Whether to build what comes after the layers."""
        return self.stages is None or any(stage.last for stage in self.stages)

    def attention(
        self,
        backend: str,
        *,
        num_heads: int,
        num_query_groups: int,
        head_dim: int,
        dropout: float = 0.0,
        causal: bool = True,
        bias: bool = False,
        window: int | None = None,
        logit_softcap: float | None = None,
        sinks: bool = False,
    ) -> AttentionCore:
        """The core of the named backend, or the batch-invariant one if the configuration selects that.

        Raises ConfigError, with the backend's reason, if it cannot serve.
        """
        # In place of model.attention_backend, whose kernels are not batch invariant.
        if self.config.numerics.batch_invariant:
            backend = BATCH_INVARIANT
        request = AttentionRequest(
            device_type=self.parallel.device.type,
            dtype=str(self.parallel.params_dtype).removeprefix("torch."),
            head_dim=head_dim,
            num_heads=num_heads,
            num_query_groups=num_query_groups,
            causal=causal,
            segments=self.config.data.reset_attention_mask,  # packed documents
            bias=bias,
            dropout=dropout,
            deterministic=self.config.train.deterministic,
            window=window,
            logit_softcap=logit_softcap,
            sinks=sinks,
        )
        if backend == AUTO:
            backend, refused = automatic_backend(request, self.host)
            self.kernels.note(_automatic_choice(backend, refused))
        spec = self.host[ATTENTION_BACKENDS].get(backend, key="model.attention_backend")
        answer = spec.supports.load()(request)
        if answer is not True:
            able = [s.name for s in self.host[ATTENTION_BACKENDS] if s.supports.load()(request) is True]
            use = f"use {' or '.join(able)}" if able else "no installed backend can"
            raise ConfigError(f"model.attention_backend={backend} cannot serve this model: {answer}; {use}")
        self.kernels.attention_backends.add(backend)
        core = spec.build.load()(request, softmax_in_fp32=self.config.precision.attention_softmax_in_fp32)
        core = core if self.parallel.cp.size == 1 else self._over_context(request, core)
        # Outside of context parallelism, so that its collectives run again in the second pass, on all ranks alike.
        if OFFLOADED_CORE in self.config.recompute.offload_modules:
            return offloaded_core(core, self.config.recompute)
        return recomputed(core) if self.recompute.selects("core_attn") else core

    def _over_context(self, request: AttentionRequest, core: AttentionCore) -> AttentionCore:
        """The core for sequences that several ranks share; one for all layers with the same request."""
        method = self.context_parallel_method
        self._check_divisible(request)
        # Layers that share a core gather the segment ids of a batch once.
        if request not in self._context_cores:
            # Hierarchical: the inner axis (all-to-all) first.
            names: tuple[AxisName, ...] = ("cp_inner", "cp_outer") if method.hierarchical else ("cp",)
            axes = [self.parallel.axis(name) for name in names]
            check_sequence_length(self.config.data.seq_length, self.parallel.cp.size)
            check_dropout(request.dropout, self.parallel.cp.size)
            if method.check is not None:
                method.check.load()([axis.size for axis in axes], request.num_heads // self.parallel.tp.size)
            self._context_cores[request] = method.build.load()(axes, core)
        return self._context_cores[request]

    @property
    def context_parallel_method(self) -> ContextParallelMethodSpec:
        return self.host[CONTEXT_PARALLEL_METHODS].get(self.config.parallel.cp_comm_type, key="parallel.cp_comm_type")

    def _check_divisible(self, request: AttentionRequest) -> None:
        """Raise ConfigError for attention that context-parallel ranks cannot share."""
        parallel, family = self.config.parallel, self.config.model.family
        prefix = f"parallel.context_parallel_size={parallel.context_parallel_size}: model.family={family} has"
        if not request.causal:
            raise ConfigError(
                f"{prefix} attention in both directions, which is not sharded over context-parallel ranks; set "
                "parallel.context_parallel_size to 1"
            )
        if request.logit_softcap is not None and not self.context_parallel_method.whole_sequences:
            able = [f'"{method.name}"' for method in self.host[CONTEXT_PARALLEL_METHODS] if method.whole_sequences]
            raise ConfigError(
                f"{prefix} a soft cap on its scores, and parallel.cp_comm_type={parallel.cp_comm_type} computes blocks "
                f"of scores without one; set parallel.cp_comm_type to {' or '.join(able)}"
            )

    def feed_forward(self, name: str, options: object, layer: int) -> nn.Module:
        """The named feed-forward of layer `layer` (counted from 0 over the whole model).

        `options` is the model's config, from which it reads its shape.
        """
        spec = self.host[FEED_FORWARDS].get(name, asker=f"model.{name}")
        module = spec.build.load()(options, self, layer)
        return self.recompute.module("mlp", module) if name == "dense" else module


def _automatic_choice(backend: str, refused: Mapping[str, str]) -> str:
    """A line for the summary of the run."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    return f"attention {backend} (auto{f', not {reasons}' if reasons else ''})"


# -- `model.attention_backend=auto` ------------------------------------------------------------------

ON_CUDA = ("cudnn", "flash_attn_4", "flash_attn_3", "flash_attn_2", "sdpa", "flex", "eager")
ELSEWHERE = ("sdpa", "eager")
FLASH = frozenset({"flash_attn_4", "flash_attn_3", "flash_attn_2"})
"""Taken for causal attention without a bias alone: padded keys and relative biases come with a batch, and these
packages have no masks."""


def automatic_backend(request: AttentionRequest, host: PluginHost) -> tuple[str, Mapping[str, str]]:
    """(name, why those before it in the order do not serve). Fastest first, as others have measured them on Hopper."""
    refused: dict[str, str] = {}
    for name in _order(request):
        answer = host[ATTENTION_BACKENDS].get(name, key="model.attention_backend").supports.load()(request)
        if answer is True:
            return name, refused
        refused[name] = str(answer)
    # supports_eager is always True, and eager ends both orders.
    raise AssertionError("eager serves every request")


def _order(request: AttentionRequest) -> Iterator[str]:
    names = ON_CUDA if request.device_type == "cuda" else ELSEWHERE
    plain = request.causal and not request.bias
    return (name for name in names if plain or name not in FLASH)


def active_transforms(config: Config, host: PluginHost) -> list[ModelTransformSpec]:
    """The model transforms that the configuration turns on, in the order in which they are applied.

    Raises PluginError for one whose name two plugins register.
    """
    transforms = sorted(host[MODEL_TRANSFORMS], key=lambda spec: spec.name)
    # get(), since none is named by a key: with two of a name, both would change the model.
    return [host[MODEL_TRANSFORMS].get(spec.name) for spec in transforms if spec.applies.load()(config)]
