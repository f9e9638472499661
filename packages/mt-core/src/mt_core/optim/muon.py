"""Muon: orthogonalized momentum, for the matrices of a model (Jordan et al., 2024), as in Megatron.

The update orthogonalizes the whole matrix. A rank that holds a shard of it (tensor-parallel rows or columns, elements
in the distributed optimizer, rows under FSDP2) stores its shard of the momentum, all-gathers the whole one for the
computation, and applies its shard of the result. Every layout therefore takes the same step.

The ranks that have a matrix, whole or in shards, divide the matrices among themselves: one rank orthogonalizes each and
broadcasts the result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.layout import ParameterLayout
from mt_core.optim.base import FunctionalOptimizer, Optimizer, OptimizerBuildContext
from mt_core.optim.configs import MuonCoefficients, MuonConfig, MuonScale
from mt_core.optim.master_weights import MasterWeights
from mt_core.optim.optimizers import AdamW, Lion
from mt_core.optim.param_groups import ParamGroup, is_embedding_or_output, is_table
from mt_core.parallel.context import Axis, ParallelContext

# -- the nearest orthogonal matrix by Newton-Schulz iteration, and the scale of the update ----------------
#
# With the singular value decomposition X = U S V^T, a step X <- a X + (b X X^T + c (X X^T)^2) X keeps U and V and maps
# each singular value s to a s + b s^3 + c s^5. A few steps bring those above about 0.01 near to 1 (to within 0.3 of
# it), which is what Muon needs of U V^T (Jordan et al., Muon, 2024; Bernstein and Newhouse, 2024).

COEFFICIENTS: Mapping[MuonCoefficients, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""(a, b, c) of each step, repeated cyclically for more steps: Jordan's, and You's (2025)."""
SMALLEST_NORM = 1e-7
"""Lower bound of the norm that is divided by, so that a zero matrix stays zero."""


def orthogonalize(matrix: Tensor, steps: int, coefficients: MuonCoefficients) -> Tensor:
    """Approximately U V^T of each matrix [..., rows, columns], in its dtype."""
    # Transposed if tall: the Gram matrix is then of the smaller dimension.
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    # The Frobenius norm bounds the largest singular value, so all are in [0, 1], where the polynomial moves them to 1.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)
    sets = COEFFICIENTS[coefficients]
    for step in range(steps):
        a, b, c = sets[step % len(sets)]
        # [..., n, n] with n = min(rows, columns)
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def scale_factor(rows: int, columns: int, mode: MuonScale) -> float:
    """Factor on an orthogonal [rows, columns] that makes the size of updates independent of the shape.

    spectral: sqrt(max(rows, columns)), whose elements have a root mean square of 1, so that with an extra factor of
    0.2 learning rates are those of AdamW (Liu et al., Muon is scalable for LLM training, 2025).
    unit_rms_norm: sqrt(rows / columns). shape_scaling: the same, at least 1.
    """
    if mode == "spectral":
        return max(rows, columns) ** 0.5
    ratio = rows / columns
    return max(1.0, ratio) ** 0.5 if mode == "shape_scaling" else ratio**0.5


QKV_WEIGHT = "linear_qkv.weight"


@runtime_checkable
class GroupedHeads(Protocol):
    """An attention module whose linear_qkv has, for each group, the rows of its query heads, its key and its value."""

    heads_per_group: int
    head_dim: int


