"""Image towers: an image is split into patches, encoded by a bidirectional transformer (Dosovitskiy et al., 2021).

Shapes: B batch, C channels, S positions (patches, and before them the class token if there is one), H hidden.
Tensor parallelism shards heads and feed-forwards. Sequence parallelism is not used in a tower: its sequences
are short and of odd lengths, so every rank has whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal
from mt_core.nn.model import Model
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import Axis
from mt_models.blocks.embedding import LearnedTable
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.vision.config import VisionConfig, VisionEncoderConfig
from mt_models.vision.layers import AttentionPooling, PatchEmbedding, VisionLayers


class VisionOutput(NamedTuple):
    """hidden_states: [B, S, H] of the last layer. pooled: [B, H], one vector an image; None without a pooler."""

    hidden_states: Tensor
    pooled: Tensor | None


class VisionTower(LayoutModule):
    """images [B, C, img_h, img_w] -> VisionOutput: patches, positions and layers, which all towers have."""

    def __init__(self, config: VisionEncoderConfig, context: ModelBuildContext) -> None:
        ctx = context.parallel
        super().__init__(ctx)
        self.config = config
        self.conv1 = PatchEmbedding(config, ctx, bias=config.vision_model_type != "clip")
        self.position_embeddings = LearnedTable(
            config.num_positions, config.hidden_size, normal(config.init_method_std), ctx
        )
        self.decoder = VisionLayers(config, context)

    def forward(self, images: Tensor) -> VisionOutput:
        *_, last = self.states(images)
        return self.finish(last)

    def states(self, images: Tensor) -> Iterator[Tensor]:
        """[B, S, H] before the first layer, then after each; a layer runs when its state is requested."""
        return self.decoder.states(self.embed(images))

    def behind(self, state: int) -> list[nn.Module]:
        """The modules that are not used for `states` up to number `state`."""
        # State 0 is before the first layer, so that state n needs the first n layers.
        return [*list(self.decoder.layers)[state:], *self.finishing()]

    def embed(self, images: Tensor) -> Tensor:
        """[B, C, img_h, img_w] -> [B, S, H]"""
        raise NotImplementedError

    def hidden_states(self, images: Tensor) -> Tensor:
        """The state [B, S, H] behind the last layer, normalized where the tower has a norm there."""
        *_, last = self.states(images)
        return self.normalize(last)

    def normalize(self, x: Tensor) -> Tensor:
        """The state [B, S, H] behind the last layer through the norm there, if the tower has one."""
        return x

    def pooling(self) -> list[nn.Module]:
        """The modules that make the pooled vector."""
        raise NotImplementedError

    def finishing(self) -> list[nn.Module]:
        """The modules that `finish` uses."""
        return self.pooling()

    def finish(self, x: Tensor) -> VisionOutput:
        """From the state [B, S, H] behind the last layer."""
        raise NotImplementedError


class ClassTokenTower(VisionTower):
    """A class token before the patches."""

    class_token: Tensor

    def __init__(self, config: VisionEncoderConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context)
        self.declare("class_token", ParameterLayout((config.hidden_size,), normal(config.init_method_std)))

    def embed(self, images: Tensor) -> Tensor:
        patches = self.conv1(images)
        # [H] -> [B, 1, H]; the class token is position 0 of the table, patches follow.
        first = self.class_token.expand(len(patches), 1, -1)
        return torch.cat((first, patches), dim=1) + self.position_embeddings.weight


class ClipTower(ClassTokenTower):
    """CLIP: a norm before the layers; the pooled vector is the normalized state of the class token."""

    def __init__(self, config: VisionEncoderConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context)
        width, ctx = config.hidden_size, self.ctx
        self.ln_pre = build_norm(config.normalization, width, config.norm_epsilon, ctx)
        self.ln_post: nn.Module | None = None
        if config.has_pooler:
            self.ln_post = build_norm(config.normalization, width, config.norm_epsilon, ctx)

    def embed(self, images: Tensor) -> Tensor:
        normalized: Tensor = self.ln_pre(super().embed(images))
        return normalized

    def pooling(self) -> list[nn.Module]:
        return [] if self.ln_post is None else [self.ln_post]

    def finish(self, x: Tensor) -> VisionOutput:
        # hidden_states are not normalized: ln_post is applied to the class token alone.
        return VisionOutput(x, None if self.ln_post is None else self.ln_post(x[:, 0]))


class InternVitTower(ClassTokenTower):
    """InternViT: no norm around the layers, no pooled vector."""

    def pooling(self) -> list[nn.Module]:
        return []

    def finish(self, x: Tensor) -> VisionOutput:
        return VisionOutput(x, None)


class SiglipTower(VisionTower):
    """SigLIP: patches only, a norm after the layers; the pooled vector is computed by attention pooling."""

    def __init__(self, config: VisionEncoderConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context)
        self.ln_post = build_norm(config.normalization, config.hidden_size, config.norm_epsilon, self.ctx)
        self.head = AttentionPooling(config, context) if config.has_pooler else None

    def embed(self, images: Tensor) -> Tensor:
        return self.conv1(images) + self.position_embeddings.weight

    def normalize(self, x: Tensor) -> Tensor:
        normalized: Tensor = self.ln_post(x)
        return normalized

    def pooling(self) -> list[nn.Module]:
        return [] if self.head is None else [self.head]

    def finishing(self) -> list[nn.Module]:
        return [self.ln_post, *self.pooling()]

    def finish(self, x: Tensor) -> VisionOutput:
        x = self.normalize(x)
        return VisionOutput(x, None if self.head is None else self.head(x))


TOWERS: dict[str, type[VisionTower]] = {"clip": ClipTower, "siglip": SiglipTower, "internvit": InternVitTower}
"""By vision_model_type."""


def build_tower(config: VisionEncoderConfig, context: ModelBuildContext) -> VisionTower:
    """A tower for any model; under sequence and context parallelism it has whole sequences on every rank."""
    ctx = context.parallel
    # cp is replaced by an axis of one rank too: attention would otherwise exchange keys with ranks
    # that hold the same images, as parts of one long sequence.
    whole = replace(ctx, sequence_parallel=False, axes={**ctx.axes, "cp": Axis()})
    return TOWERS[config.vision_model_type](config, replace(context, parallel=whole))


class VisionModel(Model):
    """images [B, C, img_h, img_w] -> VisionOutput."""

    inputs: tuple[str, ...] = ("images",)

    def __init__(self, config: VisionConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.config = config
        self.vision_model = build_tower(config, context)

    def forward(self, images: Tensor) -> VisionOutput:
        return self.vision_model(images)


class VisionClassifier(Model):
    """images [B, C, img_h, img_w] -> logits [B, num_classes], from the mean over the patches."""

    inputs: tuple[str, ...] = ("images",)
    predicts_tokens = False

    def __init__(self, config: VisionConfig, context: ModelBuildContext) -> None:
        super().__init__()
        assert config.num_classes is not None
        self.config = config
        self.vision_model = build_tower(config, context)
        self.classification_head = ReplicatedLinear(
            config.hidden_size, config.num_classes, context.parallel, init=normal(config.init_method_std)
        )

    def forward(self, images: Tensor) -> Tensor:
        states = self.vision_model(images).hidden_states
        patches = states[:, 1:] if self.config.has_class_token else states
        return self.classification_head(patches.mean(1))


def build_vision(config: VisionConfig, context: ModelBuildContext) -> VisionModel | VisionClassifier:
    return VisionModel(config, context) if config.num_classes is None else VisionClassifier(config, context)


# -- pixel shuffle: fewer and wider positions --------------------------------------------------------


def pixel_shuffle(x: Tensor, grid: tuple[int, int], factor: int) -> Tensor:
    """[N, P, W] -> [N, P / factor^2, factor^2 W]: squares of factor by factor patches, row by row within each.

    grid: rows and columns of the P patches, which factor divides. The order of InternVL (Chen et al., *How Far Are We
    to GPT-4V?*, 2024) and Idefics3; torch's pixel_unshuffle has the width W in front of the square.
    """
    rows, columns = grid
    # [N, rows / f, f, columns / f, f, W] -> [N, rows / f, columns / f, f, f, W]
    squares = x.unflatten(1, (rows // factor, factor, columns // factor, factor))
    return squares.transpose(2, 3).flatten(3).flatten(1, 2)
