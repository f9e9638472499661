"""Amax history: the largest magnitudes of past steps, from which delayed scaling computes its scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from mt_core._torch_compat import zero_all_
from mt_core.nn.kernels.reference.fp8_casts import ROLES, Role, note
from mt_core.nn.layout import LayoutModule, ParameterLayout
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.parallel.reductions import all_reduce_

Algorithm = Literal["most_recent", "max"]
NOTHING = -1.0
"""Stands in the history for steps that there were not."""


class AmaxHistory(LayoutModule):
    """Amax history of a linear layer. amax_history: [3 roles, length] fp32, last step first; saved with the weights.

    Scales stay the same for a whole step, so that neither the order of micro-batches nor a recomputed or repeated
    pass changes any: magnitudes of the step at hand are only noted, by their maximum.
    """

    amax_history: Tensor
    noted_in_forward: Tensor
    """[2] fp32, of the input and the weight."""
    noted_in_backward: Tensor
    """[1] fp32, of the gradient. Apart, since a compiled layer may change a tensor in one of its passes only."""

    def __init__(self, length: int, algorithm: Algorithm, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.algorithm = algorithm
        # Declared as a parameter, not as a buffer: it is saved, resharded and named as parameters are.
        self.declare(
            "amax_history", ParameterLayout((len(ROLES), length), _nothing, dtype=torch.float32, trained=False)
        )
        # Not saved: a checkpoint is written between steps, when both are 0.
        self.register_buffer("noted_in_forward", torch.zeros(2, device=ctx.device), persistent=False)
        self.register_buffer("noted_in_backward", torch.zeros(1, device=ctx.device), persistent=False)
        self.has_stepped = False
        """In this process. Before, the history may be without an entry; after, it has one."""

    def amax(self, role: Role) -> Tensor:
        """[] fp32: what the scale follows; NOTHING before the first step."""
        # detach: a parameter of the module, though not a trained one.
        past = self.amax_history.detach()[ROLES.index(role)]
        return past.amax() if self.algorithm == "max" else past[0]

    @property
    def noted(self) -> Tensor:
        """[3 roles], the largest magnitudes of this step."""
        return torch.cat([self.noted_in_forward, self.noted_in_backward])

    def noted_of(self, role: Role) -> Tensor:
        """[], the largest magnitude of this step so far, to be written to."""
        return self.noted_in_backward[0] if role == "gradient" else self.noted_in_forward[ROLES.index(role)]

    def note(self, role: Role, amax: Tensor) -> None:
        """amax: [] fp32 of a tensor of this step. One that is not finite is left out."""
        note(self.noted_of(role), amax)

    @torch.no_grad()
    def advance(self, amaxes: Tensor) -> None:
        """amaxes: [3], of the step that ended, over all ranks."""
        # [3, length], shifted by one: the oldest falls out. In place, as the parameter keeps its memory.
        self.amax_history.copy_(torch.cat([amaxes[:, None], self.amax_history[:, :-1]], 1))
        zero_all_([self.noted_in_forward, self.noted_in_backward])
        self.has_stepped = True


def _nothing(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.fill_(NOTHING)


class AdvanceHistories(nn.Module):
    """Ends a step for all histories of a model with one message (see PostStepHook). Has no parameters of its own."""

    def __init__(self, histories: Sequence[AmaxHistory], ctx: ParallelContext) -> None:
        super().__init__()
        self.histories = tuple(histories)  # a tuple, so that they keep the names they have in their layers
        # Ranks of other pipeline stages have other layers. Experts are not scaled with a history.
        self.axes = (ctx.dp_cp, ctx.tp)

    def after_step(self) -> None:
        """All-reduce (max) the amaxes over the ranks that share the layers or the batch, so that scales stay equal."""
        if not self.histories:
            return
        # [histories, 3], one all-reduce an axis for all layers. The order of histories is that of the modules, so it is
        # the same on all these ranks.
        noted = torch.stack([history.noted for history in self.histories])
        for axis in self.axes:
            noted = largest_over(noted, axis)
        for history, amaxes in zip(self.histories, noted, strict=True):
            history.advance(amaxes)


def largest_over(amax: Tensor, axis: Axis) -> Tensor:
    """The maximum over the ranks of the axis. Collective."""
    if axis.size == 1:
        return amax
    # Reduced in place; the caller's tensor may be the layer's own.
    amax = amax.clone()
    all_reduce_(amax, axis, "max")
    return amax
