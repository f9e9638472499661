"""Qwen2.5-VL (Technical Report, 2025): merged patches of images replace the image tokens of a text.

Shapes: B batch, S sequence, M cells (merged patches) of a row at most, K images of a row at most, V cells of a batch, C
colours, side: of a cell in pixels, H hidden of the decoder. Each cell has one image token in the text. With pipeline
parallelism the vision transformer and the merger are parts of the first stage; every stage computes the positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache, Conditioning
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.decoder import RotaryDecoder
from mt_models.blocks.rotary import FixedRotary, RotaryAngles
from mt_models.llava.dynamic_resolution import DynamicResolutionModel
from mt_models.qwen_vl.config import QwenVLConfig, QwenVLDecoderConfig
from mt_models.qwen_vl.vision import PatchMerger, QwenVisionTower
from mt_models.vision.patches import AxialAngles

# -- decoder: Qwen2 with multimodal rotary positions -------------------------------------------------


class QwenVLDecoder(RotaryDecoder):
    """tokens [B, S], positions [B or 1, S] of a text or [3, B, S] of one with images -> logits [B, S, vocab]"""

    config: QwenVLDecoderConfig

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles:
        # A text alone: its three coordinates would be equal, which is the rotation of Qwen2.
        if position_ids.ndim == 2:
            return super().angles(position_ids, capacity)
        assert isinstance(self.rotary, FixedRotary)
        # mrope_section: pairs of channels turned by time, height and width. The configuration excludes
        # dynamic scaling, whose frequencies change with the length.
        parts = self.rotary.frequencies_on(position_ids.device).split(self.config.mrope_section)
        return AxialAngles(position_ids, parts, self.rotary.scale)


# -- multimodal rotary positions, in time, height and width ------------------------------------------


MICROSECONDS = 1_000_000


def multimodal_positions(
    places: Tensor,
    grids: Tensor,
    position_ids: Tensor | None = None,
    tokens_per_second: float = 1,
    *,
    words_behind_time: bool = False,
) -> Tensor:
    """Positions [3, B, S] in time, height and width (Qwen2-VL, Wang et al., 2024, section 2.1).

    places: [B, S] bool, where tokens of images are. grids: int64 [B, K, 2], rows and columns of merged patches of the
    images, in the order of their tokens; rows of zeros are padding. position_ids: [B, S] of a text, which start at 0
    with each segment; default 0, 1, .... grids of a batch with videos are [B, K, 3], the third number being the time of
    a view in microseconds since its video began, of which a second is tokens_per_second positions; 0 for images and for
    the first view of a video.

    A word has one number three times. An image that begins behind position p has p + 1 as its time, p + 1 + row and
    p + 1 + column; the word behind it has the largest row or column plus one. Later views of a video have the rows and
    columns of the first one. Tokens of images that no grid has left are words. No value is read by the host.

    words_behind_time: the word behind a video comes after its last time too (Qwen3-Omni). Positions then are fp32 where
    there are times, of which fractions count.
    """
    if position_ids is None:
        position_ids = torch.arange(places.shape[1], device=places.device).expand_as(places)
    # Example: 2 words, an image of 2 x 2 cells, 1 word.
    #   index    0  1  2  3  4  5  6
    #   time     0  1  2  2  2  2  4
    #   height   0  1  2  2  3  3  4
    #   width    0  1  2  3  2  3  4
    # The image's 4 tokens take max(2, 2) = 2 numbers, so the word behind it has 6 - (4 - 2) = 4.
    rows, columns, *times = grids.to(places.device).unbind(-1)  # [B, K]
    sizes, taken = rows * columns, torch.maximum(rows, columns)
    time = times[0] if times else torch.zeros_like(rows)
    continues, elapsed = time > 0, time * tokens_per_second
    elapsed = elapsed / MICROSECONDS if words_behind_time and times else (elapsed // MICROSECONDS).long()
    # The views of a video take the positions of one together: those of the first view, or as many as its time is long.
    # until: what the views up to each one have taken. earlier: what those before it have.
    until, earlier = taken, taken
    if words_behind_time:
        until = torch.maximum(taken, elapsed + 1)
        earlier = until.roll(1, dims=1)
    earlier = earlier.masked_fill(~continues, 0)
    ends = sizes.cumsum(1)
    # Image tokens that a model has generated have no grid, and are words.
    places = places & (places.cumsum(1) <= ends[:, -1:])
    before = places.cumsum(1) - places.long()  # tokens of images before each position, [B, S]
    image = torch.searchsorted(ends, before, right=True)  # images that have ended, which is the number of the current
    # At a token of an image: what a word there would have, by the images before this one.
    words = position_ids - _skipped(image, sizes - (until - earlier), position_ids)
    # Behind the last image `image` is K, one too many to gather with; there the words are chosen below.
    image = image.clamp(max=ends.shape[1] - 1)
    within = before - (ends - sizes).gather(1, image)
    # 1 for padding, whose grid has 0 columns, by which nothing may be divided.
    width = columns.gather(1, image).clamp(min=1)
    offsets = torch.stack([elapsed.gather(1, image), within // width, within % width])
    # What earlier views of a video have taken lies behind the place at which all of its views begin.
    begin = words - within - earlier.gather(1, image)
    return torch.where(places, begin + offsets, words)


def _skipped(ended: Tensor, saved: Tensor, position_ids: Tensor) -> Tensor:
    """[B, S]: by how much positions are smaller than in a text without images, in the same segment.

    ended: [B, S], images that have ended before. saved: [B, K], what each image takes less than its tokens.
    """
    # [B, K + 1], by number of ended images, -> [B, S]
    total = torch.nn.functional.pad(saved.cumsum(1), (1, 0)).gather(1, ended)
    # The index at which a position's segment begins: images of earlier segments do not count.
    first = torch.arange(ended.shape[1], device=ended.device) - position_ids
    return total - total.gather(1, first)


class QwenVLModel(DynamicResolutionModel):
    """tokens [B, S], images and their grids -> logits [B, S, vocab]."""

    config: QwenVLConfig

    def build_tower(self, context: ModelBuildContext) -> nn.Module:
        return QwenVisionTower(self.config.vision_model, context)

    def build_projection(self, ctx: ParallelContext) -> nn.Module:
        return PatchMerger(self.config, ctx)

    def build_decoder(self, context: ModelBuildContext) -> nn.Module:
        decoder = self.config.decoder
        # As build_decoder of other families, with a decoder that no other family uses.
        decoder_context = context.config.model_copy(update={"model": decoder})
        return QwenVLDecoder(decoder, replace(context, config=decoder_context))

    def positions(self, places: Tensor, position_ids: Tensor | None, image_grids: Tensor | None) -> Tensor | None:
        """position_ids [B, S]: of a text, starting at 0 with each segment -> [3, B, S] with images."""
        if image_grids is None:
            return position_ids
        return self.coordinates(places, image_grids, position_ids)

    def coordinates(self, places: Tensor, grids: Tensor, position_ids: Tensor | None) -> Tensor:
        """See `multimodal_positions`."""
        return multimodal_positions(places, grids, position_ids, self.tokens_per_second)

    @property
    def tokens_per_second(self) -> int:
        """Positions of a second of a video; unused by families whose videos are images behind their times."""
        return int(getattr(self.config.vision_model, "tokens_per_second", 1))

    # -- generation ----------------------------------------------------------------------------------

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning:
        """images [V, C, side, side], image_grids [K, 2 or 3] -> features [V, H], of the first stage's ranks; and the
        grids, on the host, from which every stage computes positions."""
        if "images" not in inputs:
            return {}
        # Positions are computed again for each new token, from few numbers: on the host no pass waits for the device.
        grids = inputs["image_grids"].cpu()
        return {"image_grids": grids, **super().condition({**inputs, "image_grids": grids})}

    def cached_positions(self, cache: Cache) -> Tensor:
        """[1, T] of texts alone, [3, 1, T] if a sequence has images."""
        if not any("image_grids" in sequence.conditioning for sequence in cache.sequences):
            return cache.position_ids
        # Sequences of text have the same number three times.
        positions, end = cache.position_ids.expand(3, 1, -1).clone(), 0
        for sequence in cache.sequences:
            end += sequence.count
            grids = sequence.conditioning.get("image_grids")
            if grids is not None:
                # From the beginning: a position depends on all images before it. The last `count` are taken.
                places = torch.cat([sequence.past, sequence.new])[None] == self.config.image_token_index
                coordinates = self.coordinates(places, grids[None], None)[..., sequence.start :]
                # Fractions, where times of videos have some.
                positions = positions.to(torch.promote_types(positions.dtype, coordinates.dtype))
                positions[..., end - sequence.count : end] = coordinates.to(positions.device)
        return positions


def build_qwen_vl(config: QwenVLConfig, context: ModelBuildContext) -> QwenVLModel:
    return QwenVLModel(config, context)
