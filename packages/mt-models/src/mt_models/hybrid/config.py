"""Configuration of the hybrid family: keys, the rules that tie them together, published sizes and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr

from mt_core.config.checks import divisors, listed, must_divide
from mt_core.config.fields import NonNegativeInt, PositiveInt, Probability, used_when
from mt_core.config.schema import Activation, Config
from mt_core.errors import ConfigError
from mt_models.blocks.config import check_tensor_parallel
from mt_models.blocks.mamba_config import MambaLayerConfig, check_mamba_layers
from mt_models.blocks.prediction_config import check_prediction
from mt_models.blocks.stream_config import StreamKeys, check_streams, depth_flops, stream_flops
from mt_models.flops import Convention, Flops, dense_feed_forward_flops, experts_flops
from mt_models.mamba.config import convolution_flops, output_flops, projection_flops, scan_flops

# -- layer pattern, in Megatron's notation: `M-M-*-|M-M-*-` ------------------------------------------
#
# A symbol is a layer; `|` begins a new pipeline stage.

MAMBA, ATTENTION, FEED_FORWARD, EXPERTS, STAGE = "M", "*", "-", "E", "|"

KINDS: Mapping[str, str] = {
    MAMBA: "Mamba-2",
    ATTENTION: "attention",
    FEED_FORWARD: "feed-forward",
    EXPERTS: "mixture of experts",
}
MEGATRON_ONLY: Mapping[str, str] = {
    "G": "gated delta net",
    "D": "DeepSeek sparse attention",
    "+": "multi-head latent attention",
    "/": "multi-token prediction",
}
"""Symbols of Megatron that are not supported here."""


def layers_of(pattern: str) -> str:
    """The symbols of the layers, without stage boundaries."""
    return pattern.replace(STAGE, "")


def stages_of(pattern: str) -> list[int]:
    """How many layers stand in each part between `|`."""
    return [len(part) for part in pattern.split(STAGE)]


def check_pattern(pattern: str) -> None:
    """Raise ConfigError for an unknown symbol, or a part without layers."""
    known = ", ".join(f"{symbol} ({kind})" for symbol, kind in KINDS.items())
    # Symbols that Megatron has and this family does not are named by their meaning, so that the
    # reader of a Megatron launch script sees what is missing.
    for place, symbol in enumerate(layers_of(pattern)):
        if symbol not in KINDS:
            meaning = f" ({MEGATRON_ONLY[symbol]})" if symbol in MEGATRON_ONLY else ""
            raise ConfigError(
                f"model.hybrid_layer_pattern={pattern!r} has {symbol!r}{meaning} as layer {place}; a layer can be "
                f"{known}, and {STAGE} begins a pipeline stage"
            )
    if 0 in stages_of(pattern):
        raise ConfigError(
            f"model.hybrid_layer_pattern={pattern!r} has a stage without layers; there is at least one symbol of "
            f"{', '.join(KINDS)} before, between and after {STAGE}"
        )


Factor = Annotated[float, Field(gt=0)]


class HybridConfig(StreamKeys, MambaLayerConfig):
    """Mamba-2, attention and feed-forward layers in any order (Waleffe et al., An Empirical Study of Mamba-based
    Language Models, 2024; Nemotron-H, 2025)."""

    hybrid_layer_pattern: str
    """A symbol for each layer: M Mamba-2, * attention, - feed-forward, E mixture of experts. A | begins a pipeline
    stage."""
    num_attention_heads: PositiveInt
    """Query heads of the attention layers."""
    num_query_groups: PositiveInt | None = None
    """Key-value heads; each serves num_attention_heads / num_query_groups query heads.
    Default: num_attention_heads."""
    kv_channels: PositiveInt | None = None
    """Size of an attention head. Default: hidden_size / num_attention_heads."""
    attention_dropout: Probability = 0.0
    """Dropout on the attention weights."""
    attention_backend: str = "auto"
    """Name of the attention backend; auto: the fastest that serves the model on its device."""
    hidden_dropout: Probability = 0.0
    """Dropout on the embeddings and on the output of each layer."""
    position_embedding_type: Literal["none", "rope", "learned_absolute"] = "none"
    """How attention gets positions: not at all, since the Mamba layers carry the order, by rotating queries and keys,
    or from a table whose rows are added to the token embeddings."""
    rotary_base: Annotated[float, Field(gt=0)] = used_when(10000.0, position_embedding_type="rope")
    """Base of the rotary wavelengths."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = used_when(1.0, position_embedding_type="rope")
    """Fraction of a head's channels that is rotated."""
    max_position_embeddings: PositiveInt | None = None
    """Rows of the table of learned positions. Otherwise the longest sequence that the model was trained for, as
    converted checkpoints state it; longer ones are not refused then."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of a feed-forward. Default: 4 hidden_size."""
    activation: Activation = "squared_relu"
    """Activation of the feed-forward."""
    add_bias_linear: bool = False
    """Biases in the matrices of attention and feed-forward."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    """Kind of the norms before layers and behind the last one. The gated norm within a Mamba layer is an RMSNorm."""
    embedding_multiplier: Factor = 1.0
    """Factor of token embeddings, in Granite 4.0 as the next three."""
    attention_multiplier: Factor | None = None
    """Factor of the products of queries and keys. Default: 1 / sqrt(head size)."""
    residual_multiplier: Factor = 1.0
    """Factor of what a layer adds to the residual stream."""
    logits_scaling: Factor = 1.0
    """Logits are divided by this."""
    moe: dict[str, Any] | None = None
    """Options of the MoE layers of experts, the E layers; needs the feed-forward "moe"."""
    mtp_num_layers: NonNegativeInt = 0
    """Depths of multi-token prediction behind the other layers, of which the d-th predicts the token d + 1 positions
    ahead, in training."""
    mtp_hybrid_override_pattern: str | None = None
    """The layers of each of these depths, as hybrid_layer_pattern has them; *, - and E."""
    mtp_loss_scaling_factor: Annotated[float, Field(ge=0)] = 0.1
    """What the mean of their losses counts beside that of the next token."""

    _predicted_layers: int = PrivateAttr(default=0)
    """How many layers of the pattern are those of multi-token prediction: see `with_predicted_layers`."""

    @property
    def layers(self) -> str:
        """A symbol for each layer."""
        return layers_of(self.hybrid_layer_pattern)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def pipeline_layout(self) -> str | None:
        """The stages of the pattern as parallel.pipeline_model_parallel_layout has them, such as `Ett|ttt|tL`; None:
        the pattern does not say."""
        if STAGE not in self.hybrid_layer_pattern:
            return None
        # "M-*-|M-M-" -> "Etttt|ttttL": the embedding in front of the first stage, the loss behind the last
        stages = STAGE.join("t" * size for size in stages_of(self.hybrid_layer_pattern))
        return f"E{stages}{'m' * self.mtp_num_layers}L"

    @property
    def predicted_pattern(self) -> str:
        """A symbol for each layer of one depth of multi-token prediction."""
        return self.mtp_hybrid_override_pattern or "" if self.mtp_num_layers else ""

    def with_predicted_layers(self) -> Self:
        """The same with the layers of multi-token prediction counted behind the others."""
        predicted = self.mtp_num_layers * self.predicted_pattern
        counted = self.model_copy(update={"hybrid_layer_pattern": self.hybrid_layer_pattern + predicted})
        counted._predicted_layers = len(predicted)
        return counted

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def table_size(self) -> int | None:
        """Rows of the table of positions, if there is one."""
        return self.max_position_embeddings if self.position_embedding_type == "learned_absolute" else None

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def output_init_std(self) -> float:
        # num_layers without the factor 2 of transformers: a layer here is one block and adds once.
        layers = self.num_layers - self._predicted_layers
        return self.init_method_std / math.sqrt(layers if self.use_scaled_init_method else 1.0)

    # Fixed values for keys of the shared blocks that the family does not expose.

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return False

    @property
    def rotary_interleaved(self) -> bool:
        return False


NEUTRAL_FACTORS: Mapping[str, float | None] = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "enable_mhc_connections": False,
}
"""Granite's factors where they change nothing, and several residual streams, which other formats than its own need."""


