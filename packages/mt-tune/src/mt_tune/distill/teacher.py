"""The teacher of a run: a second model, in the student's layout or one of its own, without gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer
from mt_core.nn.loss import first_id_of_rank
from mt_core.optim.master_weights import UnshardedWeights
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train import build
from mt_core.train.batch_source import TrainingRun
from mt_core.train.pipelining import Stages, build_forward_backward, build_stages
from mt_core.train.step.forward_backward import Batch, ForwardBackward
from mt_core.train.trained_model import load_trained_model
from mt_tune.distill.config import RANDOM, DistillationConfig

LAYOUT_KEYS = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "pipeline_model_parallel_size",
    "pipeline_schedule",
    "virtual_pipeline_model_parallel_size",
)
"""Keys of [parallel] that the teacher takes from the student: those that say which rank has which logits."""
EXPERT_KEYS = ("expert_model_parallel_size", "expert_tensor_parallel_size")


@dataclass
class Teacher:
    """A model in evaluation mode. project: whether its outputs are logits, or the operands of them (`Unprojected`)."""

    model: nn.Module
    config: Config
    ctx: ParallelContext
    stages: Stages | None
    project: bool = True
    _outputs: _KeptOutputs = field(init=False)
    _runner: ForwardBackward = field(init=False)

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        self._outputs = _KeptOutputs({} if self.project else {"project": False})
        weights: Any = UnshardedWeights(self.model)
        self._runner = build_forward_backward(
            self.config, self.ctx, self.model, weights, self.stages, self._outputs, None, None
        )

    @property
    def vocab_size(self) -> int:
        assert self.config.model.vocab_size is not None
        return self.config.model.vocab_size

    @property
    def first_id(self) -> int:
        """The id of the first column of this rank's logits."""
        return first_id_of_rank(self.config, self.ctx)

    @torch.no_grad()
    def outputs(self, batches: Sequence[Batch]) -> list[Any]:
        """For each micro-batch the model's output; none on ranks without the last stage. Collective over its ranks."""
        self._runner.forward(batches, lambda losses, batch: losses.sum())
        return self._outputs.take()


class _KeptOutputs:
    """In the place of a loss: keeps the outputs that it is given."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        if options:
            self.model_options = options
        self._kept: list[Any] = []

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        self._kept.append(output)
        return torch.zeros((), device=batch["tokens"].device)

    def take(self) -> list[Any]:
        kept, self._kept = self._kept, []
        return kept


# -- building ----------------------------------------------------------------------------------------


def build_teacher(run: TrainingRun, keys: DistillationConfig, *, project: bool) -> Teacher:
    """Collective over the world. Raises ConfigError for a teacher with another tokenizer, and where the layout cannot
    be; CheckpointError where there is no checkpoint."""
    if keys.teacher == RANDOM:
        return _random_teacher(run, keys, project=project)
    assert keys.teacher is not None
    settings = {
        "parallel": _parallel(run.config, keys, run.host),
        "precision": run.config.precision.model_dump(mode="json"),
        "model": {"make_vocab_size_divisible_by": run.config.model.make_vocab_size_divisible_by},
        "kernels": run.config.kernels.model_dump(mode="json"),
        "checkpoint": {},
    }
    loaded = load_trained_model(keys.teacher, run.host, device=run.config.train.device, settings=settings)
    require_same_tokenizer(run.engine.tokenizer, loaded.tokenizer, keys.teacher)
    return Teacher(loaded.model, loaded.config, loaded.ctx, loaded.stages, project)


def _parallel(config: Config, keys: DistillationConfig, host: PluginHost) -> dict[str, Any]:
    """The section [parallel] of the teacher's layout."""
    if keys.teacher_parallel:
        return dict(keys.teacher_parallel)
    student = config.parallel.model_dump(mode="json")
    return {key: student[key] for key in (*LAYOUT_KEYS, *EXPERT_KEYS) if key in config.parallel.model_fields_set}


def _random_teacher(run: TrainingRun, keys: DistillationConfig, *, project: bool) -> Teacher:
    tree = run.config.to_dict()
    tree["train"] = {**tree["train"], "seed": run.config.train.seed + 1}
    ctx, stages = run.ctx, run.engine.stages
    if keys.teacher_parallel:
        tree["parallel"] = dict(keys.teacher_parallel)
        config = config_from_dict(tree, run.host)
        ctx = build.build_context(config, run.engine.device)
        stages = build_stages(config, ctx, run.host)
    config = config_from_dict(tree, run.host)
    model = build.build_initialized_model(config, ctx, run.host, None if stages is None else stages.own)
    return Teacher(model, config, ctx, stages, project)


def require_same_tokenizer(student: Tokenizer, teacher: Tokenizer, path: str) -> None:
    """Raises ConfigError for tokenizers that give other ids: their distributions are over other vocabularies."""
    if student.fingerprint() != teacher.fingerprint():
        raise ConfigError(
            f"distillation.teacher={path} has another tokenizer ({teacher.vocab_size} ids, fingerprint "
            f"{teacher.fingerprint()[:12]}) than the student ({student.vocab_size} ids, fingerprint "
            f"{student.fingerprint()[:12]}); distributions over different vocabularies cannot be compared: take a "
            "teacher of the student's family"
        )
