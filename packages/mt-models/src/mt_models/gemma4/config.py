"""Configuration of Gemma 4, and the rules between its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.checks import must_divide
from mt_core.config.fields import NonNegativeInt, PositiveFloat, PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import RMSNormDecoderConfig, check_decoder, check_tensor_parallel
from mt_models.blocks.moe import MoEOptions
from mt_models.blocks.placeholder_config import PlaceholderKeys
from mt_models.blocks.window_pattern import WindowPattern, has_window


class Gemma4Config(PlaceholderKeys, RMSNormDecoderConfig):
    """Gemma 4 (2026), text only."""

    untie_embeddings_and_output_weights: bool = False
    """The output projection has a matrix of its own."""
    kv_channels: PositiveInt = 256
    """Size of a head in local layers."""
    global_kv_channels: PositiveInt = 512
    """Size of a head in global layers."""
    num_global_query_groups: PositiveInt | None = None
    """Key-value heads of global layers. Default: num_query_groups."""
    attention_k_eq_v: bool = False
    """In global layers keys, before their norm and positions, are the values too."""
    num_kv_shared_layers: NonNegativeInt = 0
    """The last so many layers compute no keys and values: they read those of the last layer of their kind (local or
    global) before them."""
    use_double_wide_mlp: bool = False
    """The feed-forward of layers without keys and values of their own is twice as wide."""
    sliding_window: PositiveInt = 512
    """In local layers a position sees itself and the sliding_window - 1 before it."""
    sliding_window_pattern: WindowPattern = 6
    """Every so many layers one is global and sees everything before it, and the last layer is; the others are local.
    Or a pattern with a 1 for each local layer, such as "([1]*3+[0]*2)", whose last entry does not count."""
    hidden_size_per_layer_input: NonNegativeInt = 0
    """Channels of the embeddings that each layer has of each token; 0: there are none."""
    vocab_size_per_layer_input: PositiveInt | None = None
    """Tokens that have such embeddings. Default: the vocabulary."""
    rotary_base: PositiveFloat = 1000000.0
    """Base of the rotary wavelengths of global layers, to which rope scaling applies."""
    rotary_base_local: PositiveFloat = 10000.0
    """Base of the rotary wavelengths of local layers, which rotate whole heads."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the frequencies of a whole head that global layers rotate by; the others are 0."""
    final_logit_softcapping: PositiveFloat | None = None
    """Logits x become c tanh(x / c)."""

    def is_global(self, layer: int) -> bool:
        return layer == self.num_layers - 1 or not has_window(self.sliding_window_pattern, layer, self.num_layers)

    def window_of(self, layer: int) -> int | None:
        return None if self.is_global(layer) else self.sliding_window

    def shares_kv(self, layer: int) -> bool:
        """Whether a layer reads the keys and values of another one."""
        return layer >= self.num_layers - self.num_kv_shared_layers

    def keys_are_values(self, layer: int) -> bool:
        return self.attention_k_eq_v and self.is_global(layer)

    @property
    def is_divisible(self) -> bool:
        """Whether layers read the hidden states of the layer before them alone, so that pipeline stages can hold
        them."""
        return not (self.hidden_size_per_layer_input or self.num_kv_shared_layers)

    def of_layer(self, layer: int) -> Gemma4Config:
        """The configuration with the sizes that a layer has."""
        sizes: dict[str, Any] = {}
        if self.is_global(layer):
            groups = self.num_global_query_groups or self.query_groups
            sizes = {"kv_channels": self.global_kv_channels, "num_query_groups": groups}
        if self.use_double_wide_mlp and self.shares_kv(layer):
            sizes["ffn_hidden_size"] = 2 * self.ffn_size
        return self.model_copy(update=sizes)

    @property
    def per_layer_vocab(self) -> int:
        vocab = self.vocab_size_per_layer_input or self.vocab_size
        assert vocab is not None  # the trainer fills it in from the tokenizer
        return vocab

    # Fixed values for keys of the shared blocks, and for those of decoders behind a tower.

    @property
    def has_image_patterns(self) -> bool:
        """Whether in local layers the positions of an image see one another."""
        return False

    @property
    def activation(self) -> Literal["swiglu", "geglu_tanh", "clamped_swiglu"]:
        return "geglu_tanh"

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return True


