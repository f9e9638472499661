"""`mt tune distill`: a student is trained on the distributions of a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mt_core.commands import host_of, need
from mt_core.errors import ConfigError
from mt_tune.commands.options import AdapterOptions, OutputOptions, TrainingOptions
from mt_tune.commands.recipe import (
    OPTION_OF,
    Amount,
    Tree,
    adapter_section,
    carry_out,
    merged,
    model_sections,
    rate_sections,
    training_sections,
    with_set_values,
)
from mt_tune.commands.sft import DataOptions, data_sections, examine, summary

LR = 1e-4
"""Of a whole model by default: ten times that of instructions, since a distribution says more than a label."""
TEACHER, LOSS = "Teacher", "Loss"


@dataclass(frozen=True)
class TeacherOptions:
    """Who teaches, and how."""

    teacher: Annotated[
        str | None,
        typer.Option(help="A checkpoint, a run or a Hugging Face folder with the tokenizer of MODEL."),
    ] = None
    cache_teacher: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the teacher's top-k tokens: used, or written before the first step.",
            rich_help_panel=TEACHER,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(help="Use the k most probable tokens. Default: all, 64 with a cache.", rich_help_panel=TEACHER),
    ] = None
    divergence: Annotated[
        str | None, typer.Option(help="forward_kl, reverse_kl or jsd. Default: forward_kl.", rich_help_panel=LOSS)
    ] = None
    beta: Annotated[
        float | None, typer.Option(help="Weight of the teacher in the mixture of jsd.", rich_help_panel=LOSS)
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="Of both distributions. Default: 1.", rich_help_panel=LOSS)
    ] = None
    kd_alpha: Annotated[
        float | None,
        typer.Option(
            help="Share of the divergence beside cross entropy. Default: 1, without labels.", rich_help_panel=LOSS
        ),
    ] = None


def distill(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The student: a Hugging Face folder, a checkpoint, a run or a preset.")],
    data: Annotated[
        list[str] | None,
        typer.Argument(help="JSON lines, JSON arrays or Parquet; files or patterns. Default: the data of the preset."),
    ] = None,
    *,
    teacher: TeacherOptions,
    records: DataOptions,
    training: TrainingOptions,
    adapter: AdapterOptions,
    output: OutputOptions,
) -> None:
    """Train a student on the distributions of a teacher; --show prints the configuration."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt tune distill")
    training = with_set_values(training, training.set_, OPTION_OF)
    host = host_of(context)
    preset, of_model = model_sections(model, host)
    base = merged(of_model, adapter_section(adapter), distillation_sections(teacher))
    run_dir = Path("runs") / f"{Path(model).resolve().name}-distilled"
    if not data:
        _require_preset(preset, model)
        carry_out(context, preset, merged(base, preset_sections(training)), training, output, run_dir)
        return
    ranks = output.nproc or 1
    examined = examine(host, preset, merged(base, data_sections(data, records, preset)), training, ranks)
    length = training_sections(training, Amount(examined.samples, ranks))
    rates = rate_sections(training, adapter, length["train"]["train_iters"], lr=LR, own=preset is not None)
    sections = merged(base, {"data": examined.data}, length, rates)
    typer.echo(summary(examined, sections), err=True)
    carry_out(context, preset, sections, training, output, run_dir)


def distillation_sections(options: TeacherOptions) -> Tree:
    if options.teacher is None and options.cache_teacher is None:
        raise ConfigError("--teacher names the model to learn from: a checkpoint, a run or a Hugging Face folder")
    keys = {
        "teacher": options.teacher,
        "cache": None if options.cache_teacher is None else str(options.cache_teacher),
        "top_k": options.top_k or (64 if options.cache_teacher is not None else None),
        "divergence": options.divergence,
        "beta": options.beta,
        "temperature": options.temperature,
        "alpha": options.kd_alpha,
    }
    section: dict[str, Any] = {key: value for key, value in keys.items() if value is not None}
    return {"train": {"loss": "distillation", "batch_source": "teacher"}, "distillation": section}


def _require_preset(preset: str | None, model: str) -> None:
    if preset is None:
        raise ConfigError(f"MODEL {model} brings no data; name files of records behind it")


def preset_sections(options: TrainingOptions) -> Tree:
    """The keys of a preset that options replace; it has a length, a rate and data of its own."""
    if options.epochs is not None:
        raise ConfigError("--epochs are those of DATA, and the preset's own data are used; give --steps")
    keys = {
        "train_iters": options.steps,
        "global_batch_size": options.batch_size,
        "micro_batch_size": options.micro_batch_size,
    }
    tree: Tree = {"train": {key: value for key, value in keys.items() if value is not None}}
    tree |= {} if options.lr is None else {"optimizer": {"lr": options.lr}}
    tree |= {} if options.seq_length is None else {"data": {"seq_length": options.seq_length}}
    return tree
