"""Configuration of LLaVA: its vision tower, its decoder, the projection; published sizes and FLOPs.

VisionLanguageConfig is what other families of images and text have in common with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator

from mt_core.config.checks import divisors, listed
from mt_core.config.fields import NonNegativeInt, PositiveInt, used_when
from mt_core.config.messages import validation_message
from mt_core.config.schema import Config, ModelConfig
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_core.specs import MODELS
from mt_models.flops import Convention, Flops, TokenFlops, flops_per_token
from mt_models.vision.config import (
    CLIP_LARGE_336,
    ImageFlops,
    VisionEncoderConfig,
    check_encoder,
    check_images,
    tower_flops,
)

Part = Literal["vision_model", "vision_projection", "language_model"]
ProjectionActivation = Literal["gelu", "gelu_tanh", "relu", "silu", "squared_relu"]
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def tower_section(value: Any) -> Any:
    """The tower's table in its type; or that of a whole model of the family vision, whose tower is taken."""
    if not isinstance(value, Mapping):
        return value
    # From a checkpoint or preset of the family vision: keys of its class head and of [model] are dropped.
    if value.get("family") == "vision":
        value = {key: value[key] for key in VisionEncoderConfig.model_fields if key in value}
    return validated("model.vision_model", VisionEncoderConfig, value)


def decoder_section(value: Any) -> Any:
    """The decoder's table in the type that the plugin of its family registered."""
    if not isinstance(value, Mapping):
        return value
    family = value.get("family")
    if not isinstance(family, str):
        raise ConfigError(
            "model.language_model.family is missing; name a family of decoders in quotes, such as "
            'model.language_model.family = "llama"'
        )
    spec = load_plugins()[MODELS].get(family, key="model.language_model.family")
    return validated("model.language_model", spec.config_type.load(), value)


def validated(section: str, type_: Any, value: Mapping[str, Any]) -> Any:
    try:
        return type_.model_validate(dict(value))
    except ValidationError as error:
        origins = dict.fromkeys(value, section)
        raise ConfigError(validation_message(section, type_, error, origins)) from None


class VisionLanguageConfig(ModelConfig):
    """An image tower in front of a decoder."""

    vision_model: Annotated[VisionEncoderConfig, BeforeValidator(tower_section)]
    """A table with the keys of the image tower, those of the family vision."""
    language_model: Annotated[SerializeAsAny[ModelConfig], BeforeValidator(decoder_section)]
    """A table with `family`, any family that continues text, and its keys. The vocabulary is model.vocab_size."""
    image_token_index: NonNegativeInt
    """The id that stands for an image in the text, once for each of its features. It need not be in the vocabulary."""
    freeze: list[Part] = Field(default_factory=list)
    """Parts that are not trained: vision_model, vision_projection (what is between the two, patch mergers included),
    language_model."""

    @model_validator(mode="before")
    @classmethod
    def _vocabulary_of_decoder(cls, values: Any) -> Any:
        """The decoder's table may name the vocabulary in place of the model's, as that of a checkpoint does."""
        decoder = values.get("language_model") if isinstance(values, Mapping) else None
        if not isinstance(decoder, Mapping):
            return values
        shared = {key: decoder[key] for key in ("vocab_size", "make_vocab_size_divisible_by") if decoder.get(key)}
        return {**shared, **values}

    @model_validator(mode="after")
    def _one_vocabulary(self) -> Self:
        for key in ("vocab_size", "make_vocab_size_divisible_by"):
            # A default counts as not given. Equal values are fine: a converted configuration repeats them.
            value = getattr(self.language_model, key)
            if value not in (ModelConfig.model_fields[key].default, getattr(self, key)):
                raise ConfigError(
                    f"model.language_model.{key}={value} and model.{key}={getattr(self, key)} differ; set model.{key}, "
                    "which is the decoder's too"
                )
        return self

    @property
    def decoder(self) -> Any:
        """The configuration from which the decoder is built: its table, with this model's vocabulary."""
        shared = {"vocab_size": self.vocab_size, "make_vocab_size_divisible_by": self.make_vocab_size_divisible_by}
        return self.language_model.model_copy(update=shared)

    @property
    def stacked_layers(self) -> int | None:
        """The decoder's. The tower is a part of the first stage."""
        return self.language_model.stacked_layers

    @property
    def media_token_ids(self) -> frozenset[int]:
        """Also those that transformers' class knows and this one does not."""
        names = {f"{medium}_token_{end}" for medium in ("image", "video", "audio") for end in ("index", "id")}
        ids = [getattr(self, name, None) for name in names] + [self.kept_token_ids.get(name) for name in names]
        return frozenset(token for token in ids if isinstance(token, int))

    @property
    def pipeline_layout(self) -> str | None:
        return self.language_model.pipeline_layout

    @property
    def image_seq_length(self) -> int:
        """Positions that an image of the tower's size takes in the text."""
        raise NotImplementedError

    @property
    def tower_layers(self) -> int:
        """Layers of the tower that features pass through."""
        return self.vision_model.num_layers

    @property
    def projection_weights(self) -> int:
        """Elements of the projection's matrices."""
        raise NotImplementedError

    @property
    def image_data_keys(self) -> dict[str, Any]:
        """Keys of the data set image_text, for images as published models of the family take them."""
        return {
            "img_h": self.vision_model.img_h,
            "img_w": self.vision_model.img_w,
            "image_token_index": self.image_token_index,
            "image_seq_length": self.image_seq_length,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": "bicubic",
        }


