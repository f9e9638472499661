"""The mixture-of-experts layer: route, dispatch, compute, combine; and the shared experts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mt_core.config.layer_pattern import layers_with_experts
from mt_core.config.schema import Activation
from mt_core.errors import ConfigError, TrainingError
from mt_core.nn.activations import activate, is_gated
from mt_core.nn.feed_forward import FeedForwardConfigLike
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal, sequence_axes
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear, linear
from mt_core.nn.norm import RMSNorm
from mt_core.parallel.context import ParallelContext
from mt_core.specs import MOE_DISPATCHERS
from mt_moe.config import MoeConfig, read_moe_config
from mt_moe.dispatchers.config import OPTIONS as DISPATCHER_OPTIONS
from mt_moe.dispatchers.config import read_options
from mt_moe.dispatchers.interface import Dispatched, Dispatcher, OverlappingDispatcher, expert_placement
from mt_moe.experts.experts import Experts
from mt_moe.kernels.availability import triton_objection
from mt_moe.latent_norms import ExpertOutputNorm, LatentNorm
from mt_moe.permutation import Routing, RowKernels
from mt_moe.routing.router import Router
from mt_moe.tokens import join_tokens, partial_gradient_axes, share_ids, share_tokens, whole_rows

if TYPE_CHECKING:
    from mt_core.nn.build_context import ModelBuildContext
    from mt_core.plugins import PluginHost


# -- shared experts ----------------------------------------------------------------------------------


class SharedExperts(LayoutModule):
    """linear_fc2(activation(linear_fc1(x))), times sigmoid(x gate_weight^T) if gated: [B, S, H] -> the same.

    gate_weight: [1, H], replicated over tp. Several shared experts are one feed-forward of their total width.
    scored: experts of equal widths whose outputs the router weighs.
    """

    gate_weight: Tensor | None

    def __init__(
        self, shape: FeedForwardConfigLike, ffn_size: int, ctx: ParallelContext, *, gate: bool, scored: int = 0
    ) -> None:
        super().__init__(ctx)
        self.scored = scored
        # A family whose shared experts have another activation than the routed ones says so.
        self.activation: Activation = getattr(shape, "shared_expert_activation", shape.activation)
        blocks = 2 if is_gated(self.activation) else 1
        hidden, bias = shape.hidden_size, shape.add_bias_linear
        self.linear_fc1 = ColumnParallelLinear(
            hidden, blocks * ffn_size, ctx, bias=bias, init=normal(shape.init_method_std), sections=blocks
        )
        self.linear_fc2 = RowParallelLinear(ffn_size, hidden, ctx, bias=bias, init=normal(shape.output_init_std))
        # With sequence parallelism each tensor-parallel rank applies the gate to other positions, so its gradient is
        # partial.
        layout = ParameterLayout((1, hidden), normal(shape.init_method_std), partial_gradient=sequence_axes(ctx))
        self.declare("gate_weight", layout if gate else None)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """weights [T, scored]: of the experts for this rank's tokens, where the router scores them."""
        # [B, whole S, channels of this rank]
        inner = activate(self.activation, self.linear_fc1(x))
        if weights is not None:
            inner = inner * self._weights_of_channels(whole_rows(weights, x, self.ctx), inner.shape[-1]).to(inner.dtype)
        # [B, S, H]
        out = self.linear_fc2(inner)
        return out if self.gate_weight is None else out * linear(x, self.gate_weight, None).sigmoid()

    def _weights_of_channels(self, weights: Tensor, count: int) -> Tensor:
        """[B, S, scored] -> [B, S, channels of this rank]: those of expert 0 come first, over all ranks."""
        size = count * self.ctx.tp.size // self.scored
        channels = torch.arange(count, device=weights.device) + count * self.ctx.tp.rank
        return weights[..., channels // size]


Recomputed = Literal["moe", "shared_experts", "moe_act"]
RANK_CAPACITY = f"{DISPATCHER_OPTIONS}.expert_rank_capacity_factor"
RECOMPUTED: tuple[Recomputed, ...] = get_args(Recomputed)


class MoeConfigLike(FeedForwardConfigLike, Protocol):
    """What an MoE layer reads from the configuration of its model."""

    @property
    def num_layers(self) -> int: ...
    @property
    def moe(self) -> dict[str, Any] | None: ...


class Projection(LayoutModule):
    """x W^T on each rank's own tokens: weight [out, in] is replicated, its gradient partial over tp."""

    weight: Tensor

    def __init__(self, in_features: int, out_features: int, std: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        layout = ParameterLayout((out_features, in_features), normal(std), partial_gradient=partial_gradient_axes(ctx))
        self.declare("weight", layout)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, None)


class MoeLayer(nn.Module):
    """[B, S, H] -> the same: for each token the weighted sum over its experts, and the shared experts.

    The largest tensors are [tokens x top-k, H]; no tensor has the shape [tokens, experts, hidden].

    recompute: what is recomputed in the backward pass: "moe", all of it; "shared_experts"; "moe_act", the
    activation of the routed experts and its output. planned_capability: see ModelBuildContext.
    """

    had_overflow: Tensor
    """[] bool: some micro-batch had more rows for a rank than the dispatcher has room for."""

    def __init__(
        self,
        shape: MoeConfigLike,
        config: MoeConfig,
        dispatcher: Dispatcher,
        layer: int,
        ctx: ParallelContext,
        recompute: Collection[Recomputed] = (),
        planned_capability: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.ctx, self.layer = config, ctx, layer
        self.register_buffer("had_overflow", torch.zeros((), dtype=torch.bool, device=ctx.device), persistent=False)
        self.recompute = frozenset(recompute)
        bias = shape.add_bias_linear
        self.router = Router(
            config,
            shape.hidden_size,
            layer,
            ctx,
            init_std=shape.init_method_std,
            bias=bias if config.moe_router_bias is None else config.moe_router_bias,
            hashed_vocab=hashed_vocab(shape, config, layer),
            logit_scale=getattr(shape, "router_logit_scale", 1.0),
            scored_shared=scored_shared_experts(shape),
        )
        self.dispatcher = dispatcher
        fusion = permute_fusion(config, ctx)
        # Width of the rows that are dispatched.
        width = config.moe_latent_size or shape.hidden_size
        self.experts = Experts(
            config,
            width,
            config.moe_ffn_hidden_size or shape.ffn_size,
            shape.activation,
            ctx,
            bias=bias,
            init_std=shape.init_method_std,
            output_init_std=shape.output_init_std,
            permute_fusion=fusion,
            recompute_activation="moe_act" in self.recompute and "moe" not in self.recompute,  # "moe" has it already
            planned_capability=planned_capability,
        )
        self.fc1_latent_proj: Projection | None = None
        self.fc2_latent_proj: Projection | None = None
        if config.moe_latent_size is not None:
            self.fc1_latent_proj = Projection(shape.hidden_size, width, shape.init_method_std, ctx)
            self.fc2_latent_proj = Projection(width, shape.hidden_size, shape.output_init_std, ctx)
        self.combined_layernorm = build_combined_norm(shape, config, ctx)
        # Families with these norms give their epsilons.
        latent_eps, output_eps = (getattr(shape, key, None) for key in ("moe_latent_epsilon", "moe_output_epsilon"))
        self.latent_layernorm = None if latent_eps is None else LatentNorm(width, latent_eps, ctx)
        self.expert_layernorm = None if output_eps is None else ExpertOutputNorm(width, output_eps, ctx)
        self.shared_experts = build_shared_experts(shape, config, ctx)
        self.overlapping = overlapping_dispatcher(dispatcher, config, ctx) if self.shared_experts is not None else None

    def forward(self, x: Tensor, router_input: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """router_input [B, S, H]: what the router reads; default: x, which the experts read. ids [B, S]: of the tokens
        of whole sequences, which layers with a table of experts need."""
        return self._recomputable("moe", self._moe, x, router_input, ids)

    def _moe(self, x: Tensor, router_input: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        # [T, H]: this rank's tokens
        share = share_tokens(x, self.ctx)
        routed_ids = share_ids(ids, self.ctx) if ids is not None and self.router.is_hashed else None
        routing = self.router(share if router_input is None else share_tokens(router_input, self.ctx), routed_ids)
        tokens = share.tokens if self.fc1_latent_proj is None else self.fc1_latent_proj(share.tokens)
        if self.latent_layernorm is not None:
            tokens = self.latent_layernorm(tokens)
        dispatched, shared = self._dispatch(tokens, routing, x)
        if dispatched.overflow is not None:
            self._note(dispatched.overflow)
        # [R, width] in the order of experts, or [n, width] in that of tokens where `order` is given
        output = self.experts(
            dispatched.tokens, dispatched.weights, dispatched.counts, dispatched.order, self.expert_layernorm
        )
        # [T, width]
        combined = self.dispatcher.combine(output, dispatched.state)
        if self.combined_layernorm is not None:
            combined = self.combined_layernorm(combined)
        if self.fc2_latent_proj is not None:
            combined = self.fc2_latent_proj(combined)
        if routing.identity is not None:
            combined = combined + (tokens * routing.identity[:, None]).to(combined.dtype)
        routed = join_tokens(combined, x, self.ctx)
        return routed if shared is None else routed + shared

    def _dispatch(self, tokens: Tensor, routing: Routing, x: Tensor) -> tuple[Dispatched, Tensor | None]:
        """Tokens for this rank's experts, and the shared experts' output for x; with overlap these run during
        the dispatch communication."""
        if self.shared_experts is None:
            return self.dispatcher.dispatch(tokens, routing), None
        if self.overlapping is None:
            dispatched = self.dispatcher.dispatch(tokens, routing)
            return dispatched, self._recomputable("shared_experts", self.shared_experts, x, routing.shared)
        # The shared experts are launched between start and finish, so that they run while rows are sent.
        sending = self.overlapping.start_dispatch(tokens, routing)
        shared = self._recomputable("shared_experts", self.shared_experts, x, routing.shared)
        return self.overlapping.finish_dispatch(sending), shared

    def _note(self, overflow: Tensor) -> None:
        """Raises TrainingError on a CPU; on a GPU, where this would synchronize, the step's check reports the flag."""
        self.had_overflow |= overflow
        if self.had_overflow.device.type == "cpu":
            require_room(overflow, self.name)

    @property
    def name(self) -> str:
        return f"decoder.layers.{self.layer}.mlp"

    def fault(self) -> str | None:
        """See mt_core.nn.auxiliary.ReportsNonFinite."""
        if not bool(self.had_overflow):
            return None
        return f"the rows of {self.name} for one rank, which are more than {RANK_CAPACITY} has room for,"

    def graph_objection(self) -> str | None:
        """See mt_core.nn.auxiliary.ReportsGraphObjection."""
        return capture_objection(self.config, self.experts.host_wait(), self.dispatcher, self.ctx)

    def _recomputable(self, name: Recomputed, function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        if name in self.recompute and self.training:
            # Non-reentrant: gradients of parameters and hooks inside work as without recomputation. Counters and losses
            # count in the backward pass, so a second forward pass does not count twice.
            return checkpoint(function, *inputs, use_reentrant=False)
        return function(*inputs)


def capture_objection(
    config: MoeConfig, host_wait: str | None, dispatcher: Dispatcher, ctx: ParallelContext
) -> str | None:
    """The first setting that makes the host wait, or keep random state; None if a layer can be captured.

    host_wait: what in the products of experts makes it wait.
    """
    if host_wait is not None:
        return host_wait
    if config.uses_sinkhorn or config.moe_router_random_seed is not None:
        return "model.moe chooses experts through the host (sinkhorn, moe_router_random_seed); choose by scores alone"
    if config.moe_input_jitter_eps is not None:
        return (
            "model.moe.moe_input_jitter_eps is seeded by the host at each layer and micro-batch, a graph would draw "
            "the same noise each time; leave it out"
        )
    communicates = ctx.ep.size > 1 or ctx.axis("etp").size > 1
    if communicates and not getattr(dispatcher, "static_shape", False):
        return (
            f"the dispatcher {config.moe_token_dispatcher_type} reads how many rows other ranks send; set "
            f"{DISPATCHER_OPTIONS}.static_shape=true with alltoall or allgather"
        )
    return None


def require_room(overflow: Tensor, layer: str) -> None:
    """Raises TrainingError, naming the layer."""
    if bool(overflow):
        raise TrainingError(
            f"{layer}: there are more rows for one rank than {RANK_CAPACITY} has room for; set it higher, or leave it "
            "out for as much room as can be needed"
        )


def hashed_vocab(shape: MoeConfigLike, config: MoeConfig, layer: int) -> int | None:
    """The size of the vocabulary where the layer's router has a table of experts. Raises ConfigError for a family that
    does not give token ids to its layers."""
    if layer >= config.moe_router_hash_layers:
        return None
    if not getattr(shape, "routes_by_token", False):
        raise ConfigError(
            f"model.moe.moe_router_hash_layers={config.moe_router_hash_layers} needs a family whose layers read the "
            f"ids of tokens, such as deepseek_v4, and model.family={getattr(shape, 'family', 'this one')} is none; set "
            "it to 0"
        )
    vocab: int | None = getattr(shape, "vocab_size", None)
    assert vocab is not None  # the trainer fills it in from the tokenizer
    return vocab


def build_shared_experts(shape: MoeConfigLike, config: MoeConfig, ctx: ParallelContext) -> SharedExperts | None:
    size = config.moe_shared_expert_intermediate_size
    if size is None:
        return None
    return SharedExperts(shape, size, ctx, gate=config.moe_shared_expert_gate, scored=scored_shared_experts(shape))


def scored_shared_experts(shape: MoeConfigLike) -> int:
    """Shared experts that the router scores, of which a family says that it has some."""
    return getattr(shape, "scored_shared_experts", 0)


def build_combined_norm(shape: MoeConfigLike, config: MoeConfig, ctx: ParallelContext) -> RMSNorm | None:
    """The norm of the sum of the experts' latents before it is projected back, for a family that has one."""
    # A family that has it says its epsilon.
    epsilon: float | None = getattr(shape, "moe_combined_epsilon", None)
    if epsilon is None or config.moe_latent_size is None:
        return None
    return RMSNorm(config.moe_latent_size, epsilon, ctx, partial_gradient_axes(ctx))


def overlapping_dispatcher(
    dispatcher: Dispatcher, config: MoeConfig, ctx: ParallelContext
) -> OverlappingDispatcher | None:
    """The dispatcher where shared experts run during its communication; None: they run after it. Raises ConfigError."""
    overlap = config.moe_shared_expert_overlap
    if isinstance(dispatcher, OverlappingDispatcher):
        communicates = ctx.ep.size > 1 or ctx.axis("etp").size > 1
        return dispatcher if (communicates if overlap is None else overlap) else None
    if not overlap:
        return None
    raise ConfigError(
        f"model.moe.moe_shared_expert_overlap=true: the dispatcher {config.moe_token_dispatcher_type} does not let "
        "other work be done while it sends; use alltoall or allgather, or set moe_shared_expert_overlap=false"
    )


def build_dispatcher(config: MoeConfig, ctx: ParallelContext, host: PluginHost) -> Dispatcher:
    """The configured dispatcher. Raises ConfigError for its options, PluginError for its name."""
    key = "model.moe.moe_token_dispatcher_type"
    spec = host[MOE_DISPATCHERS].get(config.moe_token_dispatcher_type, key=key)
    options = read_options(spec.config_type.load(), config.moe_dispatcher_options)
    placement = expert_placement(config.num_experts, ctx, row_kernels(config, ctx))
    return spec.build.load()(options, placement)


def permute_fusion(config: MoeConfig, ctx: ParallelContext) -> bool:
    """Whether Triton kernels permute tokens: by default on a GPU that has them. Raises ConfigError where they are
    configured and cannot run."""
    objection = triton_objection(ctx.device.type)
    if config.moe_permute_fusion is None:
        return ctx.device.type == "cuda" and objection is None
    if config.moe_permute_fusion and objection is not None:
        raise ConfigError(f"model.moe.moe_permute_fusion=true: {objection}; set it to false")
    return config.moe_permute_fusion


def row_kernels(config: MoeConfig, ctx: ParallelContext) -> RowKernels:
    """The implementations of permute and unpermute. Raises ConfigError where the configured ones cannot run."""
    # Nothing runs on the meta device, and Triton launches no kernel there.
    if not permute_fusion(config, ctx) or ctx.device.type == "meta":
        return RowKernels()
    from mt_moe.kernels.rows import TRITON_ROWS

    return TRITON_ROWS


def build_moe(shape: MoeConfigLike, context: ModelBuildContext, layer: int) -> nn.Module:
    """The MoE of layer `layer`, or the dense feed-forward where moe_layer_freq says so."""
    config = read_moe_config(shape.moe or {})
    if not layers_with_experts(config.moe_layer_freq, shape.num_layers)[layer]:
        return context.feed_forward("dense", shape, layer)
    ctx = context.parallel
    recompute = [name for name in RECOMPUTED if context.recompute.selects(name)]
    dispatcher = build_dispatcher(config, ctx, context.host)
    return MoeLayer(shape, config, dispatcher, layer, ctx, recompute, context.planned_capability)
