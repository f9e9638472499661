"""Configuration of Gemma 4 with pictures: its vision transformer, its decoder, how the two meet; sizes and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mt_core.config.checks import must_divide
from mt_core.config.fields import NonNegativeInt, PositiveFloat, PositiveInt
from mt_core.config.schema import Config, Section
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.gemma4.config import Gemma4Config, shrink_gemma4
from mt_models.gemma4.flops import flops_per_token
from mt_models.gemma4.presets import PRESETS as DECODERS
from mt_models.llava.config import check_decoder, validated
from mt_models.llava.dynamic_config import (
    DynamicResolutionConfig,
    MergedPatchConfig,
    check_samples,
    largest_image_flops,
    refuse_context_parallel,
)
from mt_models.sound.config import HOP, SoundPart, check_sound_samples
from mt_models.vision.config import VisionActivation, check_tensor_parallel

if TYPE_CHECKING:
    from torch import Tensor


class Gemma4VisionConfig(MergedPatchConfig):
    """The vision transformer of Gemma 4 (2026): patches of images of any size, learned and rotary positions of rows and
    columns, norms before and behind attention and the gated feed-forward, pooled squares of patches."""

    kv_channels: PositiveInt | None = None
    """Size of a head. Default: hidden_size / num_attention_heads."""
    num_query_groups: PositiveInt | None = None
    """Key-value heads. Default: num_attention_heads."""
    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the mean square."""
    patch_dim: PositiveInt = 16
    """Side of a patch in pixels."""
    spatial_merge_size: PositiveInt = 3
    """So many by so many patches become one vector of the decoder, which is made of their mean."""
    num_position_embeddings: PositiveInt = 10240
    """Learned positions, as many of rows as of columns."""
    rotary_base: PositiveFloat = 100.0
    """Base of the rotary wavelengths."""
    clipped_linears: bool = False
    """Matrices have bounds of what they read and of what they give, which are stored with the weights and not trained.
    """
    standardized: bool = False
    """Pooled vectors lose a mean and are scaled, each channel by numbers that are stored and not trained."""

    # Values of the shared blocks' keys that are not those of other encoders.

    @property
    def activation(self) -> str:
        return "geglu_tanh"

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads


class Gemma4AudioConfig(Section):
    """The audio tower of Gemma 4 (E2B, E4B): a conformer (Gulati et al., 2020) over log-mel spectrograms, four frames
    of which are a position, with attention to a short past."""

    num_layers: PositiveInt
    """Conformer layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_attention_heads: PositiveInt
    """Attention heads."""
    conv_channels: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] = Field(
        default_factory=lambda: [128, 32]
    )
    """Channels of the two convolutions that make a position of four frames. A frame has as many mel bins as the first
    has channels."""
    conv_kernel_size: PositiveInt = 5
    """Positions that the convolution of a layer reads, the last of which is its own."""
    residual_weight: PositiveFloat = 0.5
    """Factor of what a feed-forward adds, of which a layer has two."""
    attention_chunk_size: PositiveInt = 12
    """Positions of a chunk: with those before and behind, half of them are distances that have embeddings."""
    attention_context_left: Annotated[int, Field(ge=2)] = 13
    """A position sees so many positions less one, itself the last of them."""
    attention_context_right: NonNegativeInt = 0
    """And so many positions less one behind itself; 0 and 1: none."""
    attention_logit_cap: PositiveFloat = 50.0
    """Scores x are cap tanh(x / cap)."""
    clipped_linears: bool = True
    """Matrices have bounds of what they read and of what they give, which are stored with the weights and not trained.
    """
    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the mean square, in norms within convolutions."""
    gradient_clipping: PositiveFloat = 1e10
    """Bound of the states that norms read."""
    activation: VisionActivation = "silu"
    """Activation of feed-forwards and convolutions."""
    output_size: PositiveInt = 1536
    """Width of what the tower gives."""
    init_method_std: Annotated[float, Field(ge=0)] = 0.02
    """Standard deviation of the initial weights."""

    @property
    def num_mel_bins(self) -> int:
        """Mel bins of a frame."""
        return self.conv_channels[0]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def attention_past(self) -> int:
        """Positions that a position sees, itself the last of them."""
        return self.attention_context_left - 1

    @property
    def distances(self) -> int:
        """Distances that have embeddings."""
        return (self.attention_chunk_size + self.attention_past + self.attention_context_right) // 2 + 1

    def clamped(self, x: Tensor) -> Tensor:
        """Within the bound, or within what the dtype can hold."""
        import torch  # configurations are read without it

        bound = min(self.gradient_clipping, torch.finfo(x.dtype).max)
        return torch.clamp(x, -bound, bound)


class Gemma4VLDecoderConfig(Gemma4Config):
    """Gemma 4, some sizes of which let the positions of an image see one another."""

    family: Literal["gemma4"] = "gemma4"
    """The decoder's family."""
    bidirectional_images: bool = False
    """In local layers all positions of an image within the window see one another; else they see those before alone."""
    per_layer_image_token: NonNegativeInt = 0
    """The token whose embeddings of each layer positions of images have. They are not trained there."""

    @property
    def has_image_patterns(self) -> bool:
        return self.bidirectional_images


