"""The section [distillation]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from mt_core.config.fields import NonNegativeFloat, PositiveFloat, PositiveInt, Probability, Section, used_when
from mt_core.errors import ConfigError

DISTILLATION, TEACHER = "distillation", "teacher"
"""Names of the section and the loss, and of the source of batches."""
PROMPTS = "prompts"
"""The data set of distillation.on_policy."""
RANDOM = "random"
"""The teacher that has the student's configuration and weights of another seed: what `mt verify` compares with."""


class DistillationConfig(Section):
    """Training on a teacher's distributions (train.loss="distillation", train.batch_source="teacher")."""

    teacher: str | None = None
    """A checkpoint of any format, a run directory or a Hugging Face folder, with the student's tokenizer; "random": the
    student's own configuration with other weights, which teaches nothing and serves checks of a layout."""
    teacher_parallel: dict[str, int | bool | str] = Field(default_factory=dict)
    """Keys of [parallel] for a teacher in a layout of its own. Default: the student's layout."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """Divergence of a position: forward_kl is KL(teacher || student), reverse_kl KL(student || teacher), jsd the
    generalized Jensen-Shannon divergence of GKD with distillation.beta."""
    beta: float = used_when(0.5, divergence="jsd")
    """Weight of the teacher in the mixture m = beta p_T + (1 - beta) p_S: beta KL(p_T || m) + (1 - beta) KL(p_S || m),
    between 0 and 1 without both."""
    temperature: PositiveFloat = 1.0
    """Both distributions are softmax(logits / temperature)."""
    temperature_squared: bool = True
    """Multiply the divergence by the square of the temperature, so that the size of its gradient does not fall with it
    (Hinton et al., 2015; ModelOpt); false, as in TRL."""
    alpha: Probability = 1.0
    """The loss is alpha divergence + (1 - alpha) cross entropy of the labels."""
    top_k: PositiveInt | None = None
    """Use the teacher's k most probable tokens of each position in place of its whole distribution."""
    tail: Literal["bin", "renormalize", "drop"] = "bin"
    """What the tokens outside of top_k count as: `bin` makes one token of them, which gives a lower bound of the
    divergence; `renormalize` leaves them out of both distributions; `drop` leaves their terms out of the sum and keeps
    the student's normalizer (forward_kl)."""
    cache: str | None = None
    """A folder with the teacher's top_k tokens of the training and validation samples, which `mt tune distill
    --cache-teacher` writes. It takes the place of a teacher in memory."""
    on_policy: bool = False
    """Train on what the student writes: it completes the prompts of the data set "prompts", and the teacher scores the
    tokens (GKD with lambda 1)."""
    max_completion_length: PositiveInt = used_when(256, on_policy=True)
    """Tokens of a completion that the student writes."""
    sampling_temperature: PositiveFloat = used_when(1.0, on_policy=True)
    """Divides the logits where the student draws; distillation.temperature is that of the divergence."""
    generation_parallel: dict[str, Any] | None = used_when(None, on_policy=True)
    """Keys of [parallel] of the layout that generates, with a copy of the weights; see rl.generation_parallel."""
    chunk_positions: PositiveInt | None = None
    """Compute the logits of so many positions at a time, forward and again backward, in place of those of a micro-batch
    at once."""
    hidden_layers: list[str] = Field(default_factory=list)
    """Pairs STUDENT:TEACHER of layers, counted from 1, whose outputs are compared, such as "2:4"."""
    hidden_loss: Literal["mse", "cosine"] = "mse"
    """mse: mean square of the difference over the hidden size; cosine: 1 - cosine."""
    hidden_projection: bool = False
    """Compare the teacher's hidden states with a trained linear map of the student's, one for each pair: for models of
    different hidden sizes. The maps are no part of the student, and lie in RUN/hidden_projections."""
    hidden_projection_lr: PositiveFloat = used_when(1e-3, hidden_projection=True)
    """Learning rate of the maps, which Adam trains; constant."""
    hidden_weight: NonNegativeFloat = 1.0
    """Factor of the mean over the pairs of hidden_layers, which is added to the loss."""


def check_distillation(config: Any) -> None:
    """The rules of [distillation] that other sections are part of. Raises ConfigError."""
    keys: DistillationConfig = config.section(DistillationConfig)
    if config.train.loss != DISTILLATION:
        if config.train.batch_source == TEACHER:
            raise ConfigError(
                f'train.batch_source="{TEACHER}" gives what train.loss="{DISTILLATION}" needs (now '
                f'"{config.train.loss}"); set one of them'
            )
        return
    if config.train.batch_source != TEACHER:
        raise ConfigError(
            f'train.loss="{DISTILLATION}" compares with a teacher, which train.batch_source='
            f'"{config.train.batch_source}" does not give; set it to "{TEACHER}"'
        )
    _check_source(keys)
    _check_on_policy(config, keys)
    _check_divergence(keys)
    _check_layout(config, keys)


def _check_source(keys: DistillationConfig) -> None:
    if keys.teacher is None and keys.cache is None:
        raise ConfigError(
            "distillation.teacher names no model to learn from; set it to a checkpoint, a run or a Hugging Face folder "
            "(--teacher), or distillation.cache to a folder of its stored top-k"
        )
    if keys.cache is not None and keys.top_k is None:
        raise ConfigError(
            f"distillation.cache={keys.cache} holds the most probable tokens of each position; say with "
            "distillation.top_k how many of them count"
        )