def check_hybrid(config: Config) -> None:
    """Raise ConfigError for a pattern that cannot be read or split into stages, and heads that do not divide."""
    model = config.model
    assert isinstance(model, HybridConfig)
    check_pattern(model.hybrid_layer_pattern)
    check_mamba_layers(config)
    _check_attention(model)
    check_tensor_parallel(
        config, query_groups=model.query_groups, ffn_size=model.ffn_size, heads=model.num_attention_heads
    )
    _check_experts(model)
    _check_predicted_layers(config)
    _check_stages(config)
    _check_positions(config)
    check_streams(model, STREAMS_WITH)


STREAMS_WITH: Mapping[str, tuple[Any, ...]] = {
    "residual_multiplier": (1.0,),
    "fp32_residual_connection": (False,),
}
"""Keys of a hybrid with several residual streams."""


def _check_positions(config: Config) -> None:
    model, length = config.model, config.data.seq_length
    assert isinstance(model, HybridConfig)
    if model.position_embedding_type != "learned_absolute":
        return
    if model.table_size is None:
        raise ConfigError(
            "model.position_embedding_type=learned_absolute needs model.max_position_embeddings, the rows of its "
            f"table: at least data.seq_length={length}"
        )
    if length > model.table_size:
        raise ConfigError(
            f"data.seq_length={length} is longer than model.max_position_embeddings={model.table_size}; use at most "
            f"{model.table_size}, or raise it"
        )


