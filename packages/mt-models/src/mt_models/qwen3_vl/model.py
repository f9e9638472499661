"""Qwen3-VL (Technical Report, 2025): merged patches of images replace the image tokens of a text, and states of middle
layers of the vision transformer are added behind the first layers of the decoder at the same places (deepstack).

Shapes: B batch, S sequence, V cells (merged patches) of a batch, H hidden of the decoder. With pipeline parallelism the
vision transformer, the mergers and the layers that features are added to are parts of the first stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.decoder import RotaryDecoder
from mt_models.blocks.embedding import like_token_embeddings
from mt_models.blocks.rotary import FixedRotary, Rotary, RotaryAngles
from mt_models.llava.vision_language import spliced_words, word_embeddings
from mt_models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLDecoderConfig
from mt_models.qwen3_vl.vision import Qwen3PatchMergers, Qwen3VisionTower
from mt_models.qwen_vl.model import QwenVLModel

# -- multimodal rotary positions whose axes take turns -----------------------------------------------


class InterleavedAngles(RotaryAngles):
    """cos and sin [B, S, 1, R / 2] in fp32, times `scale`, of positions in time, height and width [3, B, S].

    axes: int64 [R / 2], which of the three turns each pair of channels.
    """

    def __init__(self, positions: Tensor, frequencies: Tensor, axes: Tensor, scale: float) -> None:
        # [R / 2, B, S] -> [B, S, 1, R / 2]
        places = positions.to(torch.float32).index_select(0, axes).permute(1, 2, 0)[:, :, None]
        angles = places * frequencies
        self.cos, self.sin = angles.cos() * scale, angles.sin() * scale
        self.in_window, self.query_scale = None, None


def axes_of_pairs(sections: Sequence[int]) -> Tensor:
    """int64 [R / 2]: 0 (time), 1 (height) or 2 (width). Height and width take every third pair from the second and the
    third on, until they have as many as their sections; time has all others."""
    axes = torch.zeros(sum(sections), dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def interleaved_angles(rotary: Rotary, sections: Sequence[int], position_ids: Tensor) -> InterleavedAngles:
    """Angles of positions [3, B, S]. The configuration excludes frequencies that change with the length."""
    assert isinstance(rotary, FixedRotary)
    axes = axes_of_pairs(sections).to(position_ids.device)
    return InterleavedAngles(position_ids, rotary.frequencies_on(axes.device), axes, rotary.scale)


# -- features that are added behind layers of the decoder --------------------------------------------


@dataclass(frozen=True)
class Deepstack:
    """places [B, S] bool, of whole sequences; features: behind layer number i [F, H], for the True ones in order."""

    places: Tensor
    features: tuple[Tensor, ...]
    ctx: ParallelContext

    def add(self, number: int, x: Tensor) -> Tensor:
        """x [B, S, H] behind layer `number`, with sequence parallelism this rank's slice of S."""
        if number >= len(self.features):
            return x
        whole = x.new_zeros((*self.places.shape, x.shape[-1]))
        added = whole.masked_scatter(self.places[..., None], self.features[number].to(x.dtype))
        return x + like_token_embeddings(added, self.ctx)


class DeepstackDecoder(RotaryDecoder):
    """Mixin of decoders whose first layers have features added: see `with_deepstack`."""

    deepstack: Deepstack | None = None

    @contextmanager
    def with_deepstack(self, deepstack: Deepstack) -> Iterator[None]:
        """Within this context a forward pass adds the features."""
        self.deepstack = deepstack
        try:
            yield
        finally:
            self.deepstack = None

    def through_layers(
        self,
        hidden: Tensor,
        tokens: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: Cache | None,
        stage: Stage,
    ) -> Tensor:
        # The variable and not the attribute: layers are computed again in the backward pass, behind the context.
        deepstack = self.deepstack

        def call(number: int, layer: nn.Module, x: Tensor) -> Tensor:
            x = layer(x, pattern, angles, cache)
            return x if deepstack is None else deepstack.add(number, x)

        return self.decoder.through(hidden, call, stage)


class Qwen3VLDecoder(DeepstackDecoder):
    """tokens [B, S], positions [B or 1, S] of a text or [3, B, S] of one with images -> logits [B, S, vocab]"""

    config: Qwen3VLDecoderConfig

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles:
        # A text alone: its three coordinates would be equal, which is the rotation of Qwen3.
        if position_ids.ndim == 2:
            return super().angles(position_ids, capacity)
        return interleaved_angles(self.rotary, self.config.mrope_section, position_ids)


class Qwen3VLModel(QwenVLModel):
    """tokens [B, S], images and their grids -> logits [B, S, vocab]."""

    config: Qwen3VLConfig  # type: ignore[assignment]

    def build_tower(self, context: ModelBuildContext) -> nn.Module:
        return Qwen3VisionTower(self.config.vision_model, context)

    def build_projection(self, ctx: ParallelContext) -> nn.Module:
        decoder = self.config.decoder
        return Qwen3PatchMergers(self.config.vision_model, decoder.hidden_size, decoder.init_method_std, ctx)

    def build_decoder(self, context: ModelBuildContext) -> nn.Module:
        decoder = self.config.decoder
        # As build_decoder of other families, with a decoder that no other family uses.
        decoder_context = context.config.model_copy(update={"model": decoder})
        return Qwen3VLDecoder(decoder, replace(context, config=decoder_context))

    def _spliced(self, places: Tensor, features: Tensor) -> AbstractContextManager[None]:
        return self._with_features(places, features)

    @contextmanager
    def _with_features(self, places: Tensor, features: Tensor) -> Iterator[None]:
        """features [F, (1 + deepstack layers) * H]: those that replace the image tokens, and those that are added."""
        spliced, *added = features.split(self.config.decoder.hidden_size, dim=-1)
        table = word_embeddings(self.language_model)
        with spliced_words(table, places, spliced):
            if not added:
                yield
                return
            with self.language_model.with_deepstack(Deepstack(places, tuple(added), table.ctx)):
                yield


def build_qwen3_vl(config: Qwen3VLConfig, context: ModelBuildContext) -> Qwen3VLModel:
    """See `ModelSpec.build`."""
    return Qwen3VLModel(config, context)
