"""Replaces token embeddings by image features."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mt_core.nn.embedding import VocabParallelEmbedding
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.tables import like_token_embeddings


def splice(words: Tensor, places: Tensor, features: Tensor, ctx: ParallelContext) -> Tensor:
    """Token embeddings with features, in their order, at the places of images.

    words [B, S, H], with sequence parallelism this rank's slice of S; places [B, S] bool, of the whole S, with as
    many True as there are features [F, H].
    """
    # [B, S, H] in the order of the tokens. masked_scatter takes the rows of features one
    # after another; places [B, S, 1] broadcasts over H.
    whole = features.new_zeros((*places.shape, features.shape[-1]))
    images = like_token_embeddings(whole.masked_scatter(places[..., None], features.to(words.dtype)), ctx)
    # The same slice of S as that of the words.
    if ctx.sequence_parallel:
        places = places.chunk(ctx.tp.size, SEQUENCE_DIM)[ctx.tp.rank]
    # Gradients reach the words and the features each at their own places only.
    return torch.where(places[..., None], images, words)


@contextmanager
def spliced_words(embedding: VocabParallelEmbedding, places: Tensor, features: Tensor) -> Iterator[None]:
    """Within this context, the token embeddings return features where `places` is True.

    Whatever a family does with its token embeddings (adds positions, scales, normalizes) then applies to images too, as
    in the reference, and no family needs code for images.
    """

    def with_images(module: nn.Module, inputs: tuple[Tensor, ...], words: Tensor) -> Tensor:
        return splice(words, places, features, embedding.ctx)

    # For one forward pass: removed even if it fails, or the next text would get these features.
    handle = embedding.register_forward_hook(with_images)
    try:
        yield
    finally:
        handle.remove()