def _check_stages(config: Config) -> None:
    model, parallel = config.model, config.parallel
    assert isinstance(model, HybridConfig)
    if model.pipeline_layout is None:
        return
    if parallel.pipeline_model_parallel_layout is not None:
        raise ConfigError(
            f"model.hybrid_layer_pattern={model.hybrid_layer_pattern!r} and parallel.pipeline_model_parallel_layout="
            f"{parallel.pipeline_model_parallel_layout!r} both divide the layers into stages; remove the second, or "
            f"the {STAGE} of the first"
        )
    stages = "the number of stages in model.hybrid_layer_pattern"
    size = parallel.pipeline_model_parallel_size
    must_divide("parallel.pipeline_model_parallel_size", size, stages, len(stages_of(model.hybrid_layer_pattern)))


def _check_attention(model: HybridConfig) -> None:
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not divisible by "
            f"model.num_attention_heads={model.num_attention_heads}; the number of heads can be "
            f"{listed(divisors(model.hidden_size))}, or set model.kv_channels"
        )
    must_divide("model.num_query_groups", model.query_groups, "model.num_attention_heads", model.num_attention_heads)
    if model.position_embedding_type == "rope" and (model.rotary_dim % 2 or model.rotary_dim == 0):
        raise ConfigError(
            f"model.rotary_percent={model.rotary_percent} rotates {model.rotary_dim} of the {model.head_dim} channels "
            "of a head; positions turn pairs of channels, so it has to be an even number above 0"
        )


PREDICTED = f"{ATTENTION}{FEED_FORWARD}{EXPERTS}"
"""Layers that a depth of multi-token prediction can have."""
PREDICTS_WITH: Mapping[str, Any] = {
    "embedding_multiplier": 1.0,
    "hidden_dropout": 0.0,
    "fp32_residual_connection": False,
}


def _check_predicted_layers(config: Config) -> None:
    model = config.model
    assert isinstance(model, HybridConfig)
    check_prediction(config, model)
    pattern = model.mtp_hybrid_override_pattern
    if (pattern is None) != (model.mtp_num_layers == 0):
        raise ConfigError(
            f"model.mtp_num_layers={model.mtp_num_layers} and model.mtp_hybrid_override_pattern={pattern!r}: depths of "
            "multi-token prediction and the layers of each are set together, or neither"
        )
    if pattern is None:
        return
    if not pattern or set(pattern) - set(PREDICTED):
        # A draft computes positions again, for which a recurrent state would have to be kept of each.
        raise ConfigError(
            f"model.mtp_hybrid_override_pattern={pattern!r}: a depth of multi-token prediction has at least one layer, "
            f"and a layer can be {', '.join(f'{symbol} ({KINDS[symbol]})' for symbol in PREDICTED)}"
        )
    for key, value in PREDICTS_WITH.items():
        if getattr(model, key) != value:
            raise ConfigError(
                f"model.{key}={getattr(model, key)} cannot be combined with model.mtp_num_layers="
                f"{model.mtp_num_layers}; it can be {value}, or model.mtp_num_layers=0"
            )
    if model.table_size is not None:
        raise ConfigError(
            f"model.position_embedding_type={model.position_embedding_type} cannot be combined with "
            f"model.mtp_num_layers={model.mtp_num_layers}; it can be none or rope"
        )


