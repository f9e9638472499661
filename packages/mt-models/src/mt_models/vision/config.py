"""Configuration of vision transformers: keys, the rules that tie them together, published sizes and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.checks import divisors, listed, must_divide_all
from mt_core.config.fields import PositiveInt, Probability, used_when
from mt_core.config.schema import Config, ModelConfig
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import EncoderConfig, refuse_divided_sequences_and_layers
from mt_models.flops import Flops

VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]


class VisionEncoderConfig(EncoderConfig):
    """The shape of an image tower (Dosovitskiy et al., 2021), as CLIP, SigLIP or InternViT build it."""

    vision_model_type: Literal["clip", "siglip", "internvit"] = "clip"
    """clip (Radford et al., 2021): a class token, a norm before the layers. siglip (Zhai et al., 2023): no class
    token, a norm behind the layers, a bias on the patches. internvit (Chen et al., 2023): a class token, a bias on the
    patches, and what a layer adds is scaled, each channel by a weight."""
    img_h: PositiveInt = 224
    """Height of the images in pixels."""
    img_w: PositiveInt = 224
    """Width of the images in pixels."""
    patch_dim: PositiveInt = 16
    """Side of a patch in pixels. Pixels at the right and lower edge that fill no patch are left out."""
    num_channels: PositiveInt = 3
    """Colours of a pixel."""
    activation: VisionActivation = "quick_gelu"
    """Activation of the feed-forward. CLIP was trained with quick_gelu, SigLIP with gelu_tanh."""
    layer_scale_init_value: Annotated[float, Field(gt=0)] = used_when(0.1, vision_model_type="internvit")
    """Initial weights of the channels that a layer adds."""
    add_pooler: bool = used_when(True, vision_model_type=("clip", "siglip"))
    """The part that makes one vector of an image: CLIP's norm of the class token, SigLIP's attention over patches."""
    attention_dropout: Probability = 0.0
    """Dropout on the attention weights."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.img_h // self.patch_dim, self.img_w // self.patch_dim

    @property
    def num_patches(self) -> int:
        rows, columns = self.grid
        return rows * columns

    @property
    def has_class_token(self) -> bool:
        """Stands before the patches."""
        return self.vision_model_type != "siglip"

    @property
    def num_positions(self) -> int:
        return self.num_patches + self.has_class_token

    @property
    def has_pooler(self) -> bool:
        return self.add_pooler and self.vision_model_type != "internvit"

    @property
    def hidden_dropout(self) -> float:
        return 0.0


class VisionConfig(ModelConfig, VisionEncoderConfig):
    """An image tower, with or without a head that predicts classes."""

    num_classes: PositiveInt | None = None
    """Classes to choose from, by a linear layer on the mean over the patches. Default: no such head; the model gives
    hidden states and the pooled vector."""

    @property
    def has_pooler(self) -> bool:
        """The head reads the patches, so that nothing would read a pooler."""
        return super().has_pooler and self.num_classes is None


def check_vision(config: Config) -> None:
    """Raise ConfigError for a tower that cannot be built, or images or a loss made for another model."""
    model = config.model
    assert isinstance(model, VisionConfig)
    check_encoder(model, config, "model")
    refuse_divided_sequences_and_layers(config)
    check_images(model, config, "model")
    if config.parallel.sequence_parallel:
        raise ConfigError(
            "parallel.sequence_parallel=true divides sequences between the layers, and model.family=vision has whole "
            "ones on every rank: an image is a short sequence, often of odd length; set it to false"
        )
    classes = getattr(config.data, "num_classes", None)
    if model.num_classes is None:
        if classes is not None:
            raise ConfigError(
                f"model.num_classes is missing: data.dataset_type={config.data.dataset_type} has {classes} classes, "
                f"and model.family=vision predicts them only with this key; set it to {classes}"
            )
        return
    if config.train.loss == "cross_entropy":
        raise ConfigError(
            "train.loss=cross_entropy is for predicted words; model.family=vision with model.num_classes predicts the "
            'class of an image, use train.loss="classification"'
        )
    if classes is not None and classes != model.num_classes:
        raise ConfigError(
            f"model.num_classes={model.num_classes} does not fit data.dataset_type={config.data.dataset_type}, which "
            f"has {classes} classes; set it to {classes}"
        )


def check_encoder(model: VisionEncoderConfig, config: Config, section: str) -> None:
    """Raise ConfigError when heads do not divide the width, ranks not the heads, or an image has no patch.

    section: the dotted name of the tower's keys, for the messages.
    """
    if model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"{section}.hidden_size={model.hidden_size} is not divisible by {section}.num_attention_heads="
            f"{model.num_attention_heads}; the number of heads can be {listed(divisors(model.hidden_size))}"
        )
    if not model.num_patches:
        raise ConfigError(
            f"{section}.patch_dim={model.patch_dim} is larger than an image of {section}.img_h={model.img_h} by "
            f"{section}.img_w={model.img_w}; use at most {min(model.img_h, model.img_w)}"
        )
    check_tensor_parallel(model, config, section)