def _check_on_policy(config: Any, keys: DistillationConfig) -> None:
    of_prompts = config.data.dataset_type == PROMPTS
    if keys.on_policy != of_prompts:
        wanted = f'set it to "{PROMPTS}"' if keys.on_policy else "set distillation.on_policy=true, which completes them"
        raise ConfigError(
            f"distillation.on_policy={str(keys.on_policy).lower()} with data.dataset_type={config.data.dataset_type}: "
            f"{wanted}"
        )
    if not keys.on_policy:
        return
    if keys.cache is not None:
        raise ConfigError(
            "distillation.on_policy=true: what the student writes is in no cache; leave out distillation.cache"
        )
    if keys.alpha < 1:
        raise ConfigError(
            f"distillation.alpha={keys.alpha}: the labels are what the student wrote itself, from which cross entropy "
            "learns nothing; set it to 1"
        )
    if config.train.train_epochs is not None:
        raise ConfigError("train.train_epochs: give train.train_iters with distillation.on_policy=true in its place")


def _check_divergence(keys: DistillationConfig) -> None:
    if not 0 < keys.beta < 1:
        raise ConfigError(
            f"distillation.beta={keys.beta} is the weight of the teacher in a mixture; it lies between 0 and 1, whose "
            "ends are distillation.divergence=forward_kl and reverse_kl"
        )
    if keys.tail != "bin" and keys.top_k is None:
        raise ConfigError(f"distillation.tail={keys.tail} has no effect without distillation.top_k; set that, too")
    if keys.tail == "drop" and keys.divergence != "forward_kl":
        raise ConfigError(
            f"distillation.tail=drop with distillation.divergence={keys.divergence}: the student's tokens outside of "
            "the teacher's top_k are terms of it; use bin or renormalize"
        )


def _check_layout(config: Any, keys: DistillationConfig) -> None:
    parallel = config.parallel
    if keys.chunk_positions is not None and parallel.use_torch_fsdp2:
        raise ConfigError(
            f"distillation.chunk_positions={keys.chunk_positions} multiplies with the LM head behind the forward pass, "
            "where parallel.use_torch_fsdp2=true has divided it again; leave it out, or use "
            "parallel.use_distributed_optimizer=true in place of FSDP2"
        )
    if config.train.cuda_graphs == "step":
        raise ConfigError(
            "train.cuda_graphs=step replays a step without the teacher's forward pass; set it to blocks or none"
        )
    if keys.hidden_projection:
        _check_projection(config, keys)
    if keys.hidden_layers:
        hidden_pairs(keys)
        if parallel.pipeline_model_parallel_size > 1:
            raise ConfigError(
                f"parallel.pipeline_model_parallel_size={parallel.pipeline_model_parallel_size}: hidden states of "
                "earlier stages do not reach the loss; set it to 1, or distillation.hidden_layers=[]"
            )
        if config.recompute.recompute_granularity == "full" or config.train.cuda_graphs != "none":
            raise ConfigError(
                f"distillation.hidden_layers reads outputs of layers, which recompute.recompute_granularity="
                f"{config.recompute.recompute_granularity} and train.cuda_graphs={config.train.cuda_graphs} hide: "
                "use selective recomputation and no graphs"
            )
        if keys.cache is not None or keys.teacher_parallel:
            raise ConfigError(
                "distillation.hidden_layers compares with a teacher in the student's layout; leave out "
                "distillation.cache and distillation.teacher_parallel"
            )


def _check_projection(config: Any, keys: DistillationConfig) -> None:
    if not keys.hidden_layers:
        raise ConfigError(
            "distillation.hidden_projection=true maps hidden states of distillation.hidden_layers, which names none; "
            'set it to pairs such as ["2:4"], or leave out the former'
        )
    if config.precision.dtype == "fp16":
        raise ConfigError(
            "distillation.hidden_projection=true: gradients of the maps do not follow the loss scale of "
            'precision.dtype="fp16"; use "bf16" or "fp32"'
        )


def hidden_pairs(keys: DistillationConfig) -> list[tuple[int, int]]:
    """(student's layer, teacher's layer), counted from 0. Raises ConfigError for a text that is no pair."""
    pairs = []
    for text in keys.hidden_layers:
        student, _, teacher = text.partition(":")
        if not (student.isdecimal() and teacher.isdecimal() and int(student) and int(teacher)):
            raise ConfigError(
                f'distillation.hidden_layers has "{text}"; a pair is two numbers of layers, counted from 1, '
                'STUDENT:TEACHER, such as "2:4"'
            )
        pairs.append((int(student) - 1, int(teacher) - 1))
    return pairs


def shrink_distillation(section: Mapping[str, Any], tree: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The section for a small run: the teacher has the small student's configuration, and nothing is stored."""
    if tree["train"]["loss"] != DISTILLATION:
        return section
    layers = tree["model"].get("num_layers") or 1
    pairs = [f"{layers}:{layers}"] if section.get("hidden_layers") else []
    top_k = min(section["top_k"], 8) if section.get("top_k") else None
    return {**section, "teacher": RANDOM, "cache": None, "top_k": top_k, "hidden_layers": pairs}