class PixelShuffleConfig(VisionLanguageConfig):
    """Squares of patches, side by side, become features (Chen et al., *How Far Are We to GPT-4V?*, 2024)."""

    scale_factor: PositiveInt = 2
    """Side of the square of patches that becomes one feature."""

    @property
    def image_seq_length(self) -> int:
        return self.vision_model.num_patches // self.scale_factor**2

    @property
    def feature_width(self) -> int:
        """Width of what the projection reads."""
        return self.vision_model.hidden_size * self.scale_factor**2


class LlavaConfig(VisionLanguageConfig):
    """An image tower in front of a decoder (Liu et al., Visual Instruction Tuning, 2023; LLaVA 1.5, 2024)."""

    vision_feature_layers: Annotated[list[int], Field(min_length=1)] = Field(default_factory=lambda: [-2])
    """States of the tower that the projection reads, side by side: 0 before the first layer, n behind the n-th;
    negative ones count from the end, -1 behind the last."""
    vision_feature_select_strategy: Literal["default", "full"] = "default"
    """default leaves the tower's class token out; full takes every position."""
    vision_projection_type: Literal["mlp", "affine"] = "mlp"
    """mlp: two matrices with projection_activation between them, as in LLaVA 1.5. affine: one, as in LLaVA."""
    projection_activation: ProjectionActivation = used_when("gelu", vision_projection_type="mlp")
    """Between the matrices of the projection."""
    projection_bias: bool = True
    """Biases in the projection."""
    projection_ffn_hidden_size: PositiveInt | None = used_when(None, vision_projection_type="mlp")
    """Width between the matrices of the projection. Default: the decoder's hidden_size, as in LLaVA 1.5."""
    projection_normalization: Literal["none", "LayerNorm", "RMSNorm"] = "none"
    """Norm of what the projection reads, as in models of Megatron-LM's multimodal example."""
    projection_norm_epsilon: Annotated[float, Field(ge=0)] = 1e-5
    """Added to the variance in this norm."""
    scale_factor: PositiveInt = 1
    """Side of the square of patches that becomes one feature."""

    @property
    def feature_states(self) -> list[int]:
        """vision_feature_layers counted from 0."""
        # One state before the first layer and one behind each: -1 % states is the last.
        states = self.vision_model.num_layers + 1
        return [layer % states for layer in self.vision_feature_layers]

    @property
    def feature_width(self) -> int:
        """Width of what the projection reads."""
        return len(self.vision_feature_layers) * self.vision_model.hidden_size * self.scale_factor**2

    @property
    def tower_layers(self) -> int:
        return max(self.feature_states)

    @property
    def projection_weights(self) -> int:
        hidden = self.decoder.hidden_size
        if self.vision_projection_type == "affine":
            return int(self.feature_width * hidden)
        return int((self.feature_width + hidden) * (self.projection_ffn_hidden_size or hidden))

    @property
    def drops_class_token(self) -> bool:
        return self.vision_feature_select_strategy == "default"

    @property
    def image_seq_length(self) -> int:
        """Positions that an image takes in the text."""
        positions = self.vision_model.num_positions - self.drops_class_token
        return positions // self.scale_factor**2

    @property
    def image_data_keys(self) -> dict[str, Any]:
        """One view, with the colours that the tower's kind was trained with."""
        of_clip = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD} if self.vision_model.has_class_token else {}
        return super().image_data_keys | {"resize": "crop"} | of_clip


