"""The RETRO model (Borgeaud et al., 2022), as Megatron builds it: a GPT, some of whose layers attend to encoded
neighbours of the chunk before.

Shapes: B batch, S sequence, m tokens of a chunk, L = S // m chunks, K neighbours of a chunk, r tokens of a neighbour,
H hidden, V vocabulary (this rank's ids under tensor parallelism). With sequence parallelism S and r are sharded
between the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError, DataError
from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache, Conditioning, KeepsState, layers_with_state
from mt_core.nn.embedding import VocabParallelOutput, project_to_vocab
from mt_core.nn.layout import normal
from mt_core.nn.model import Model
from mt_core.nn.norm import build_norm
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.decoder import freeze
from mt_models.blocks.embedding import like_token_embeddings
from mt_models.blocks.rotary import FixedRotary, RotaryAngles, inverse_frequencies
from mt_models.gpt.model import GPTEmbedding, gpt_layer
from mt_models.retro.attention import BatchNeighbors, Neighbors, TextChunks, from_attending_chunks
from mt_models.retro.config import RetroConfig, check_layers
from mt_models.retro.decoding import CachedNeighbors, completed_text, new_positions
from mt_models.retro.layers import NeighborEncoder, RetrievalLayer

EncodeNeighbors = Callable[[Tensor], Neighbors]
"""(what the first layer to attend makes of the text: [B, S, H]) -> its encoded neighbours"""


class RetroDecoder(nn.Module):
    """The layers of a GPT; some of them have cross attention to neighbours."""

    def __init__(self, config: RetroConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.recompute = context.recompute
        # The neighbours are encoded when the text has passed attention of this layer: what the encoder attends to.
        self.first = config.cross_attention_layers[0]
        self.layers = nn.ModuleList(
            RetrievalLayer(config, context, number)
            if number in config.cross_attention_layers
            else gpt_layer(config, context, number)
            for number in range(config.num_layers)
        )
        self.final_layernorm = build_norm(
            config.normalization, config.hidden_size, config.norm_epsilon, context.parallel
        )

    def forward(
        self, x: Tensor, angles: RotaryAngles | None, encode: EncodeNeighbors | None, cache: Cache | None = None
    ) -> Tensor:
        """[B, S, H] -> [B, S, H]. encode None: no neighbours, a GPT."""
        pattern = AttentionPattern()
        neighbors: Neighbors | None = None

        # `neighbors` is read when a layer runs, after it has been set below. Its gradient flows back through
        # every layer that reads it, and through `encode` into the text.
        def run(number: int, layer: nn.Module, x: Tensor) -> Tensor:
            if isinstance(layer, RetrievalLayer):
                return layer(x, pattern, angles, neighbors, cache)
            return layer(x, pattern, angles, cache)

        for number in range(self.first):
            x = self._step(number, x, run)
        retrieving = self.layers[self.first]
        assert isinstance(retrieving, RetrievalLayer)
        # The layer in two steps, each recomputed as a unit of its own: encoding needs what is between them.
        x = self._step(self.first, x, lambda number, layer, x: retrieving.attend(x, pattern, angles, cache))
        if encode is not None:
            neighbors = encode(retrieving.pre_cross_attn_layernorm(x))
        x = self._step(self.first, x, lambda number, layer, x: retrieving.retrieve(x, neighbors))
        for number in range(self.first + 1, len(self.layers)):
            x = self._step(number, x, run)
        return self.final_layernorm(x)

    def _step(self, number: int, x: Tensor, call: Callable[[int, nn.Module, Tensor], Tensor]) -> Tensor:
        return self.recompute.group(number, [(number, self.layers[number])], x, call)


class RetroModel(Model):
    """tokens [B, S] and neighbours of their chunks [B, L, K, r] -> logits [B, S, V]."""

    inputs: tuple[str, ...] = ("tokens", "position_ids", "neighbor_tokens", "neighbor_mask")

    def __init__(self, config: RetroConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.config = config
        self.ctx = context.parallel
        self.embedding = GPTEmbedding(config, self.ctx)
        self.decoder = RetroDecoder(config, context)
        self.encoder = NeighborEncoder(config.encoder, context)
        self.output_layer: VocabParallelOutput | None = None
        if config.untie_embeddings_and_output_weights:
            assert config.vocab_size is not None  # the trainer fills it in from the tokenizer
            self.output_layer = VocabParallelOutput(
                config.vocab_size,
                config.hidden_size,
                self.ctx,
                init=normal(config.init_method_std),
                divisible_by=config.make_vocab_size_divisible_by,
            )
        self.rotary: FixedRotary | None = None
        if config.position_embedding_type == "rope":
            self.rotary = FixedRotary(inverse_frequencies(config.rotary_dim, config.rotary_base))
        if config.retro_freeze_gpt:
            freeze_gpt(self)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        neighbor_tokens: Tensor | None = None,
        neighbor_mask: Tensor | None = None,
    ) -> Tensor:
        """position_ids [B, S]: default 0 .... neighbor_tokens [B, L, K, r] int64: of chunk u = tokens u m to
        (u + 1) m - 1; without them it is the GPT of its weights. neighbor_mask, of the same shape: 1 for tokens, 0 for
        padding (default: all are tokens); all 0: a chunk without neighbours.

        Raises DataError when there are not neighbours for each whole chunk.
        """
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        encode: EncodeNeighbors | None = None
        if neighbor_tokens is not None:
            self._check(tokens, neighbor_tokens)
            # A text shorter than a chunk has no neighbours, and an empty batch is not run through the encoder.
            if neighbor_tokens.shape[1]:

                def encode(text: Tensor) -> Neighbors:
                    return self.encode(neighbor_tokens, neighbor_mask, text, tokens.shape[1])

        x = self.decoder(self.embedding(tokens, position_ids), self._angles(position_ids), encode)
        return self._logits(x)

    def encode(self, neighbor_tokens: Tensor, neighbor_mask: Tensor | None, text: Tensor, length: int) -> Neighbors:
        """Neighbours [B, L, K, r] of the chunks of text [B, S, H], whose length S is `length`."""
        batch, _, count, _ = neighbor_tokens.shape
        mask = torch.ones_like(neighbor_tokens) if neighbor_mask is None else neighbor_mask
        seen = mask.bool().flatten(0, 1).flatten(1)  # [B L, K r]
        return BatchNeighbors(
            states=self.encoded(neighbor_tokens.flatten(0, 1), mask.flatten(0, 1), text),
            pattern=padding_pattern(seen),
            attending=like_token_embeddings(self._attending(seen.any(-1), batch, length), self.ctx),
            chunk_length=self.config.retro_chunk_length,
            num_neighbors=count,
        )

    def encoded(self, neighbor_tokens: Tensor, neighbor_mask: Tensor, text: Tensor | TextChunks) -> Tensor:
        """Neighbours [n, K, r] of the chunks of a text [B, S, H], or of n chunks of texts -> [n K, r, H]"""
        _, count, retrieved = neighbor_tokens.shape
        # [1, r]: the tokens of each neighbour are numbered from 0, wherever its chunk is in the text.
        places = torch.arange(retrieved, device=neighbor_tokens.device)[None]
        # [n, K, r] -> [n K, r] -> [n K, r, H]. The embedding of the text, as in Megatron.
        x = self.embedding(neighbor_tokens.flatten(0, 1), places)
        pattern = padding_pattern(neighbor_mask.bool().flatten(0, 1))
        return self.encoder(x, pattern, self._angles(places), text, count)

    conditioned_by: ClassVar[tuple[str, ...]] = ("neighbor_tokens", "neighbor_mask")

    def check_request(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> None:
        shape = self.config.retro_num_neighbors, self.config.retrieved_length
        for name, tensor in inputs.items():
            if tensor.ndim != 4 or len(tensor) != 1 or tensor.shape[2:] != shape:
                raise ConfigError(
                    f"{name} has shape {list(tensor.shape)}; it has to be [1, chunks, {shape[0]}, {shape[1]}]: "
                    "model.retro_num_neighbors, and the tokens of a neighbour"
                )
        if len({tensor.shape for tensor in inputs.values()}) > 1 or ("neighbor_mask" in inputs and len(inputs) == 1):
            raise ConfigError("neighbor_mask goes with neighbor_tokens, and has their shape")

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning:
        """neighbor_tokens, neighbor_mask [1, L, K, r], of any number of chunks; those behind have no neighbours."""
        tokens = inputs["neighbor_tokens"][0]
        mask = inputs["neighbor_mask"][0] if "neighbor_mask" in inputs else torch.ones_like(tokens)
        return {"neighbor_tokens": tokens, "neighbor_mask": mask}

    def cached_layers(self) -> Iterator[KeepsState]:
        yield from layers_with_state(self.decoder)
        # It keeps the text's keys and values until a chunk is complete; other layers of the encoder keep nothing.
        yield self.encoder.text_attention

    def decode_stage(self, stage: Stage, hidden: Tensor | None, cache: Cache) -> Tensor:
        encode: EncodeNeighbors | None = None
        if any(sequence.conditioning for sequence in cache.sequences):

            def encode(text: Tensor) -> Neighbors:
                return self._encode_completed(text, cache)

        x = self.embedding(cache.tokens, cache.position_ids)
        x = self.decoder(x, self._angles(cache.position_ids), encode, cache)
        return self._logits(cache.positions_for_logits(x))

    def _encode_completed(self, text: Tensor, cache: Cache) -> Neighbors:
        """Neighbours of the chunks that new positions complete, and those kept. text [1, T, H]."""
        config = self.config
        count, retrieved = config.retro_num_neighbors, config.retrieved_length
        sequences = new_positions(cache, config.retro_chunk_length, count * retrieved)
        completed = sum(len(new.completed) for new in sequences)
        # Called also if no chunk is complete: the keys and values of the new positions have to get into the cache.
        chunks = completed_text(self.encoder.text_attention, text, cache, completed)
        states = None
        if completed:
            wanted = [new.completed for new in sequences]
            tokens, mask = (of_chunks(cache, name, wanted, (count, retrieved)) for name in self.conditioned_by)
            states = self.encoded(tokens, mask, chunks)
        # [T] without filler. Filler attends to nothing.
        attending = torch.cat([new.attending() for new in sequences])
        padded = nn.functional.pad(attending, (0, cache.tokens.shape[1] - len(attending)))
        return CachedNeighbors(cache, sequences, states, like_token_embeddings(padded[None, :, None], self.ctx), count)

    @property
    def decoded_layers(self) -> int:
        return self.config.num_layers

    @property
    def max_sequence_length(self) -> int | None:
        """Longest supported sequence; None without learned positions."""
        return self.config.table_size

    def _attending(self, has_neighbors: Tensor, sequences: int, length: int) -> Tensor:
        """has_neighbors [B L], of chunks -> [B, S, 1] bool, positions that attend to some."""
        # [B L] -> [B L, m], moved to the positions that attend: see retro.chunks
        rows = has_neighbors[:, None].expand(-1, self.config.retro_chunk_length)
        return from_attending_chunks(rows, sequences, length)[..., None]

    def _angles(self, position_ids: Tensor) -> RotaryAngles | None:
        return None if self.rotary is None else self.rotary.angles(position_ids)

    def _logits(self, x: Tensor) -> Tensor:
        if self.output_layer is not None:
            return self.output_layer(x)
        words = self.embedding.word_embeddings
        return project_to_vocab(x, words.weight, words.range, words.ctx)

    def _check(self, tokens: Tensor, neighbor_tokens: Tensor) -> None:
        whole = tokens.shape[1] // self.config.retro_chunk_length
        if neighbor_tokens.dim() != 4 or neighbor_tokens.shape[:2] != (len(tokens), whole):
            raise DataError(
                f"neighbor_tokens has shape {list(neighbor_tokens.shape)}; sequences of {tokens.shape[1]} tokens have "
                f"{whole} chunks of model.retro_chunk_length={self.config.retro_chunk_length}, so it must be "
                f"[{len(tokens)}, {whole}, neighbours, tokens of a neighbour]"
            )


def of_chunks(cache: Cache, name: str, wanted: Sequence[range], shape: tuple[int, int]) -> Tensor:
    """What each sequence is conditioned by [L, K, r], of the chunks requested of it: [n, K, r]; zeros without any."""
    gathered = torch.zeros((sum(map(len, wanted)), *shape), dtype=torch.int64, device=cache.tokens.device)
    for sequence, chunks, rows in zip(
        cache.sequences, wanted, gathered.split([len(span) for span in wanted]), strict=True
    ):
        # Neighbours may be given for fewer chunks than the text will have: those behind stay zero, their mask too.
        values = sequence.conditioning.get(name, gathered[:0])[chunks.start : chunks.stop]
        rows[: len(values)] = values
    return gathered


def padding_pattern(seen: Tensor) -> AttentionPattern:
    """Attention in both directions to the keys [rows, T] that are seen. A row without any sees all of its padding:
    what comes of it is left out later, and must be finite."""
    # The softmax over a row of -inf alone would be NaN, and stay NaN in the gradient although `where` selects 0.
    return AttentionPattern(causal=False, key_padding=seen | ~seen.any(-1, keepdim=True))


def freeze_gpt(model: RetroModel) -> None:
    """Freeze the parameters that a GPT has (retro-fitting)."""
    parts: list[nn.Module | None] = [model.embedding, model.decoder.final_layernorm, model.output_layer]
    for layer in model.decoder.layers:
        # What a retrieval layer has beside these, its cross attention and norm, is trained.
        parts += [layer.input_layernorm, layer.self_attention, layer.pre_mlp_layernorm, layer.mlp]  # type: ignore[list-item]
    for part in parts:
        if part is not None:
            freeze(part)


def build_retro(config: RetroConfig, context: ModelBuildContext) -> RetroModel:
    """Raises ConfigError when no layer attends to neighbours."""
    check_layers(config)
    return RetroModel(config, context)