def _check_experts(model: HybridConfig) -> None:
    if (EXPERTS in model.layers + model.predicted_pattern) == (model.moe is not None):
        return
    pattern = f"model.hybrid_layer_pattern={model.hybrid_layer_pattern!r}"
    if model.moe is None:
        raise ConfigError(f"{pattern} has layers of experts (E); set model.moe, their options")
    raise ConfigError(f"model.moe is set, but {pattern} has no layer of experts; put E where they go")


# -- published sizes ---------------------------------------------------------------------------------

_NEMOTRON_H_8B = "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-"
_BAMBA = "".join("*-" if layer in (9, 18, 27) else "M-" for layer in range(32))

_NANO_3 = "MEMEM*E" + 4 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME"
_SUPER_3 = 3 * "MEMEMEM*E" + 4 * "MEMEMEMEM*E" + "MEMEMEM*E" + "MEMEMEME"
_GRANITE_ATTENTION = (5, 15, 25, 35)


def _nemotron_3(pattern: str, hidden: int, mamba_heads: int, moe: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "hybrid_layer_pattern": pattern,
            "hidden_size": hidden,
            "vocab_size": 131072,
            "max_position_embeddings": 262144,
            "num_attention_heads": 32,
            "num_query_groups": 2,
            "kv_channels": 128,
            "ffn_hidden_size": moe["moe_ffn_hidden_size"],
            "mamba_num_heads": mamba_heads,
            "moe": {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_load_balancing_type": ["seq_aux_loss"],
                "moe_aux_loss_coeff": [0.0001],
                "moe_shared_expert_intermediate_size": 2 * moe["moe_ffn_hidden_size"],
                **moe,
            },
            **keys,
        },
        "data": {"seq_length": 8192},
    }


_NANO_3_EXPERTS = {
    "num_experts": 128,
    "moe_router_topk": 6,
    "moe_ffn_hidden_size": 1856,
    "moe_router_topk_scaling_factor": 2.5,
}
_SUPER_3_EXPERTS = {
    "num_experts": 512,
    "moe_router_topk": 22,
    "moe_ffn_hidden_size": 2688,
    "moe_latent_size": 1024,
    "moe_router_topk_scaling_factor": 5.0,
}
_PREDICTION = {"mtp_num_layers": 1, "mtp_hybrid_override_pattern": "*E"}