def vision_section(value: Any) -> Any:
    return validated("model.vision_model", Gemma4VisionConfig, value) if isinstance(value, Mapping) else value


def audio_section(value: Any) -> Any:
    return validated("model.audio_model", Gemma4AudioConfig, value) if isinstance(value, Mapping) else value


def decoder_section(value: Any) -> Any:
    return validated("model.language_model", Gemma4VLDecoderConfig, value) if isinstance(value, Mapping) else value


class Gemma4VLConfig(DynamicResolutionConfig):
    """A vision transformer in front of Gemma 4."""

    PUBLISHED_IMAGES: ClassVar[dict[str, Any]] = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_markers": "gemma4",
        "size_rule": "fill",
    }
    PUBLISHED_CELLS: ClassVar[tuple[int, int]] = (1, 280)
    AUDIO_RULE: ClassVar[str] = "gemma4"

    vision_model: Annotated[Gemma4VisionConfig, BeforeValidator(vision_section)]  # type: ignore[assignment]
    """A table with the keys of the vision transformer."""
    language_model: Annotated[Gemma4VLDecoderConfig, BeforeValidator(decoder_section)]
    """A table with the keys of the family gemma4, and those of its images. The vocabulary is model.vocab_size."""
    image_token_index: NonNegativeInt = 258880
    """The id that stands for an image in the text, once for each of its pooled squares of patches."""
    video_token_index: NonNegativeInt = 258884
    """The id that stands for a video, which the model does not take: it is embedded as the token of padding,
    per_layer_image_token of the language model. So is audio_token_index without an audio tower."""
    audio_model: Annotated[Gemma4AudioConfig | None, BeforeValidator(audio_section)] = None
    """A table with the keys of the audio tower, which E2B and E4B have. Default: the model takes no sound."""
    audio_token_index: NonNegativeInt = 258881
    """The id that stands for sound in the text, once for each position of the audio tower."""
    freeze: list[SoundPart] = Field(default_factory=list)  # type: ignore[assignment]
    """Parts that are not trained: vision_model, vision_projection, language_model, and of a model with an audio tower
    audio_model and audio_projection."""

    @property
    def decoder(self) -> Any:
        """With the tokens of media that the model does not take."""
        tokens = [self.video_token_index, *([self.audio_token_index] if self.audio_model is None else [])]
        padding = self.language_model.per_layer_image_token
        return super().decoder.model_copy(update={"placeholder_token_ids": tokens, "placeholder_embedding_id": padding})

    def sound_positions(self, samples: int) -> int:
        """Audio tokens of a sound of so many samples at 16 kHz."""
        return -(-((samples - 1) // HOP) // 4)

    @property
    def image_data_keys(self) -> dict[str, Any]:
        keys = super().image_data_keys
        if self.audio_model is None:
            return keys
        return keys | {"audio_token_index": self.audio_token_index, "audio_rule": self.AUDIO_RULE}


# -- rules -------------------------------------------------------------------------------------------


def check_gemma4_vl(config: Config) -> None:
    """Raise ConfigError for parts that cannot be built or do not fit together, or samples made for another model."""
    model = config.model
    assert isinstance(model, Gemma4VLConfig)
    refuse_context_parallel(config)
    _check_tower(model.vision_model, config)
    _check_image_attention(model.language_model)
    check_samples(model, config)
    _check_audio(model, config)
    check_decoder(model, config)


def _check_audio(model: Gemma4VLConfig, config: Config) -> None:
    """Raise ConfigError for an audio tower that cannot be built, and for sound without one."""
    tower = model.audio_model
    if tower is None:
        if sounds := [part for part in model.freeze if part.startswith("audio")]:
            raise ConfigError(f"model.freeze has {sounds[0]}, and the model has no audio tower (model.audio_model)")
        if getattr(config.data, "audio_token_index", None) is not None:
            raise ConfigError(
                "data.audio_token_index is set, and model.family=gemma4_vl takes no sound without an audio tower "
                "(model.audio_model)"
            )
        return
    section = "model.audio_model"
    must_divide(
        f"{section}.num_attention_heads", tower.num_attention_heads, f"{section}.hidden_size", tower.hidden_size
    )
    if tower.conv_channels[0] % 4 or tower.hidden_size % 2:
        raise ConfigError(
            f"{section}.conv_channels={tower.conv_channels} and hidden_size={tower.hidden_size}: the first number has "
            "to be a multiple of 4, since two convolutions halve the mel bins, which are as many, and the width even"
        )
    check_sound_samples(model, config)


def _check_tower(tower: Gemma4VisionConfig, config: Config) -> None:
    section = "model.vision_model"
    if tower.kv_channels is None:
        must_divide(
            f"{section}.num_attention_heads", tower.num_attention_heads, f"{section}.hidden_size", tower.hidden_size
        )
    must_divide(
        f"{section}.num_query_groups", tower.query_groups, f"{section}.num_attention_heads", tower.num_attention_heads
    )
    must_divide(
        "parallel.tensor_model_parallel_size",
        config.parallel.tensor_model_parallel_size,
        f"{section}.num_query_groups",
        tower.query_groups,
    )
    if tower.head_dim % 4:
        raise ConfigError(
            f"{section}.kv_channels={tower.head_dim} has to be a multiple of 4: one half of the channels of a head is "
            "turned by the row of a patch, the other by its column"
        )
    check_tensor_parallel(tower, config, section)


def _check_image_attention(decoder: Gemma4VLDecoderConfig) -> None:
    if decoder.bidirectional_images and decoder.attention_backend == "flex":
        raise ConfigError(
            "model.language_model.attention_backend=flex does not serve model.language_model.bidirectional_images=true:"
            " it has no mask that all heads share; use auto, sdpa or eager"
        )


def shrink_gemma4_vl(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`. The tokens of images and sound are behind every vocabulary."""
    image = max(model["image_token_index"], 100_000)
    sound = {"audio_token_index": image + 1}
    if model.get("audio_model") is not None:
        sound |= {"audio_model": {**model["audio_model"], "conv_channels": [8, 4], "output_size": 16}}
    tower, decoder = dict(model["vision_model"]), dict(model["language_model"])
    tower |= {"patch_dim": 2, "spatial_merge_size": 2, "num_position_embeddings": 64}
    tower |= {"kv_channels": None, "num_query_groups": None}
    decoder |= shrink_gemma4(decoder, seq_length)
    return {
        "vision_model": tower,
        "language_model": decoder,
        "image_token_index": image,
        **sound,
    }


# -- published sizes ---------------------------------------------------------------------------------

SMALL_TOWER = {
    "num_layers": 16,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "ffn_hidden_size": 3072,
    "clipped_linears": True,
}
LARGE_TOWER = {
    "num_layers": 27,
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "ffn_hidden_size": 4304,
    "standardized": True,
}


def _with_tower(name: str, tower: dict[str, Any], *, bidirectional: bool) -> dict[str, Any]:
    decoder = {key: value for key, value in DECODERS[name]["model"].items() if key != "vocab_size"}
    return {
        "model": {
            "vision_model": tower,
            "language_model": {**decoder, "bidirectional_images": bidirectional},
            "vocab_size": DECODERS[name]["model"]["vocab_size"],
            "image_token_index": 258880,
        },
        "data": DECODERS[name]["data"],
    }


AUDIO_TOWER = {"num_layers": 12, "hidden_size": 1024, "num_attention_heads": 8}


def _with_sound(preset: dict[str, Any]) -> dict[str, Any]:
    return {**preset, "model": {**preset["model"], "audio_model": AUDIO_TOWER, "audio_token_index": 258881}}


PRESETS: dict[str, dict[str, Any]] = {
    "gemma4-e2b-vl": _with_tower("gemma4-e2b", SMALL_TOWER, bidirectional=False),
    "gemma4-e4b-vl": _with_tower("gemma4-e4b", SMALL_TOWER, bidirectional=False),
    "gemma4-31b-vl": _with_tower("gemma4-31b", LARGE_TOWER, bidirectional=True),
    "gemma4-26b-a4b-vl": _with_tower("gemma4-26b-a4b", LARGE_TOWER, bidirectional=True),
}
PRESETS |= {f"{name}-audio": _with_sound(PRESETS[name]) for name in ("gemma4-e2b-vl", "gemma4-e4b-vl")}


# -- FLOPs (counted as in mt_models.flops) -----------------------------------------------------------


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`: of a sample with one image, the largest that it can have, and the longest
    sound."""
    model: Any = config.model
    data: Any = config.data
    length = config.data.seq_length
    text = length * flops_per_token(model.decoder, length).training
    seen = largest_image_flops(config, model.vision_model.hidden_size * model.decoder.hidden_size) + text
    if model.audio_model is None or getattr(data, "audio_token_index", None) is None:
        return seen
    return seen + 3 * sound_flops(model, data.max_audio_samples)


def sound_flops(model: Gemma4VLConfig, samples: int) -> float:
    """Forward FLOPs of a sound of so many samples."""
    tower = model.audio_model
    assert tower is not None
    hidden, positions = tower.hidden_size, model.sound_positions(samples)
    first, second = tower.conv_channels
    frames, bins = (samples - 1) // HOP, tower.num_mel_bins
    convolutions = 18 * first * (-(-frames // 2) * (bins // 2) + positions * (bins // 4) * second)
    embedded = 2 * positions * (bins // 4) * second * hidden
    seen = min(positions, tower.attention_past + max(tower.attention_context_right - 1, 0))
    # Two feed-forwards of 4 H, four matrices of attention, its scores, values and distances, 3 H in the convolution.
    matrices = hidden**2 * (32 + 8 + 6) + 2 * hidden * (2 * seen + tower.distances + tower.conv_kernel_size)
    behind = 2 * tower.output_size * (hidden + model.decoder.hidden_size)
    return convolutions + embedded + positions * (tower.num_layers * matrices + behind)


MEGATRON = MegatronMap(unsupported="Megatron has no vision transformer with pooled patches, and no Gemma 4")
