"""The optimizer's state in Megatron's `torch` format, tied to the parameters' names.

Without the distributed optimizer a rank's file has torch's own state: numbers stand for parameters, counted over
groups (with weight decay, without, experts', ...), in each group in the order of the model. With it, `distrib_optim.pt`
beside the file has flat buffers (see `flat_buffers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mt_ckpt.megatron.flat_buffers import Bucket, FlatParameter, bucketing, buckets_of, shared_matrices
from mt_ckpt.megatron.folder import OPTIMIZER_FILE
from mt_ckpt.megatron.names import EMBEDDING, OUTPUT
from mt_ckpt.megatron.pieces import Entry, FlatPart
from mt_ckpt.megatron.rank_files import Iteration, Parameter, RankFile
from mt_ckpt.pickles.torch_file import StoredTensor, open_torch_file
from mt_core.errors import CheckpointError
from mt_core.nn.layout import ParameterLayout

MAIN, STEP = "main", "step"
FLAT_STATES: Mapping[str, str] = {"param": MAIN, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
LAYER_WISE = "layer_wise_optimizer_*.pt"
COMPARED_ELEMENTS = 1 << 16
"""Parameters up to this size are compared with their fp32 copies, to check the assumed layout of the buffers."""


@dataclass(frozen=True)
class OptimizerState:
    """entries: state ("exp_avg", "main") -> the ranks' pieces. step: updates done, the same for all parameters.
    left_out: why a state that was saved is not read."""

    entries: Mapping[str, Sequence[Entry]]
    step: float | None
    left_out: str | None = None


def read_optimizer(iteration: Iteration, layouts: Mapping[str, ParameterLayout]) -> OptimizerState:
    """The optimizer's state of all ranks; empty when it was not saved.

    Raises CheckpointError when it cannot be tied to the parameters.
    """
    if any(iteration.folder.rglob(LAYER_WISE)):
        return OptimizerState({}, None, f"layer-wise optimizers ({LAYER_WISE}) do not say whose states they have")
    entries: dict[str, list[Entry]] = {}
    steps: list[float] = []
    for file in iteration.files:
        reader = _RankOptimizer(file, iteration, layouts)
        for state, entry in reader.entries():
            if not _is_copy(entry.name, iteration):
                entries.setdefault(state, []).append(entry)
        steps += reader.steps()
    # One step for all: ranks of one iteration that disagree were mixed from several.
    if len(set(steps)) > 1:
        raise CheckpointError(f"{iteration.folder}: its ranks' optimizers made {sorted(set(steps))} steps")
    exact = {p.name for f in iteration.files for part in f.parts for p in part if p.tensor.dtype == torch.float32}
    copies = [entry for entry in entries.pop(MAIN, []) if entry.name not in exact]  # those of fp32 weights are these
    if copies:
        entries[MAIN] = copies
    return OptimizerState(entries, steps[0] if steps and entries else None)


def _is_copy(name: str, iteration: Iteration) -> bool:
    """The LM head of a last stage that is a copy of the token embeddings."""
    return name == OUTPUT and not iteration.args.untied


def _is_of_experts(group: Mapping[str, Any]) -> bool:
    return bool(group.get("is_expert_parallel", group.get("is_expert", False)))


def _once(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Without the second of two names of one parameter, as Megatron's T5 has them."""
    # dict: the first of the two names keeps its place in the order.
    unique: dict[tuple[str, int | None], Parameter] = {}
    for parameter in parameters:
        unique.setdefault((parameter.name, parameter.expert), parameter)
    return list(unique.values())


