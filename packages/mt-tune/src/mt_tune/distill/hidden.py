"""The loss of hidden states: outputs of layers of the student and of the teacher, compared at each position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.nn.model import NumberedLayers
from mt_core.parallel.collectives import gather_copies
from mt_core.parallel.context import ParallelContext
from mt_tune.distill.config import DistillationConfig, hidden_pairs
from mt_tune.distill.projections import HiddenProjections


class LayerOutputs:
    """The outputs [B, S, H] of layers of a model in the forward pass that was run last."""

    def __init__(self, model: nn.Module, numbers: Sequence[int], whose: str) -> None:
        layers = _layers(model, whose)
        for number in numbers:
            if number not in layers.numbers():
                raise ConfigError(
                    f"distillation.hidden_layers: {whose} has no layer {number + 1}; its layers are 1 to {len(layers)}"
                )
            layers[number].register_forward_hook(self._keep(number))
        self._outputs: dict[int, Tensor] = {}

    def _keep(self, number: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._outputs[number] = output[0] if isinstance(output, tuple) else output

        return hook

    def take(self) -> dict[int, Tensor]:
        outputs, self._outputs = self._outputs, {}
        return outputs


def _layers(model: nn.Module, whose: str) -> NumberedLayers:
    stacks = [module for module in model.modules() if isinstance(module, NumberedLayers)]
    if len(stacks) != 1:
        raise ConfigError(
            f"distillation.hidden_layers numbers the layers of one stack, and {whose} ({type(model).__name__}) has "
            f"{len(stacks)}; leave it out"
        )
    return stacks[0]


class HiddenLoss:
    """Called after both models have run: [B, S], the mean over the pairs. The models share a layout.

    project: maps the student's hidden states to the teacher's size; None: both have one.
    """

    def __init__(
        self,
        keys: DistillationConfig,
        student: nn.Module,
        teacher: nn.Module,
        parallel: ParallelContext,
        project: HiddenProjections | None = None,
    ) -> None:
        self.project = project
        self.keys, self.parallel, self.pairs = keys, parallel, hidden_pairs(keys)
        self.student = LayerOutputs(student, [pair[0] for pair in self.pairs], "the student")
        self.teacher = LayerOutputs(teacher, [pair[1] for pair in self.pairs], "the teacher")

    def __call__(self) -> Tensor:
        of_student, of_teacher = self.student.take(), self.teacher.take()
        losses = [
            self._of_pair(number, of_student[student_layer], of_teacher[other])
            for number, (student_layer, other) in enumerate(self.pairs)
        ]
        return torch.stack(losses).mean(0)

    def _of_pair(self, number: int, student: Tensor, teacher: Tensor) -> Tensor:
        student, teacher = student.float(), teacher.detach().float()
        if self.project is not None:
            student = self.project(number, student)
        if student.shape[-1] != teacher.shape[-1]:
            raise ConfigError(
                f"distillation.hidden_layers compares vectors of one size, and the student's have {student.shape[-1]} "
                f"elements, the teacher's {teacher.shape[-1]}; train a map between them "
                "(distillation.hidden_projection=true)"
            )
        if self.keys.hidden_loss == "mse":
            losses = (student - teacher).square().mean(-1)
        else:
            losses = 1.0 - F.cosine_similarity(student, teacher, dim=-1)
        # With sequence parallelism a rank has a part of the positions, and every rank continues with the whole.
        return gather_copies(losses, SEQUENCE_DIM, self.parallel.tp) if self.parallel.sequence_parallel else losses