@dataclass(frozen=True)
class HeadRows:
    """How the rows of queries, keys and values are interleaved in one weight."""

    heads_per_group: int
    head_dim: int

    def split(self, weight: Tensor) -> list[Tensor]:
        """[rows, columns] -> all queries, all keys, all values, each [rows of its kind, columns]"""
        # [groups, heads_per_group + 2, head_dim, columns]
        parts = weight.unflatten(0, (-1, self.heads_per_group + 2, self.head_dim)).split(self._sizes, 1)
        # [groups, heads, head_dim, columns] -> [groups * heads * head_dim, columns]
        return [part.flatten(0, 2) for part in parts]

    def join(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `split`."""
        grouped = [
            part.unflatten(0, (-1, heads, self.head_dim)) for part, heads in zip(parts, self._sizes, strict=True)
        ]
        return torch.cat(grouped, 1).flatten(0, 2)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.heads_per_group, 1, 1


@dataclass(frozen=True)
class ShardedMatrix:
    """A weight of which this rank updates a shard. heads: set for a fused QKV weight, which is three matrices.

    layout: without the expert axis: the experts of other ranks are other matrices.
    """

    name: str
    layout: ParameterLayout
    ctx: ParallelContext
    weights: MasterWeights
    heads: HeadRows | None = None

    def unshard(self, part: Tensor) -> Tensor:
        """[rows, columns], or [experts of this rank, rows, columns]. Collective over the ranks that shard it."""
        return self.layout.to_canonical(self.weights.unshard(self.name, part), self.ctx)

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's shard; the inverse of `unshard`."""
        return self.weights.shard(self.name, self.layout.to_local(whole, self.ctx).contiguous())


@dataclass(frozen=True)
class Team:
    """The ranks that update the same matrices: a grid of two axes."""

    inner: Axis
    outer: Axis

    @property
    def size(self) -> int:
        return self.inner.size * self.outer.size

    def owns(self, number: int) -> bool:
        """Whether this rank computes matrix `number` of a round."""
        return (self.inner.rank, self.outer.rank) == self._place(number)

    def broadcast(self, x: Tensor, number: int) -> None:
        """From the rank that computed it to all others, in place."""
        inner, outer = self._place(number)
        # First along the owner's column of the grid, then along every row, so that each rank receives the matrix once.
        # inner 2, outer 2, owner (1, 0): (1, 0) -> (1, 1), then (1, 0) -> (0, 0) and (1, 1) -> (0, 1)
        if self.outer.size > 1 and self.inner.rank == inner:
            dist.broadcast(x, self.outer.ranks[outer], group=self.outer.group)
        if self.inner.size > 1:
            dist.broadcast(x, self.inner.ranks[inner], group=self.inner.group)

    def _place(self, number: int) -> tuple[int, int]:
        # (inner rank, outer rank). A round has at most `size` matrices, so the outer rank is in range.
        return number % self.inner.size, number // self.inner.size


def team_of(matrix: ShardedMatrix) -> Team:
    ctx = matrix.ctx
    if matrix.layout.replicas == "edp":
        # Without ep: each of its ranks has other experts and so other matrices.
        return Team(ctx.axis("etp"), ctx.axis("edp"))
    return Team(ctx.tp, ctx.dp_cp)


def rounds(members: list[Update], size: int) -> Iterator[list[Update]]:
    """Matrices of about the same cost together, one for each rank, so that ranks are done at the same time and no more
    whole matrices exist at once."""
    # sorted() is stable and the shapes are canonical, so all ranks form the same rounds.
    by_cost = sorted(members, key=lambda update: -math.prod(update.matrix.layout.shape))
    return (by_cost[first : first + size] for first in range(0, len(by_cost), size))


class Update(NamedTuple):
    parameter: Tensor
    gradient: Tensor
    matrix: ShardedMatrix


class Muon(FunctionalOptimizer):
    """m <- momentum m + (1 - momentum) g; w <- (1 - lr weight_decay) w - lr scale orthogonal(m).

    With Nesterov momentum m is interpolated with g once more before the orthogonalization. State: `momentum_buffer`.
    """

    def __init__(self, groups: list[ParamGroup], config: MuonConfig, matrices: Mapping[Tensor, ShardedMatrix]) -> None:
        super().__init__(groups, config.lr)
        self.config, self.matrices = config, matrices

    def update(self, parameters: list[Tensor], gradients: list[Tensor], group: ParamGroup) -> None:
        teams: dict[Team, list[Update]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            matrix = self.matrices[parameter]
            # Axes compare by ranks and not by group, so equal axes give one team.
            teams.setdefault(team_of(matrix), []).append(Update(parameter, gradient, matrix))
        for team, members in teams.items():
            for one_each in rounds(members, team.size):
                self._update_together(one_each, team, group["lr"], group["weight_decay"])

    def _update_together(self, updates: list[Update], team: Team, lr: float, weight_decay: float) -> None:
        """One matrix for each rank. A rank holds at most two whole ones at once, besides those of Newton-Schulz."""
        # Gather all matrices of the round, orthogonalize the own one, broadcast each result, apply this rank's shard of
        # it.
        assigned, shapes = self._unshard(updates, team)
        direction = None if assigned is None else self._orthogonal(*assigned).contiguous()
        del assigned
        for number, (parameter, _, matrix) in enumerate(updates):
            if team.owns(number):
                assert direction is not None
                whole = direction
            else:
                # Memory for the broadcast.
                whole = parameter.new_empty(shapes[number])
            team.broadcast(whole, number)
            shard = matrix.shard(whole).view_as(parameter)
            # Decoupled weight decay, as AdamW's.
            parameter.mul_(1.0 - lr * weight_decay).add_(shard, alpha=-lr)
            del whole, shard  # before the next one is allocated

    def _unshard(
        self, updates: list[Update], team: Team
    ) -> tuple[tuple[Tensor, HeadRows | None] | None, list[torch.Size]]:
        """This rank's matrix, if it has one in this round, and the shapes of all. All collectives are before any
        Newton-Schulz, as otherwise each rank would wait for those of the ranks before it."""
        rank_matrix, shapes = None, []
        for number, (parameter, gradient, matrix) in enumerate(updates):
            # Every rank updates its shard of the momentum and takes part in the gather, whichever rank owns the matrix.
            whole = matrix.unshard(self._momentum(parameter, gradient))
            shapes.append(whole.shape)
            if team.owns(number):
                rank_matrix = whole, matrix.heads
            del whole  # before the next one is allocated
        return rank_matrix, shapes

    def _momentum(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        # lerp_(g, 1 - b): m <- b m + (1 - b) g. Nesterov: (1 - b) g + b m.
        moment = state["momentum_buffer"].lerp_(gradient, 1.0 - self.config.muon_momentum)
        return gradient.lerp(moment, self.config.muon_momentum) if self.config.muon_nesterov else moment

    def _orthogonal(self, whole: Tensor, heads: HeadRows | None) -> Tensor:
        with _matmul_precision(self.config.muon_fp32_matmul_prec, whole.device):
            if heads is None:
                return self._scaled(whole)
            return heads.join([self._scaled(part) for part in heads.split(whole)])

    def _scaled(self, matrix: Tensor) -> Tensor:
        rows, columns = matrix.shape[-2:]
        factor = scale_factor(rows, columns, self.config.muon_scale_mode) * self.config.muon_extra_scale_factor
        # The factor is that of the whole matrix and not of the shard, so a step does not depend on the layout.
        return orthogonalize(matrix, self.config.muon_num_ns_steps, self.config.muon_coefficient_type) * factor


class ChainedOptimizer:
    """Several optimizers, each with its own groups, as one."""

    def __init__(self, optimizers: list[FunctionalOptimizer]) -> None:
        self.optimizers = optimizers
        self.param_groups: list[ParamGroup] = list(
            chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
        )
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        for optimizer in optimizers:
            # One dictionary for all: checkpoints read the state of the chain and not of its members.
            optimizer.state = self.state

    def step(self) -> Any:
        for optimizer in self.optimizers:
            optimizer.step()


def is_matrix(name: str, layout: ParameterLayout) -> bool:
    """Whether Muon updates a weight: a matrix, or one per expert, but not an embedding or the output layer."""
    # Experts are stacked on a leading axis: [experts, rows, columns].
    dimensions = 3 if layout.replicas == "edp" else 2
    return len(layout.shape) == dimensions and not is_table(name) and not is_embedding_or_output(name)


def sharded_matrices(environment: OptimizerBuildContext, *, split_qkv: bool) -> dict[str, ShardedMatrix]:
    """The weights of this rank that Muon updates, by name."""
    return {
        name: ShardedMatrix(
            name,
            _of_one_matrix(layout),
            environment.ctx,
            environment.weights,
            _head_rows(environment.model, name) if split_qkv and name.endswith(QKV_WEIGHT) else None,
        )
        for name, layout in environment.layouts.items()
        if layout.trained and is_matrix(name, layout)
    }


def split_groups(groups: list[ParamGroup], names: Mapping[str, object]) -> tuple[list[ParamGroup], list[ParamGroup]]:
    """The groups with the named parameters alone, and with the others alone."""
    return _chosen(groups, lambda name: name in names), _chosen(groups, lambda name: name not in names)


def build_muon(config: MuonConfig, groups: list[ParamGroup], environment: OptimizerBuildContext) -> Optimizer:
    matrices = sharded_matrices(environment, split_qkv=config.muon_split_qkv)
    of_matrices, others = split_groups(groups, matrices)
    by_parameter = {
        parameter: matrices[name]
        for group in of_matrices
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }
    return ChainedOptimizer([Muon(of_matrices, config, by_parameter), _build_scalar(config, others)])


def _build_scalar(config: MuonConfig, groups: list[ParamGroup]) -> FunctionalOptimizer:
    """The optimizer of embeddings, the output layer and vectors."""
    if config.muon_scalar_optimizer == "lion":
        return Lion(groups, config.lr, config.lion_beta1, config.lion_beta2)
    return AdamW(groups, config.lr, config.adam_beta1, config.adam_beta2, config.adam_eps)


def _chosen(groups: list[ParamGroup], wanted: Any) -> list[ParamGroup]:
    chosen = []
    for group in groups:
        members = [pair for pair in zip(group["names"], group["params"], strict=True) if wanted(pair[0])]
        if members:
            names, params = (list(column) for column in zip(*members, strict=True))
            chosen.append({**group, "names": names, "params": params})
    return chosen


def _of_one_matrix(layout: ParameterLayout) -> ParameterLayout:
    if len(layout.shape) == 2:
        return layout
    # Dimension 0 counts the experts.
    return replace(layout, splits=tuple(split for split in layout.splits if split.dim > 0))


def _head_rows(model: nn.Module, name: str) -> HeadRows:
    path = name.removesuffix(f".{QKV_WEIGHT}")
    module = model.get_submodule(path)
    if not isinstance(module, GroupedHeads):
        raise ConfigError(
            f"optimizer.muon_split_qkv=true, but {path} ({type(module).__name__}) does not define heads_per_group and "
            f"head_dim, so how {name} divides into queries, keys and values is not known; "
            "set optimizer.muon_split_qkv=false"
        )
    return HeadRows(module.heads_per_group, module.head_dim)


@contextmanager
def _matmul_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Precision of fp32 matrix products on a GPU; a CPU uses fp32."""
    if device.type != "cuda":
        yield
        return
    # A setting of the whole process: the model's own fp32 products keep theirs.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