def check_gemma4(config: Config) -> None:
    """Raise ConfigError for heads, layers and layouts that do not fit together."""
    check_decoder(config)
    model = config.model
    assert isinstance(model, Gemma4Config)
    _check_global_heads(config, model)
    _check_rotary(model)
    _check_shared_layers(model)
    _check_stages(config, model)
    if model.moe is not None:
        _check_experts(MoEOptions(model))


def _check_experts(moe: MoEOptions) -> None:
    if not all(moe.layers):
        raise ConfigError(
            f"model.moe.moe_layer_freq={moe['moe_layer_freq']} has layers without experts; in a gemma4 every layer has "
            "them (1)"
        )
    if not moe["moe_router_expert_scale"]:
        raise ConfigError("model.moe.moe_router_expert_scale=false is not defined for a gemma4; set it to true")


def _check_global_heads(config: Config, model: Gemma4Config) -> None:
    shape = model.of_layer(model.num_layers - 1)
    must_divide(
        "model.num_global_query_groups", shape.query_groups, "model.num_attention_heads", model.num_attention_heads
    )
    check_tensor_parallel(
        config, query_groups=shape.query_groups, ffn_size=model.ffn_size, heads=model.num_attention_heads
    )
    if model.global_kv_channels % 2:
        raise ConfigError(f"model.global_kv_channels={model.global_kv_channels} is odd; rotary positions turn pairs")
    if model.num_global_query_groups not in (None, model.query_groups) and not model.attention_k_eq_v:
        raise ConfigError(
            f"model.num_global_query_groups={model.num_global_query_groups} differs from model.num_query_groups="
            f"{model.query_groups}, which only models with model.attention_k_eq_v=true can have"
        )
    if model.hidden_size_per_layer_input:
        must_divide(
            "parallel.tensor_model_parallel_size",
            config.parallel.tensor_model_parallel_size,
            "model.hidden_size_per_layer_input",
            model.hidden_size_per_layer_input,
        )


def _check_rotary(model: Gemma4Config) -> None:
    if model.rope_scaling_type not in ("none", "linear"):
        raise ConfigError(
            f"model.rope_scaling_type={model.rope_scaling_type} is not defined for the frequencies of a gemma4; it can "
            "be none or linear"
        )
    if int(model.rotary_percent * model.global_kv_channels // 2) == 0:
        raise ConfigError(
            f"model.rotary_percent={model.rotary_percent} of {model.global_kv_channels} channels leaves none to rotate;"
            f" it has to be at least {2 / model.global_kv_channels:.3g}"
        )


def _check_shared_layers(model: Gemma4Config) -> None:
    first = model.num_layers - model.num_kv_shared_layers
    if not model.num_kv_shared_layers:
        if model.use_double_wide_mlp:
            raise ConfigError("model.use_double_wide_mlp would be ignored: set model.num_kv_shared_layers too")
        return
    kinds = {model.is_global(layer) for layer in range(first)} if first > 0 else set()
    if not {model.is_global(layer) for layer in range(first, model.num_layers)} <= kinds:
        raise ConfigError(
            f"model.num_kv_shared_layers={model.num_kv_shared_layers} of model.num_layers={model.num_layers} leaves no "
            "layer of each kind (local, global) whose keys and values the last layers can read; use fewer"
        )


def _check_stages(config: Config, model: Gemma4Config) -> None:
    """Raise ConfigError for pipeline stages of a model whose layers read more than the layer before them."""
    size = config.parallel.pipeline_model_parallel_size
    if size == 1:
        return
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if value := getattr(model, key):
            raise ConfigError(
                f"parallel.pipeline_model_parallel_size={size} sends hidden states alone from stage to stage, and with "
                f"model.{key}={value} layers of later stages read more than these; set it to 1 (tensor, context and "
                "data parallelism serve)"
            )


def shrink_gemma4(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`: a local layer, a global one, and one of each that share their keys and values."""
    window = max(seq_length // 2, 1)
    keys: dict[str, Any] = {"sliding_window": window, "sliding_window_pattern": 2, "global_kv_channels": 16}
    if model.get("num_kv_shared_layers"):
        keys |= {"num_layers": 4, "num_kv_shared_layers": 2}
    if model.get("num_global_query_groups"):
        keys["num_global_query_groups"] = 2
    if model.get("hidden_size_per_layer_input"):
        keys |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": None}
    return keys


MEGATRON = MegatronMap(
    unsupported="Megatron has no norms behind attention and feed-forward, no head sizes by layer, no embeddings of "
    "each layer and no keys and values that layers share"
)