def _granite_4_h(hidden: int, heads: int, groups: int, ffn: int, moe: dict[str, Any] | None = None) -> dict[str, Any]:
    """Granite 4.0 H: 40 layers of which four are attention. ffn: of the feed-forward, or of the shared experts."""
    head, second = hidden // heads, FEED_FORWARD if moe is None else EXPERTS
    experts = {"moe_shared_expert_intermediate_size": ffn, "moe_router_load_balancing_type": ["aux_loss"]}
    return {
        "model": {
            "hybrid_layer_pattern": "".join(
                (ATTENTION if layer in _GRANITE_ATTENTION else MAMBA) + second for layer in range(40)
            ),
            "hidden_size": hidden,
            "vocab_size": 100352,
            "max_position_embeddings": 131072,
            "untie_embeddings_and_output_weights": False,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "ffn_hidden_size": ffn,
            "activation": "swiglu",
            "mamba_num_groups": 1,
            "mamba_chunk_size": 256,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 1.0 / head,
            "residual_multiplier": 0.22,
            "logits_scaling": hidden / 256,
            **({} if moe is None else {"moe": {**experts, "moe_aux_loss_coeff": [0.0], **moe}}),
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "nemotron-3-nano-30b-a3b": _nemotron_3(_NANO_3, 2688, 64, _NANO_3_EXPERTS),
    "nemotron-3-super-120b-a12b": _nemotron_3(_SUPER_3, 4096, 128, _SUPER_3_EXPERTS, **_PREDICTION),
    "nemotron-3.5-lightning-30b-a3b": _nemotron_3(_NANO_3, 2688, 64, _NANO_3_EXPERTS, **_PREDICTION),
    "granite-4.0-h-1b": _granite_4_h(1536, 12, 4, 4096),
    "granite-4.0-h-micro": _granite_4_h(2048, 32, 8, 8192),
    "granite-4.0-h-tiny": _granite_4_h(
        1536, 12, 4, 1024, {"num_experts": 64, "moe_router_topk": 6, "moe_ffn_hidden_size": 512}
    ),
    "granite-4.0-h-small": _granite_4_h(
        4096, 32, 8, 1536, {"num_experts": 72, "moe_router_topk": 10, "moe_ffn_hidden_size": 768}
    ),
    "nemotron-h-8b": {
        "model": {
            "hybrid_layer_pattern": _NEMOTRON_H_8B,
            "hidden_size": 4096,
            "vocab_size": 131072,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "kv_channels": 128,
            "ffn_hidden_size": 21504,
            "mamba_num_heads": 128,
        },
        "data": {"seq_length": 8192},
    },
    "bamba-9b": {
        "model": {
            "hybrid_layer_pattern": _BAMBA,
            "hidden_size": 4096,
            "vocab_size": 128256,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "position_embedding_type": "rope",
            "rotary_percent": 0.5,
            "ffn_hidden_size": 14336,
            "activation": "swiglu",
            "mamba_num_heads": 128,
            "mamba_num_groups": 1,
            "mamba_chunk_size": 256,
        },
        "data": {"seq_length": 4096},
    },
}


# -- FLOPs for each token ----------------------------------------------------------------------------
#
# Counted as for transformers (mt_models.flops) and Mamba (mt_models.mamba.config), each layer by its kind.


@dataclass(frozen=True)
class HybridFlops(Flops):
    """Forward FLOPs for each token, over all layers."""

    mamba_projections: float
    mamba_convolution: float
    mamba_scan: float
    attention_projections: float
    """Queries, keys, values and the output of attention."""
    attention_core: float
    """Scores and their product with the values."""
    feed_forward: float
    """Experts included."""
    output: float
    """Logits."""
    prediction: float = 0.0
    """Layers of multi-token prediction and their logits, in training."""
    connections: float = 0.0
    """Weights of residual streams, and their products with them."""

    @property
    def forward(self) -> float:
        """FLOPs of the model without multi-token prediction."""
        return super().forward - self.prediction

    @property
    def training(self) -> float:
        """Forward and backward, multi-token prediction included."""
        return 3 * (self.forward + self.prediction)


def flops_per_token(
    config: HybridConfig, seq_length: int, *, convention: Convention = "seen", experts: float | None = None
) -> HybridFlops:
    """The mean over the tokens of a sequence.

    experts: forward FLOPs for each token of one layer of experts. Raises ConfigError when it is missing though the
    pattern has such layers, or the vocabulary is unknown.
    """
    decoder = _layer_flops(config, config.layers, seq_length, convention, experts)
    output = output_flops(config)
    predicted = _layer_flops(config, config.predicted_pattern, seq_length, convention, experts)
    # 4 H^2: eh_proj, [H, 2 H]. Each depth computes logits of its own with the model's LM head.
    depth = sum(predicted.values()) + 4 * config.hidden_size**2 + output
    depth += depth_flops(config, config.hidden_size, len(config.predicted_pattern))
    return HybridFlops(
        **decoder,
        output=output,
        prediction=config.mtp_num_layers * depth,
        connections=stream_flops(config, config.hidden_size, config.num_layers),
    )


def _layer_flops(
    config: HybridConfig, layers: str, seq_length: int, convention: Convention, experts: float | None
) -> dict[str, float]:
    """The parts of HybridFlops that are of layers."""
    count = layers.count
    if count(EXPERTS) and experts is None:
        raise ConfigError(
            "layers of experts (E) are counted by the plugin that brings them; pass their FLOPs as experts"
        )
    mamba, attention = count(MAMBA), count(ATTENTION)
    keys = seq_length if convention == "full" else (seq_length + 1) / 2
    heads = config.num_attention_heads * config.head_dim
    return {
        "mamba_projections": mamba * projection_flops(config),
        "mamba_convolution": mamba * convolution_flops(config),
        "mamba_scan": mamba * scan_flops(config, seq_length, convention),
        "attention_projections": attention * 4 * config.hidden_size * (heads + config.query_groups * config.head_dim),
        "attention_core": attention * 4 * heads * keys,
        "feed_forward": count(FEED_FORWARD) * dense_feed_forward_flops(config) + count(EXPERTS) * (experts or 0.0),
    }


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`. Experts are the feed-forward of layers of their own, so that a layer of them is
    counted as if all were."""
    model: Any = config.model
    length = config.data.seq_length
    # moe_flops takes the mean over layers, dense ones included; with
    # frequency 1 the mean is that of a layer of experts.
    every_layer = model.moe and model.model_copy(update={"moe": {**model.moe, "moe_layer_freq": 1}})
    return length * flops_per_token(model, length, experts=experts_flops(every_layer)).training
