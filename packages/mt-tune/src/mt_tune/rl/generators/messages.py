"""What training and the processes that generate tell each other, pickled over the socket between a process and the one
that started it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mt_core.tensor_slice import TensorSlice
from mt_infer.refit import Slices
from mt_tune.rl.drawing import DrawOptions, Until
from mt_tune.rl.rollout import Group, Rollout
from mt_tune.rl.weight_hashes import Dtypes, Hashes


@dataclass(frozen=True)
class GeneratorSetup:
    """The first message to a process. config: the run's, resolved, in the layout that generates. rank, size: among the
    generators. device: of this process, such as cuda:3. address, port: of the store through which they meet. trainers:
    number of processes that train, whose ranks in the transfer of weights come first. most: completions at a time.
    path: sys.path of training."""

    config: Mapping[str, Mapping[str, Any]]
    rank: int
    size: int
    device: str
    address: str
    port: int
    trainers: int
    most: int
    version: int
    timeout_seconds: float
    path: Sequence[str]


@dataclass(frozen=True)
class Ready:
    """The model is built. slices: the parts of weights that this process needs, with their dtypes."""

    slices: Slices
    dtypes: Dtypes


@dataclass(frozen=True)
class Connect:
    """Join the group over which weights are sent. arriving: for each weight, in the order of sending, the parts that
    this process gets, each with the rank of its sender."""

    arriving: Sequence[tuple[str, Sequence[tuple[TensorSlice, int]]]]


@dataclass(frozen=True)
class NewWeights:
    """Receive the weights as they are after so many optimizer steps. Answer: their hashes."""

    version: int


@dataclass(frozen=True)
class Draw:
    """Continue these groups, on the first generator; the others have none and take part."""

    groups: Sequence[Group]
    options: DrawOptions
    until: Until | None


@dataclass(frozen=True)
class Answer:
    """To each message. error: what was raised in place of a result."""

    ready: Ready | None = None
    hashes: Hashes = field(default_factory=dict)
    rollouts: Sequence[Sequence[Rollout]] = ()
    error: Exception | None = None


Message = Connect | NewWeights | Draw