class _RankOptimizer:
    """The optimizers of one rank: one, or one each for dense and expert parameters."""

    def __init__(self, file: RankFile, iteration: Iteration, layouts: Mapping[str, ParameterLayout]) -> None:
        self._file, self._args = file, iteration.args
        self._shared = shared_matrices(iteration.args)
        # OUTPUT: of the last stage, the copy of the token embeddings, which is not among the layouts.
        trained = {name for name, layout in layouts.items() if layout.trained} | {OUTPUT}
        self._parts = [_once(p for p in part if p.name in trained) for part in file.parts]
        stored = file.value.get("optimizer")
        # A ChainedOptimizer is a list; an empty optimizer is None or {}.
        self._optimizers = [entry for entry in (stored if isinstance(stored, list) else [stored]) if entry]
        groups = [group for entry in self._optimizers for group in _inner(entry).get("param_groups", [])]
        self._experts_apart = len(self._optimizers) > 1 or any(_is_of_experts(group) for group in groups)

    def entries(self) -> Iterator[tuple[str, Entry]]:
        for optimizer in self._optimizers:
            yield from self._of_torch(optimizer)
        distributed = self._file.file.parent / OPTIMIZER_FILE
        if distributed.is_file():
            yield from self._of_buffers(distributed)

    def steps(self) -> list[float]:
        """What the groups, or the parameters' states, say."""
        steps: list[Any] = []
        for optimizer in self._optimizers:
            inner = _inner(optimizer)
            steps += [group.get(STEP) for group in inner.get("param_groups", [])]
            steps += [state.get(STEP) for state in inner.get("state", {}).values() if isinstance(state, dict)]
        return [_number(step) for step in steps if step is not None]

    # -- torch's own state ---------------------------------------------------------------------------

    def _of_torch(self, optimizer: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
        inner = _inner(optimizer)
        states = inner.get("state") or {}
        # Megatron's key, and the older one.
        copies = optimizer.get("fp32_from_fp16_params") or optimizer.get("fp32_from_fp16") or []
        # Groups of one optimizer number parameters consecutively; `params` are these numbers.
        for number, group in enumerate(inner.get("param_groups", [])):
            indices = group.get("params", [])
            if not indices:
                continue
            members = self._members(group, len(indices))
            for index, parameter in zip(indices, members, strict=True):
                for state, tensor in states.get(index, {}).items():
                    if isinstance(tensor, StoredTensor) and state != STEP:
                        yield state, self._entry(parameter, tensor)
            if number < len(copies):
                yield from self._main(copies[number], members)

    def _main(self, copies: Sequence[StoredTensor], members: Sequence[Parameter]) -> Iterator[tuple[str, Entry]]:
        # fp32 parameters are updated in place, they have no copy.
        rounded = [parameter for parameter in members if parameter.tensor.dtype != torch.float32]
        if len(copies) != len(rounded):
            raise self._unmatched(f"a group has {len(copies)} fp32 copies for {len(rounded)} parameters")
        for parameter, tensor in zip(rounded, copies, strict=True):
            yield MAIN, self._entry(parameter, tensor)

    def _members(self, group: Mapping[str, Any], count: int) -> list[Parameter]:
        """The parameters of a group, by the rules with which Megatron makes groups."""
        # wd_mult is Megatron's own; groups from other writers have torch's weight_decay alone.
        decayed = group["wd_mult"] != 0 if "wd_mult" in group else group.get("weight_decay", 0.0) != 0
        of_experts = _is_of_experts(group)
        # With --decoupled-lr the embedding and the output layer have groups for themselves.
        decoupled = group.get("is_decoupled_lr", False) if self._args.get("decoupled_lr") else None
        # All parameters of the rank that fit the group, over its model parts, in the order of creation.
        members = [
            p
            for part in self._parts
            for p in part
            if _decays(p) == decayed
            and self._is_apart(p) == of_experts
            and (decoupled is None or (p.name in (EMBEDDING, OUTPUT)) == decoupled)
        ]
        if len(members) != count:
            raise self._unmatched(
                f"a group {'with' if decayed else 'without'} weight decay has {count} parameters, "
                f"the model {len(members)}"
            )
        return members

    def _is_apart(self, parameter: Parameter) -> bool:
        """Whether it is an expert's that has groups for itself: with expert parallel ranks only."""
        return self._experts_apart and parameter.expert is not None

    # -- flat buffers --------------------------------------------------------------------------------

    def _of_buffers(self, file: Path) -> Iterator[tuple[str, Entry]]:
        content = open_torch_file(file).value
        optimizers = content if isinstance(content, list) else [content]
        kinds: list[Callable[[Parameter], bool]] = [lambda p: not self._is_apart(p), self._is_apart]
        # Dense first, as Megatron chains them.
        present = [kind for kind in kinds if any(kind(p) for part in self._parts for p in part)]
        optimizers = [entry for entry in optimizers if entry]
        if len(optimizers) != len(present):
            raise self._unmatched(f"{file.name} has {len(optimizers)} optimizers, the model calls for {len(present)}")
        for optimizer, kind in zip(optimizers, present, strict=True):
            yield from self._of_buffer_set(file, optimizer, kind)

    def _of_buffer_set(
        self, file: Path, optimizer: Mapping[Any, Any], kind: Callable[[Parameter], bool]
    ) -> Iterator[tuple[str, Entry]]:
        if not optimizer.get("buckets_coalesced", False):
            raise CheckpointError(f"{file}: written by a Megatron before 0.6, whose buckets are not read")
        parts = [[p for p in part if kind(p)] for part in self._parts]
        # Keys are numbers of model parts (gbuf_idx) beside "buckets_coalesced".
        buffers = [optimizer[number] for number in range(len(parts)) if number in optimizer]
        if len(buffers) != len(parts) or any(len(by_dtype) != 1 for by_dtype in buffers):
            raise self._unmatched(f"{file.name} has other buffers than one for each of {len(parts)} model parts")
        for number, (part, by_dtype) in enumerate(zip(parts, buffers, strict=True)):
            # By (dtype of parameters, dtype of gradients). Mixed dtypes in one part were refused above.
            (states,) = by_dtype.values()
            yield from self._of_buffer(file, part, states, number)

    def _of_buffer(
        self, file: Path, part: Sequence[Parameter], states: Mapping[str, Any], number: int
    ) -> Iterator[tuple[str, Entry]]:
        # of_experts is left out: it changes the padding between buckets only, which is not stored. Places within a
        # bucket are the same, since every alignment is a multiple of 128.
        buckets = buckets_of(flat_parameters(part, self._shared), bucketing(self._args, self._file.stage, number))
        total = sum(bucket.numel for bucket in buckets)
        # Without the padding at the ends of buckets, which depends on the data-parallel size.
        stored_numel = states.get("numel_unpadded", total)
        if stored_numel != total:
            raise self._unmatched(f"{file.name} has a buffer of {stored_numel} elements, the model makes {total}")
        first = flat_positions(buckets)
        for stored, state in FLAT_STATES.items():
            if stored in states:
                for parameter in part:
                    piece = FlatPart(states[stored], first[key_of(parameter)], parameter.tensor.shape)
                    yield state, self._entry(parameter, piece)
        # The order of parameters is inferred, not stored. The fp32 copies verify it.
        require_same_weights(file, part, states.get("param"), first)

    def _entry(self, parameter: Parameter, piece: Any) -> Entry:
        if piece.shape != parameter.tensor.shape:
            raise self._unmatched(
                f"{parameter.name} has shape {list(parameter.tensor.shape)}, its state {list(piece.shape)}"
            )
        return Entry(self._file.place, parameter.name, parameter.expert, parameter.arrange(piece))

    def _unmatched(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._file.file}: the optimizer's state does not fit the model: {reason}")


def key_of(parameter: Parameter) -> str:
    """A name that no other parameter of the rank has."""
    return parameter.name if parameter.expert is None else f"{parameter.name}:{parameter.expert}"


def flat_parameters(part: Iterable[Parameter], shared: Collection[str]) -> list[FlatParameter]:
    """shared: names that have a bucket for themselves."""
    return [FlatParameter(key_of(p), math.prod(p.tensor.shape), p.name in shared) for p in part]


def flat_positions(buckets: Iterable[Bucket]) -> dict[str, int]:
    """Parameter -> its first element in the buckets laid end to end."""
    positions: dict[str, int] = {}
    begin = 0
    for bucket in buckets:
        positions |= {name: begin + first for name, first in bucket.first.items()}
        begin += bucket.numel
    return positions


def require_same_weights(
    file: Path, part: Iterable[Parameter], copies: StoredTensor | None, first: Mapping[str, int]
) -> None:
    """Raises CheckpointError when a small parameter is not its fp32 copy rounded: the buffer is laid out otherwise."""
    for parameter in part if copies is not None else ():
        if math.prod(parameter.tensor.shape) > COMPARED_ELEMENTS:
            continue
        copy = FlatPart(copies, first[key_of(parameter)], parameter.tensor.shape).read()  # type: ignore[arg-type]
        # fp32 -> 16 bits rounds as the optimizer did after its last step, so that equality is exact.
        if not torch.equal(copy.to(parameter.tensor.dtype), parameter.tensor.read()):
            raise CheckpointError(
                f"{file}: the fp32 copy of {parameter.name} is not where the arguments of the run put it, or not that "
                "of the weights beside it"
            )


def _inner(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """torch's state dictionary, which mixed precision wraps."""
    # Megatron's key, and the older one.
    inner = optimizer.get("optimizer", optimizer.get("optimizer_state_dict", optimizer))
    return inner if isinstance(inner, Mapping) else {}


def _decays(parameter: Parameter) -> bool:
    # As Megatron: no weight decay on biases and on what has one dimension.
    return len(parameter.tensor.shape) > 1 and not parameter.name.endswith(".bias")


def _number(step: Any) -> float:
    return float(step.read()) if isinstance(step, StoredTensor) else float(step)
