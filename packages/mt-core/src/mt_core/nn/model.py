"""What a model family's module offers to the trainer, to generation and to planning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.cache import Cache, Conditioning, KeepsState, layers_with_state
from mt_core.parallel.pipeline.stage import Pipelined, Stage

MODEL_INPUTS = ("tokens", "position_ids", "segment_ids")


class Model(nn.Module):
    """Base of the modules that `ModelSpec.build` returns, with defaults for what only some models have.

    A model that can be cut into pipeline stages also has the methods of `mt_core.parallel.pipeline.stage.Pipelined`;
    one that generates has those of `SupportsGeneration`.
    """

    inputs: tuple[str, ...] = MODEL_INPUTS
    """Fields of a micro-batch that `forward` takes by name, where the batch has them."""
    continues_text: ClassVar[bool] = False
    """Whether it is a causal language model: it generates text that continues a prompt."""
    predicts_tokens: ClassVar[bool] = True
    """Whether its logits are over the vocabulary, which tensor-parallel ranks shard. False: over classes or choices,
    whole on every rank."""
    is_divisible: ClassVar[bool] = True
    """False: never cut into stages, although a base class has the methods for it."""

    conditioned_by: ClassVar[tuple[str, ...]] = ()
    """What a request to generate may have beside tokens: names of tensors, for `condition`."""

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning:
        """What generation needs of a request's further inputs, computed once before its first token."""
        return {}

    def check_request(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> None:
        """Raises ConfigError for a prompt [S] and further inputs that nothing can be generated from."""

    def cached_layers(self) -> Iterator[KeepsState]:
        """Layers that keep something of the positions before. A model with an encoder leaves the encoder's out."""
        return layers_with_state(self)

    @property
    def needs_logits(self) -> str | None:
        """Why a loss cannot take hidden states in place of logits, although `forward` has the argument `project`."""
        return None

    @property
    def max_sequence_length(self) -> int | None:
        """Longest sequence it can take; None when there is no limit."""
        return None


def contract(model: nn.Module) -> Model:
    """`model` by its declarations. A module that is no `Model` stands under the defaults, and takes the fields of a
    batch that its `forward` names."""
    if isinstance(model, Model):
        return model
    declared = Model()
    declared.inputs = tuple(signature(model.forward).parameters)
    return declared


@runtime_checkable
class SupportsGeneration(Protocol):
    """A model whose layers keep state in a `Cache`, from which tokens can be sampled one after another."""

    conditioned_by: ClassVar[tuple[str, ...]]

    def check_request(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> None: ...

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning: ...

    def cached_layers(self) -> Iterator[KeepsState]: ...

    def decode_stage(self, stage: Stage, hidden: Any, cache: Cache) -> Any:
        """The new positions of the cache's sequences through a stage's layers: hidden states [1, T, H] (None for the
        first) -> those of the next, or logits [1, R, ids of this rank] of the requested positions."""
        ...

    @property
    def decoded_layers(self) -> int:
        """Number of layers that stages divide."""
        ...

    @property
    def max_sequence_length(self) -> int | None: ...


@runtime_checkable
class EncodesInStages(Protocol):
    """A model that generates, whose pipeline stages divide an encoder too: `condition`, a stage at a time."""

    def stacks_of_stage(self, stage: Stage) -> tuple[Stage | None, Stage | None]:
        """The parts of a stage in the encoder and in the decoder, each in the numbering of its stack."""
        ...

    def encode_stage(self, stage: Stage, hidden: Tensor | None, inputs: Mapping[str, Tensor]) -> Tensor:
        """Hidden states (None for the first stage of the encoder) -> those of the next, or the encoder's output."""
        ...

    def conditioned(self, memory: Tensor, inputs: Mapping[str, Tensor]) -> Conditioning:
        """What `condition` gives. memory: the encoder's output."""
        ...


@runtime_checkable
class PredictsAhead(Protocol):
    """A model whose further layers predict the tokens after the next one (multi-token prediction)."""

    @property
    def prediction_depths(self) -> int: ...

    def predict_ahead(self, depth: int, hidden: Tensor, tokens: Tensor, cache: Cache) -> Tensor:
        """States of depth number `depth`, from 0, at the cache's positions: [1, T, C].

        hidden [1, T, C]: of the depth before; for the first, what the model gives `unprojected`. tokens [1, T]: those
        depth + 1 places behind the positions. On ranks of the last stage only.
        """
        ...

    def logits_ahead(self, depth: int, state: Tensor) -> Tensor:
        """States [1, T, C] of a depth -> its logits [1, T, ids of this rank]."""
        ...


def as_generator(model: nn.Module) -> SupportsGeneration:
    """The model, if tokens can be sampled from it. Raises ConfigError if its family cannot."""
    if not isinstance(model, SupportsGeneration):
        raise ConfigError(
            f"{type(model).__name__} does not generate text: causal language models and encoder-decoder models do"
        )
    return model


def required_inputs(model: nn.Module) -> tuple[str, ...]:
    """The fields of a micro-batch that the model needs. Positions and segments are optional in all models."""
    return tuple(name for name in contract(model).inputs if name not in MODEL_INPUTS[1:])  # MODEL_INPUTS[0]: tokens


@runtime_checkable
class SupportsEmbedding(Protocol):
    """A model that gives each text a vector."""

    def embed(self, tokens: Tensor, padding_mask: Tensor, input_type: Literal["query", "document"]) -> Tensor:
        """tokens, padding_mask (1 for tokens, 0 for padding) [B, S] -> [B, P]"""
        ...

    @property
    def max_sequence_length(self) -> int | None: ...


def as_embedder(model: nn.Module) -> SupportsEmbedding:
    """The model, if texts can be embedded with it. Raises ConfigError if its family cannot."""
    if not isinstance(model, SupportsEmbedding):
        raise ConfigError(
            f"{type(model).__name__} embeds no text: encoders (bert, biencoder) and causal language models do"
        )
    return model


def as_pipelined(model: nn.Module) -> Pipelined | None:
    """The model, if it can run a stage at a time."""
    return model if isinstance(model, Pipelined) and contract(model).is_divisible else None


def is_pipelined(model: nn.Module) -> bool:
    return as_pipelined(model) is not None


@runtime_checkable
class HasModelOptions(Protocol):
    """A loss that needs something else from the model than logits."""

    model_options: Mapping[str, Any]
    """Further arguments of the model's `forward`."""


def model_options(loss: object) -> Mapping[str, Any]:
    return loss.model_options if isinstance(loss, HasModelOptions) else {}


# -- layers under their global numbers, of which a pipeline stage holds some ------------------------------


class NumberedLayers(nn.Module):
    """Layers keyed by their index in the whole model, of which this process may hold a subset."""

    def __init__(self, layers: Iterable[tuple[int, nn.Module]]) -> None:
        super().__init__()
        for number, layer in layers:
            # A ModuleList would number from 0 in every stage, and canonical names have global numbers.
            self.add_module(str(number), layer)

    def __getitem__(self, number: int) -> nn.Module:
        return self._modules[str(number)]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children())

    def __len__(self) -> int:
        return len(self._modules)

    def numbers(self) -> list[int]:
        return [int(name) for name in self._modules]
