"""Trained matrices between hidden states of the student and those of a wider or narrower teacher.

Each rank holds all of them: they are no part of the student, whose checkpoints and exports do not have them, but files
of the run directory beside its checkpoints. They have an Adam of their own, with a constant learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.checkpoint_lookup import CHECKPOINTS
from mt_core.errors import CheckpointError
from mt_core.parallel.reductions import sum_gradients
from mt_core.paths import children, write_whole
from mt_core.train.batch_source import TrainingRun

FOLDER = "hidden_projections"
"""Folder in the run directory: a file for each step that has a checkpoint."""
SUFFIX = ".safetensors"
ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


class HiddenProjections:
    """A matrix [teacher's hidden size, student's hidden size] in fp32 for each pair of layers.

    Initial values are uniform in 1 / sqrt(student's hidden size), as of torch.nn.Linear, from train.seed.
    """

    def __init__(
        self, run: TrainingRun, pairs: int, student_size: int, teacher_size: int, learning_rate: float
    ) -> None:
        self.run = run
        generator = torch.Generator().manual_seed(run.config.train.seed)
        bound = student_size**-0.5
        drawn = (torch.rand(teacher_size, student_size, generator=generator) for _ in range(pairs))
        self.matrices = [nn.Parameter(((2 * x - 1) * bound).to(run.engine.device)) for x in drawn]
        self.optimizer = torch.optim.Adam(self.matrices, lr=learning_rate)

    def __call__(self, pair: int, hidden: Tensor) -> Tensor:
        """[..., student's hidden size] in fp32 -> [..., teacher's hidden size]"""
        return F.linear(hidden, self.matrices[pair])

    def update(self) -> None:
        """One step with the gradients of the last optimizer step, where there are such. Gradients that are not
        finite, of a step that the student skips too, change nothing. Collective."""
        gradients = [matrix.grad for matrix in self.matrices if matrix.grad is not None]
        if not gradients:
            return
        ctx = self.run.ctx
        sum_gradients(gradients, ctx.dp_cp)
        if ctx.sequence_parallel:  # a tensor-parallel rank has a part of the positions
            sum_gradients(gradients, ctx.tp)
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            self.optimizer.step()
        self.optimizer.zero_grad()

    # -- files, each written before the checkpoint of its step ------------------------------------------

    def save(self) -> None:
        """Nothing for a run without a directory. Files of steps without a checkpoint are removed, but for the newest,
        whose checkpoint may still be written."""
        if self.run.directory is None or self.run.ctx.world.rank:
            return
        path = self._file(self.run.state.iteration)
        with_checkpoint = {entry.name for entry in children(self.run.directory.path / CHECKPOINTS)}
        stale = [file for file in children(path.parent) if file.suffix == SUFFIX and file.stem not in with_checkpoint]
        for file in sorted(stale)[:-1]:
            file.unlink()
        write_whole(path, safetensors.torch.save(dict(self._tensors())))

    def load(self) -> None:
        """Raises CheckpointError where the file of this step is not there, or is another's."""
        path = None if self.run.directory is None else self._file(self.run.state.iteration)
        if path is None or not path.is_file():
            raise CheckpointError(
                f"{path or FOLDER} is not there: a run with distillation.hidden_projection continues with the matrices "
                "that it had at the step of its checkpoint"
            )
        stored = safetensors.torch.load_file(path)
        if {name: value.shape for name, value in stored.items()} != dict(self._shapes()):
            raise CheckpointError(
                f"{path} has matrices of other layers, or of other sizes, than distillation.hidden_layers"
            )
        with torch.no_grad():
            for number, matrix in enumerate(self.matrices):
                matrix.copy_(stored[f"{number}.weight"])
                names = {name: f"{number}.{name}" for name in ADAM_STATE}
                self.optimizer.state[matrix] = {name: stored[key].to(matrix.device) for name, key in names.items()}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for number, matrix in enumerate(self.matrices):
            yield f"{number}.weight", matrix.detach().cpu().contiguous()
            state = self.optimizer.state.get(matrix) or _unused(matrix)
            for name in ADAM_STATE:
                yield f"{number}.{name}", state[name].detach().cpu().contiguous()

    def _shapes(self) -> Iterator[tuple[str, torch.Size]]:
        for number, matrix in enumerate(self.matrices):
            yield f"{number}.weight", matrix.shape
            yield from ((f"{number}.{name}", value.shape) for name, value in _unused(matrix).items())

    def _file(self, step: int) -> Path:
        assert self.run.directory is not None
        return self.run.directory.path / FOLDER / f"iter_{step:07d}{SUFFIX}"  # as the checkpoint is called


def _unused(matrix: Tensor) -> dict[str, Tensor]:
    """Adam's state before its first step."""
    return {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(matrix), "exp_avg_sq": torch.zeros_like(matrix)}
