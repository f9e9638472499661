"""Interfaces of the things that specs build: tokenizers, data sets, checkpoint readers and writers, dispatchers.

Code of any distribution is written against these; none of them imports torch when this module is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch


Split = Literal["train", "valid", "test"]


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids with a meaning of their own. One that a tokenizer does not have is None, never a fake number."""

    eod: int | None = None
    """Put after each document."""
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    mask: int | None = None
    cls: int | None = None
    sep: int | None = None
    sentinels: tuple[int, ...] = ()
    """T5's span markers, in the order in which they are used."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int:
        """The true number of ids, special ones included, without any padding."""
        ...

    @property
    def special(self) -> SpecialTokens: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def fingerprint(self) -> str:
        """A hash of everything that changes the ids; data sets and checkpoints record it."""
        ...

    def files(self) -> Mapping[str, bytes]:
        """The files from which this tokenizer can be built again; they are stored in checkpoints."""
        ...


@runtime_checkable
class HasTokenBytes(Protocol):
    """A tokenizer whose ids stand for fixed bytes, so that generated text can be constrained to a grammar."""

    def token_bytes(self) -> list[bytes | None] | None:
        """Bytes that each id adds to a text; None for special ones and ids without a token. None in place of the list
        where the text of an id depends on its neighbours."""
        ...


class Dataset(Protocol):
    """Samples by number. The order is part of the data set: sample k is the k-th one trained on.

    A method `fingerprint() -> str` may say what the samples are made of, whatever its name and place (not their order,
    which the configuration decides): a run is not resumed on other data unknowingly then.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]: ...

    def describe(self, index: int) -> str:
        """Where sample `index` came from (file, document, offset), for error messages and `mt data where`."""
        ...


@dataclass(frozen=True)
class SplitRequest:
    """What the trainer requests of a data set.

    num_samples is None for all samples of one epoch. sequence_length counts the model's input positions.
    media_token_ids: of the model, see `ModelConfig`.
    """

    split: Split
    num_samples: int | None
    sequence_length: int
    seed: int
    media_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class SampleField:
    """One array of a sample; shape is in words, for instance "[sequence_length]"."""

    name: str
    dtype: str
    shape: str
    doc: str


TOKEN_MASK = "token_mask"
"""Field of samples whose loss_mask counts texts: 1 at positions whose tokens throughput counts."""
CAUSAL_LM_SAMPLE = (
    SampleField("tokens", "int64", "[sequence_length]", "input ids"),
    SampleField("labels", "int64", "[sequence_length]", "the id to predict at each position"),
    SampleField("loss_mask", "float32", "[sequence_length]", "1 where the position counts in the loss, else 0"),
    SampleField("position_ids", "int64", "[sequence_length]", "positions; restart at documents if configured"),
    SampleField(
        "segment_ids",
        "int32",
        "[sequence_length]",
        "number of the document within the sample; positions see only their own. Absent unless "
        "data.reset_attention_mask is set",
    ),
)
"""The arrays of a sample for causal language models: what the dataset of a decoder-only model returns."""


@dataclass(frozen=True)
class AttentionRequest:
    """What a model requires of an attention backend; `supports` answers it before training starts."""

    device_type: str
    dtype: str
    head_dim: int
    num_heads: int
    num_query_groups: int
    causal: bool
    segments: bool
    """Several documents in one sequence that must not see one another."""
    bias: bool
    """A bias added to the scores, such as ALiBi."""
    dropout: float
    deterministic: bool
    window: int | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    """A trained score of each head takes part in the softmax and stands for no key."""


@runtime_checkable
class MoeDispatcher(Protocol):
    """Moves tokens to the ranks that hold their experts, and the results back."""

    def dispatch(self, tokens: torch.Tensor, routing: Any) -> Any: ...

    def combine(self, expert_output: torch.Tensor, state: Any) -> torch.Tensor: ...