def check_tensor_parallel(model: EncoderConfig, config: Config, section: str) -> None:
    """Raise ConfigError when ranks do not divide the tower. section: as of `check_encoder`."""
    size = config.parallel.tensor_model_parallel_size
    key = "parallel.tensor_model_parallel_size"
    heads, ffn_size = model.num_attention_heads, model.ffn_size
    must_divide_all(key, size, {f"{section}.num_attention_heads": heads, f"{section}.ffn_hidden_size": ffn_size})


def check_images(model: VisionEncoderConfig, config: Config, section: str) -> None:
    """Raise ConfigError when the data set, if it gives images, makes them of another size than the tower takes."""
    for key in ("img_h", "img_w", "num_channels"):
        value, wanted = getattr(config.data, key, None), getattr(model, key)
        if value is not None and value != wanted:
            raise ConfigError(
                f"data.{key}={value} and {section}.{key}={wanted} must be equal: the model takes the data set's images "
                "as they are"
            )


# -- published sizes of the image towers of CLIP and SigLIP; images come in the tower's size ---------

LARGE = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16}
BASE = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
SO400M = {"num_layers": 27, "hidden_size": 1152, "num_attention_heads": 16, "ffn_hidden_size": 4304}


def clip(shape: dict[str, int], patch: int, image: int) -> dict[str, Any]:
    """Keys of a CLIP tower."""
    return {"vision_model_type": "clip", **shape, "patch_dim": patch, "img_h": image, "img_w": image}


def siglip(shape: dict[str, int], patch: int, image: int) -> dict[str, Any]:
    """Keys of a SigLIP tower."""
    return {
        "vision_model_type": "siglip",
        **shape,
        "patch_dim": patch,
        "img_h": image,
        "img_w": image,
        "activation": "gelu_tanh",
        "norm_epsilon": 1e-6,
    }


CLIP_LARGE_336 = clip(LARGE, 14, 336)
"""The tower of LLaVA 1.5."""


def _preset(tower: dict[str, Any]) -> dict[str, Any]:
    return {"model": tower}


PRESETS: dict[str, dict[str, Any]] = {
    "clip-vit-base-patch32": _preset(clip(BASE, 32, 224)),
    "clip-vit-base-patch16": _preset(clip(BASE, 16, 224)),
    "clip-vit-large-patch14": _preset(clip(LARGE, 14, 224)),
    "clip-vit-large-patch14-336": _preset(CLIP_LARGE_336),
    "siglip-base-patch16-224": _preset(siglip(BASE, 16, 224)),
    "siglip-base-patch16-256": _preset(siglip(BASE, 16, 256)),
    "siglip-base-patch16-384": _preset(siglip(BASE, 16, 384)),
    "siglip-base-patch16-512": _preset(siglip(BASE, 16, 512)),
    "siglip-so400m-patch14-224": _preset(siglip(SO400M, 14, 224)),
    "siglip-so400m-patch14-384": _preset(siglip(SO400M, 14, 384)),
}


# -- FLOPs for each image ----------------------------------------------------------------------------
#
# Counted as for decoders (mt_models.flops): matrix products only, backward twice forward.


@dataclass(frozen=True)
class ImageFlops(Flops):
    """Forward FLOPs for each image."""

    patches: float
    """Patch embeddings."""
    attention_projections: float
    """Queries, keys, values and the output of attention, over all layers."""
    attention_core: float
    """Scores and their product with the values, over all layers."""
    feed_forward: float
    pooler: float
    """Attention pooling."""
    output: float
    """Classification logits."""


def tower_flops(config: VisionEncoderConfig, layers: int) -> ImageFlops:
    """The first `layers` layers, without the final norm and heads."""
    hidden, positions = config.hidden_size, config.num_positions
    return ImageFlops(
        patches=2 * config.num_patches * config.num_channels * config.patch_dim**2 * hidden,
        attention_projections=layers * positions * 8 * hidden**2,
        attention_core=layers * positions * 4 * positions * hidden,
        feed_forward=layers * positions * 4 * hidden * config.ffn_size,
        pooler=0.0,
        output=0.0,
    )


def flops_per_image(config: VisionConfig) -> ImageFlops:
    """FLOPs of a model of the family vision."""
    below = tower_flops(config, config.num_layers)
    return ImageFlops(
        patches=below.patches,
        attention_projections=below.attention_projections,
        attention_core=below.attention_core,
        feed_forward=below.feed_forward,
        pooler=pooler_flops(config),
        output=2.0 * config.hidden_size * (config.num_classes or 0),
    )


def pooler_flops(config: VisionConfig) -> float:
    """CLIP's pooler is a norm; SigLIP's has one query, and a feed-forward on one vector."""
    if config.has_class_token or not config.has_pooler:
        return 0.0
    hidden, positions = config.hidden_size, config.num_positions
    # Query and output of the one probe; keys and values of every position.
    projections = 2 * hidden**2 * (2 + 2 * positions)
    return projections + 4 * positions * hidden + 4 * hidden * config.ffn_size


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return flops_per_image(model).training


MEGATRON = MegatronMap(unsupported="Megatron-Core has image towers only within a model of images and text")