def check_llava(config: Config) -> None:
    """Raise ConfigError for parts that cannot be built or do not fit together, or samples made for another model."""
    model = config.model
    assert isinstance(model, LlavaConfig)
    check_parts(model, config)
    _check_features(model)


def check_parts(model: VisionLanguageConfig, config: Config) -> None:
    """Raise ConfigError for a tower or decoder that cannot be built, and for samples made for another model."""
    check_encoder(model.vision_model, config, "model.vision_model")
    check_images(model.vision_model, config, "model.vision_model")
    _check_samples(model, config)
    check_decoder(model, config)


def check_squares(tower: VisionEncoderConfig, side: int) -> None:
    """Raise ConfigError where squares of `side` by `side` patches do not fill an image."""
    rows, columns = tower.grid
    if rows % side or columns % side:
        both = [number for number in divisors(rows) if columns % number == 0]
        raise ConfigError(
            f"model.scale_factor={side} does not divide the {rows} by {columns} patches of an image; it can be "
            f"{listed(both)}"
        )


def _check_features(model: LlavaConfig) -> None:
    if model.scale_factor > 1:
        check_squares(model.vision_model, model.scale_factor)
    if model.scale_factor > 1 and model.vision_model.has_class_token and not model.drops_class_token:
        raise ConfigError(
            f"model.scale_factor={model.scale_factor} makes features of squares of patches, and the class token is "
            "none; set model.vision_feature_select_strategy to default"
        )
    last = model.vision_model.num_layers
    for layer in model.vision_feature_layers:
        if not -last - 1 <= layer <= last:
            raise ConfigError(
                f"model.vision_feature_layers={model.vision_feature_layers}: the tower has the states 0 to {last}, or "
                f"{-last - 1} to -1 from the end, and no {layer}"
            )
    if model.drops_class_token and not model.vision_model.has_class_token:
        raise ConfigError(
            "model.vision_feature_select_strategy=default leaves the class token out, and "
            f"model.vision_model.vision_model_type={model.vision_model.vision_model_type} has none; set it to full"
        )


def _check_samples(model: VisionLanguageConfig, config: Config) -> None:
    require_data(
        config,
        {
            "image_token_index": (model.image_token_index, "model.image_token_index"),
            "image_seq_length": (model.image_seq_length, "the number of features that the tower gives for an image"),
        },
    )


def require_data(config: Config, wanted: Mapping[str, tuple[Any, str]]) -> None:
    """Raise ConfigError for keys of [data] with other values, where the data set has the keys.

    wanted: key -> the value, and what it is.
    """
    for key, (value, meaning) in wanted.items():
        present = getattr(config.data, key, None)
        if present is not None and present != value:
            raise ConfigError(f"data.{key}={present} has to be {value}, {meaning}")


def check_decoder(model: VisionLanguageConfig, config: Config) -> None:
    """Check by the rules of the part's family, whose messages name a [model] section."""
    try:
        load_plugins().check_config(config.model_copy(update={"model": model.decoder}))
    except ConfigError as error:
        raise ConfigError(f"in model.language_model, which is [model] in what follows: {error}") from None


# -- published sizes: LLaVA 1.5, with CLIP's large tower at 336 pixels, and Vicuna (Llama 2) ---------


