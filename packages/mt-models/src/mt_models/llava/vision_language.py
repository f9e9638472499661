"""What models of images and text have in common: image features replace the image tokens of a text.

Shapes: B batch, S sequence, N images, F features of an image, H hidden of the decoder, V vocabulary (this rank's ids
under tensor parallelism). Tower and projection have whole sequences on every rank even if sequence parallelism shards
the decoder's; with pipeline parallelism they are parts of the first stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError, DataError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache, Conditioning, KeepsState, layers_with_state
from mt_core.nn.context_parallel.zigzag import shard_sequence, unshard_sequence
from mt_core.nn.embedding import VocabParallelEmbedding
from mt_core.nn.layout import LayoutModule
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.nn.model import Model, contract
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_core.specs import MODELS
from mt_models.blocks.decoder import freeze
from mt_models.blocks.embedding import like_token_embeddings
from mt_models.llava.config import VisionLanguageConfig
from mt_models.vision.model import VisionTower, build_tower

# -- image features in the place of token embeddings -------------------------------------------------


def splice(words: Tensor, places: Tensor, features: Tensor, ctx: ParallelContext) -> Tensor:
    """Token embeddings with features, in their order, at the places of images.

    words [B, S, H], with sequence parallelism this rank's slice of S; places [B, S] bool, of the whole S, with as
    many True as there are features [F, H].
    """
    return replace_words(words, places, spread(places, features.to(words.dtype)), ctx)


def spread(places: Tensor, features: Tensor) -> Tensor:
    """Features [F, H] at their places [B, S], and zeros elsewhere: [B, S, H]."""
    # masked_scatter takes the rows of features one after another; places [B, S, 1] broadcasts over H.
    return features.new_zeros((*places.shape, features.shape[-1])).masked_scatter(places[..., None], features)


def replace_words(words: Tensor, places: Tensor, spread_features: Tensor, ctx: ParallelContext) -> Tensor:
    """Same as `splice`, with features that are spread over whole sequences [B, S, H]."""
    images = like_token_embeddings(spread_features.to(words.dtype), ctx)
    # The same slice of S as that of the words.
    if ctx.sequence_parallel:
        places = places.chunk(ctx.tp.size, SEQUENCE_DIM)[ctx.tp.rank]
    # Gradients reach the words and the features each at their own places only.
    return torch.where(places[..., None], images, words)


@contextmanager
def spliced_words(embedding: LayoutModule, places: Tensor, features: Tensor) -> Iterator[None]:
    """Within this context, the token embeddings return features where `places` is True.

    embedding: the table, so that whatever a family does with its token embeddings (adds positions, scales, normalizes)
    applies to images too; or the module around it, whose outputs are replaced.
    """

    def with_images(module: nn.Module, inputs: tuple[Tensor, ...], words: Tensor) -> Tensor:
        return splice(words, places, features, embedding.ctx)

    # For one forward pass: removed even if it fails, or the next text would get these features.
    handle = embedding.register_forward_hook(with_images)
    try:
        yield
    finally:
        handle.remove()


class VisionLanguageModel(Model):
    """tokens [B, S], images -> logits [B, S, V].

    A family has a tower, a projection and a decoder, and computes features of a batch and of a request.
    """

    inputs: tuple[str, ...] = ("tokens", "images", "position_ids", "segment_ids")
    continues_text: ClassVar[bool] = True
    conditioned_by: ClassVar[tuple[str, ...]] = ("images",)
    TOWERS: ClassVar[tuple[str, ...]] = ("vision_model", "vision_projection")
    """Parts of the first stage; None on the others."""
    vision_model: Any
    vision_projection: nn.Module | None
    language_model: Any
    """A decoder of any family."""

    def __init__(self, config: Any, context: ModelBuildContext) -> None:
        """config: a VisionLanguageConfig."""
        super().__init__()
        self.config = config
        self.cp = context.parallel.cp
        for part in self.TOWERS:
            setattr(self, part, None)
        if context.has_first:
            self.build_towers(context)
        self.language_model = self.build_decoder(context)
        self._leave_untrained()

    def build_towers(self, context: ModelBuildContext) -> None:
        """Sets the parts in TOWERS."""
        self.vision_model = self.build_tower(context)
        self.vision_projection = self.build_projection(context.parallel)

    # -- what a family has of its own ----------------------------------------------------------------

    def build_tower(self, context: ModelBuildContext) -> nn.Module:
        """From images to vectors of the tower's width."""
        raise NotImplementedError

    def build_projection(self, ctx: ParallelContext) -> nn.Module:
        """From what the tower gives to vectors of the decoder's width."""
        raise NotImplementedError

    def build_decoder(self, context: ModelBuildContext) -> nn.Module:
        """The part that continues text. Raises ConfigError for a family that does not."""
        return build_decoder(self.config, context)

    def unread_modules(self) -> list[nn.Module]:
        """Modules of the tower that no feature passes through."""
        return []

    def features_of_batch(self, places: Tensor, images: Tensor, image_grids: Tensor | None) -> Tensor:
        """[image tokens of the batch, H]. places: [B, S], where image tokens are.

        Raises DataError when images and image tokens are not as many.
        """
        raise NotImplementedError

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning:
        """Conditioning of a request: `features` [image tokens, H], of the first stage's ranks, and what positions
        depend on."""
        raise NotImplementedError

    def positions(self, places: Tensor, position_ids: Tensor | None, image_grids: Tensor | None) -> Tensor | None:
        """What the decoder takes as positions. places: [B, S], where image tokens are."""
        return position_ids

    def cached_positions(self, cache: Cache) -> Tensor:
        """See `positions`, for the new tokens of a cache."""
        return cache.position_ids

    # -- training ------------------------------------------------------------------------------------

    def forward(
        self,
        tokens: Tensor,
        images: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        image_grids: Tensor | None = None,
    ) -> Tensor:
        """images, image_grids: as `features_of_batch` of the family takes them; None for a text without image tokens.

        Raises DataError when images and image tokens are not as many.
        """
        words, positions, spliced = self._prepared(tokens, images, position_ids, image_grids)
        with spliced:
            logits: Tensor = self.language_model(words, positions, segment_ids)
        return logits

    def run_stage(
        self,
        stage: Stage,
        hidden: Tensor | None,
        tokens: Tensor,
        images: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        image_grids: Tensor | None = None,
    ) -> Any:
        """hidden [B, S, H] of the previous stage -> the next stage's input, or the logits. See Pipelined."""
        words, positions, spliced = self._prepared(tokens, images, position_ids, image_grids, is_first=stage.first)
        with spliced:
            return self.language_model.run_stage(stage, hidden, words, positions, segment_ids)

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        if stage.first:
            yield from (part for name in self.TOWERS if (part := getattr(self, name)) is not None)
        yield from self.language_model.stage_modules(stage)

    def _prepared(
        self,
        tokens: Tensor,
        images: Tensor | None,
        position_ids: Tensor | None,
        image_grids: Tensor | None,
        *,
        is_first: bool = True,
    ) -> tuple[Tensor, Tensor | None, AbstractContextManager[None]]:
        """Ids that are all in the vocabulary, as the image token need not be; positions; and a context in which the
        first stage splices features in."""
        places = tokens == self.config.image_token_index
        # Every stage computes positions, only the first one embeds.
        spliced = self._with_images(places, images, image_grids) if is_first else nullcontext()
        # Id 0 stands for image tokens in the embedding's look-up; `splice`
        # replaces its row, which gets no gradient from them.
        return tokens.masked_fill(places, 0), self.positions(places, position_ids, image_grids), spliced

    def _with_images(
        self, places: Tensor, images: Tensor | None, image_grids: Tensor | None
    ) -> AbstractContextManager[None]:
        """A context in which the features of images are spliced in at `places` [B, S], this rank's positions."""
        if images is None:
            self.require_tokens(places, 0)
            return nullcontext()
        # Images are not sharded by positions: each context-parallel rank computes all features
        # of its sequences and takes those at its own positions.
        whole = unshard_sequence(places.int(), SEQUENCE_DIM, self.cp).bool()
        features = self.features_of_batch(whole, images, image_grids)
        if self.cp.size > 1:
            features = features.index_select(0, self._own_features(places, whole))
        return self._spliced(places, features)

    def _spliced(self, places: Tensor, features: Tensor) -> AbstractContextManager[None]:
        return spliced_words(word_embeddings(self.language_model), places, features)

    def _own_features(self, places: Tensor, whole: Tensor) -> Tensor:
        """Numbers, counted over the batch, of the features at this rank's places.

        places: of its positions. whole: of all positions of the sequences.
        """
        # The k-th image token of the batch has feature k - 1, row by row; sharded as the tokens are.
        numbers = (whole.flatten().cumsum(0) - 1).view_as(whole)
        return shard_sequence(numbers, SEQUENCE_DIM, self.cp)[places]

    def require_tokens(self, places: Tensor, features: int) -> None:
        """Raises DataError unless there are as many image tokens as features. places: where image tokens are."""
        if (num_places := int(places.sum())) != features:
            raise DataError(
                f"the text has {num_places} image tokens (id {self.config.image_token_index}), and its images have "
                f"{features} features; write the image token (model.image_token_index) once for each feature"
            )

    def _leave_untrained(self) -> None:
        """The parts in model.freeze, and the modules of the tower that are never read, thus without gradients."""
        unread = [] if self.vision_model is None else self.unread_modules()
        for module in (*unread, *(getattr(self, part) for part in self.config.freeze)):
            if module is not None:
                freeze(module)

    # -- generation ----------------------------------------------------------------------------------

    def decode_stage(self, stage: Stage, hidden: Tensor | None, cache: Cache) -> Any:
        """The features of a sequence's images replace its image tokens, whatever part of them is in this pass.

        An image token that was generated is a word like any other: no feature belongs to it.
        """
        # [1, T]: new positions of all sequences, of which one pass may have a part of a prompt.
        places = torch.zeros_like(cache.tokens, dtype=torch.bool)
        features = list(self._take_features(cache, places)) if stage.first else []
        words = cache.tokens.masked_fill(places, 0)
        with self._spliced(places, torch.cat(features)) if features else nullcontext():
            return self._decode_words(stage, hidden, words, cache)

    def _decode_words(self, stage: Stage, hidden: Tensor | None, words: Tensor, cache: Cache) -> Any:
        """words: the new tokens [1, T] of all sequences, with a word in place of image tokens."""
        return self.language_model.run_stage(stage, hidden, words, self.cached_positions(cache), cache=cache)

    def _take_features(
        self, cache: Cache, places: Tensor, token: int | None = None, name: str = "features"
    ) -> Iterator[Tensor]:
        """The features [F of the sequence, H] for new positions, sequence by sequence. Marks their places [1, T].

        token: what stands for a feature, by default the image token. name: of the features in the conditioning.
        """
        token = self.config.image_token_index if token is None else token
        end = 0
        for sequence in cache.sequences:
            end += sequence.count
            features = sequence.conditioning.get(name)
            if features is None:
                continue
            before, new = (tokens == token for tokens in (sequence.past, sequence.new))
            # Features of tokens in earlier passes are used up.
            first = int(before.sum())
            # Counts from the beginning: tokens beyond the features were generated.
            has_feature = new & (first + new.cumsum(0) <= len(features))
            if has_feature.any():
                places[0, end - sequence.count : end] = has_feature.to(places.device)
                yield features[first : first + int(has_feature.sum())]

    def check_request(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> None:
        try:
            self.require_tokens(tokens == self.config.image_token_index, self.features_of_request(inputs))
        except DataError as error:
            raise ConfigError(f"images: {error}") from None

    def features_of_request(self, inputs: Mapping[str, Tensor]) -> int:
        """How many. Raises ConfigError for inputs that do not fit one another."""
        return len(inputs.get("images", ())) * self.config.image_seq_length

    def cached_layers(self) -> Iterator[KeepsState]:
        return layers_with_state(self.language_model)

    def frequencies_key(self, capacity: int) -> bytes:
        key: bytes = self.language_model.frequencies_key(capacity)
        return key

    @property
    def decoded_layers(self) -> int:
        layers: int = self.language_model.decoded_layers
        return layers

    @property
    def max_sequence_length(self) -> int | None:
        """Longest supported sequence, image tokens included; None without a limit."""
        return contract(self.language_model).max_sequence_length


class FixedSizeImageModel(VisionLanguageModel):
    """Images of one size, each of which has F features: the last state of a tower of the family vision, normalized and
    without the class token, through the projection."""

    def build_tower(self, context: ModelBuildContext) -> VisionTower:
        return build_tower(self.config.vision_model, context)

    def unread_modules(self) -> list[nn.Module]:
        return self.vision_model.pooling()

    def features(self, images: Tensor) -> Tensor:
        """[N, C, img_h, img_w] -> [N, F, H]: what replaces the image tokens."""
        assert self.vision_projection is not None
        features: Tensor = self.vision_projection(self.tower_states(images))
        return features

    def tower_states(self, images: Tensor) -> Tensor:
        """What the projection reads."""
        states: Tensor = self.vision_model.hidden_states(images)
        # The class token is no patch of the image.
        return states[:, 1:] if self.config.vision_model.has_class_token else states

    def features_of_batch(self, places: Tensor, images: Tensor, image_grids: Tensor | None) -> Tensor:
        """images [N, C, img_h, img_w], in the order of their image tokens in the batch, row by row; or [B, M, C, img_h,
        img_w], of which a row takes as many as it has image tokens for: the others are padding."""
        if images.ndim == 4:
            self.require_tokens(places, len(images) * self.config.image_seq_length)
            return self.features(images).flatten(0, 1)
        real = self._real_images(places, images.shape[1])
        images = images.flatten(0, 1)
        if not len(real):
            # A batch of texts alone: the features of a padding image are not used, and have gradients of zero.
            return self.features(images[:1]).flatten(0, 1)[:0]
        return self.features(images.index_select(0, real.to(images.device))).flatten(0, 1)

    def _real_images(self, places: Tensor, capacity: int) -> Tensor:
        """Numbers, counted over the batch of `capacity` images a row, of the images that have image tokens."""
        counts, length = places.sum(1), self.config.image_seq_length
        if (counts % length).any() or (counts > capacity * length).any():
            raise DataError(
                f"the rows of the batch have {counts.tolist()} image tokens (id {self.config.image_token_index}), "
                f"and at most {capacity} images of {length} features each; write the image token once for each feature"
            )
        # [B, M]: the first counts / F images of each row. nonzero waits for the device, as the number is a shape.
        real = torch.arange(capacity, device=places.device) < (counts // length)[:, None]
        return real.flatten().nonzero().squeeze(1)

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning:
        """images [N, C, img_h, img_w], in the order of their tokens -> features [N F, H], of the first stage's ranks"""
        if "images" not in inputs or self.vision_model is None:
            return {}
        return {"features": self.features(inputs["images"]).flatten(0, 1)}


def build_decoder(config: VisionLanguageConfig, context: ModelBuildContext) -> nn.Module:
    """The decoder of any family that continues text. Raises ConfigError for another."""
    decoder = config.decoder
    spec = context.host[MODELS].get(decoder.family, key="model.language_model.family")
    # What the decoder's builder reads of the whole configuration, it reads for its own model.
    decoder_context = replace(context, config=context.config.model_copy(update={"model": decoder}))
    model = spec.build.load()(decoder, decoder_context)
    if not contract(model).continues_text or (context.has_first and not has_word_embeddings(model)):
        raise ConfigError(
            f"model.language_model.family={decoder.family} does not continue text, and LLaVA needs a decoder that "
            "does, such as llama, mistral, qwen, gemma or gpt"
        )
    return model


def has_word_embeddings(model: nn.Module) -> bool:
    """Whether there is a table of token embeddings, `embedding.word_embeddings` in every family that has one."""
    return isinstance(getattr(getattr(model, "embedding", None), "word_embeddings", None), VocabParallelEmbedding)


def word_embeddings(model: Any) -> VocabParallelEmbedding:
    """Token embeddings of a decoder that has some."""
    table = model.embedding.word_embeddings
    assert isinstance(table, VocabParallelEmbedding)
    return table