def _llava15(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    decoder = {
        "family": "llama",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": ffn,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
    }
    return {
        "model": {
            "vision_model": CLIP_LARGE_336,
            "language_model": decoder,
            # 32000 tokens, the image token, the padding, and the rest of a multiple of 64.
            "vocab_size": 32064,
            "image_token_index": 32000,
        },
        "data": {"seq_length": 2048},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": _llava15(32, 4096, 32, 11008),
    "llava-1.5-13b": _llava15(40, 5120, 40, 13824),
}


# -- a small model for checks ------------------------------------------------------------------------


def shrink_llava(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """The last state of the tower is projected."""
    return {**shrink_images(model), "vision_feature_layers": [-1]}


def shrink_squares(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """Small model of a family whose features are squares of patches: of two by two, where these fill the image."""
    shrunk = shrink_images(model)
    tower = shrunk["vision_model"]
    rows, columns = tower["img_h"] // tower["patch_dim"], tower["img_w"] // tower["patch_dim"]
    return {**shrunk, "scale_factor": gcd(rows, columns, 2)}


def shrink_images(model: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model] for two by two patches, or as near as the proportions of the image allow. The image token is
    behind every vocabulary."""
    tower = model["vision_model"]
    return {
        "vision_model": {**tower, "patch_dim": max(1, min(tower["img_h"], tower["img_w"]) // 2)},
        "image_token_index": max(model["image_token_index"], 100_000),
    }


# -- FLOPs of LLaVA, SmolVLM and InternVL for each sample (counted as in mt_models.flops) ------------


@dataclass(frozen=True)
class SampleFlops(Flops):
    """Forward FLOPs for each sample."""

    vision_model: ImageFlops
    """For each image, up to the last state that the projection reads."""
    vision_projection: float
    """For each image."""
    language_model: TokenFlops
    """For each position, those of images included."""
    images: int
    positions: int

    @property
    def forward(self) -> float:
        per_image = self.vision_model.forward + self.vision_projection
        return self.images * per_image + self.positions * self.language_model.forward


def flops_per_sample(
    config: VisionLanguageConfig,
    seq_length: int,
    *,
    images: int = 1,
    convention: Convention = "seen",
    feed_forward: float | None = None,
) -> SampleFlops:
    """seq_length: with the positions of images. images: views, which are tiles and whole images. convention,
    feed_forward: see mt_models.flops.flops_per_token."""
    return SampleFlops(
        vision_model=tower_flops(config.vision_model, config.tower_layers),
        # Each weight is used once for a feature.
        vision_projection=2.0 * config.image_seq_length * config.projection_weights,
        language_model=flops_per_token(config.decoder, seq_length, convention=convention, feed_forward=feed_forward),
        images=images,
        positions=seq_length,
    )


def training_flops(config: Config) -> float | None:
    """See `ModelSpec.training_flops`: of a sample with as many views as it can have."""
    model: Any = config.model
    tower = tower_flops(model.vision_model, model.tower_layers).training
    projection = 3 * 2.0 * model.image_seq_length * model.projection_weights
    decoder = decoder_training_flops(config)
    return None if decoder is None else most_views(config) * (tower + projection) + decoder


def most_views(config: Config) -> int:
    """Most views of images that a sample can have: of one image, unless samples are packed; 0 for text alone."""
    data: Any = config.data
    if getattr(data, "image_seq_length", None) is None:
        return 0
    tiling = getattr(data, "tiling", None)
    return getattr(data, "max_images", None) or (1 if tiling is None else int(tiling.max_views))


def decoder_training_flops(config: Config) -> float | None:
    """FLOPs of training the decoder on a sample, as its family counts them; None: it does not."""
    model: Any = config.model
    count = load_plugins()[MODELS].get(model.decoder.family, key="model.language_model.family").training_flops
    return None if count is None else count.load()(config.model_copy(update={"model": model.decoder}))


MEGATRON = MegatronMap(
    unsupported="Megatron's models of images and text are made by its example scripts, in sizes that these list by "
    "name, and which id stands for an image only their tokenizer says"
)
