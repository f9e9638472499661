"""`mt tune distill`: a student is trained on the distributions of a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    data_section,
    merged,
    model_sections,
    prompt_template_keys,
    rate_sections,
    template_keys,
    training_sections,
    with_set_values,
)
from mt_tune.commands.sft import DataOptions, data_sections, examine, summary

if TYPE_CHECKING:
    from mt_core.plugins import PluginHost

LR = 1e-4
"""Learning rate of a whole model by default: ten times that of instructions, since a distribution says more than a
label."""
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


ON_POLICY = "What the student writes"


@dataclass(frozen=True)
class OnPolicyOptions:
    """Completions of the student in place of records."""

    on_policy: Annotated[
        bool,
        typer.Option(
            "--on-policy", help="DATA are prompts, which the student completes (GKD).", rich_help_panel=ON_POLICY
        ),
    ] = False
    max_completion_length: Annotated[
        int | None, typer.Option(help="Tokens of a completion. Default: 256.", min=1, rich_help_panel=ON_POLICY)
    ] = None
    sampling_temperature: Annotated[
        float | None, typer.Option(help="Of the student's draws. Default: 1.", rich_help_panel=ON_POLICY)
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
    student: OnPolicyOptions,
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
    if student.on_policy:
        need("mt-infer", command="mt tune distill --on-policy")
        sections = on_policy_sections(host, preset, base, data, records, student, training, adapter, output)
        carry_out(context, preset, sections, training, output, run_dir)
        return
    _refuse_on_policy_options(student)
    ranks = output.nproc or 1
    if not data:
        _require_preset(preset, model)
        carry_out(context, preset, merged(base, preset_sections(training, ranks)), training, output, run_dir)
        return
    of_data = data_sections(data, records, template_keys(preset, of_model, host))
    examined = examine(host, preset, merged(base, of_data), training, ranks)
    length = training_sections(training, Amount(examined.samples, ranks))
    rates = rate_sections(training, base, length["train"]["train_iters"], lr=LR, own=preset is not None)
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


def _refuse_on_policy_options(student: OnPolicyOptions) -> None:
    """Raises ConfigError for options that count with --on-policy alone."""
    for name in ("max_completion_length", "sampling_temperature"):
        if getattr(student, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} counts with --on-policy, where the student writes")


def on_policy_sections(
    host: PluginHost,
    preset: str | None,
    base: Tree,
    data: list[str] | None,
    records: DataOptions,
    student: OnPolicyOptions,
    training: TrainingOptions,
    adapter: AdapterOptions,
    output: OutputOptions,
) -> Tree:
    """The configuration of a run on completions of prompts."""
    from mt_tune.commands.grpo import examine_prompts, intervals, with_amounts

    if not data:
        raise ConfigError(
            "--on-policy completes prompts: name files of them behind MODEL (mt tune grpo has their form)"
        )
    if records != DataOptions(records.valid, records.hold_out, records.template):
        raise ConfigError(
            "--on-policy takes prompts, each of which is a row: leave out --format, --train-on, --split-answers and "
            "--no-packing"
        )
    template = prompt_template_keys(preset, base, host)
    keys = data_section("prompts", data, records, template)
    base = merged(base, {"distillation": {"on_policy": True}})
    examined = examine_prompts(host, preset, merged(base, {"data": keys}), training)
    if not examined.validated:
        keys["split"] = "100,0,0"
    longest_prompt = max(len(prompt.tokens) for prompt in examined.prompts)
    room = MOST_TOKENS if examined.positions is None else examined.positions + 1 - longest_prompt
    most = student.max_completion_length or max(min(MOST_TOKENS, room), 1)
    keys["seq_length"] = training.seq_length or -(-(longest_prompt + most - 1) // 8) * 8
    amounts = with_amounts(training, len(examined.prompts), 1)
    length = training_sections(amounts, Amount(len(examined.prompts), output.nproc or 1))
    rates = rate_sections(amounts, base, length["train"]["train_iters"], lr=LR, own=preset is not None)
    section: dict[str, Any] = {"max_completion_length": most}
    section |= {} if student.sampling_temperature is None else {"sampling_temperature": student.sampling_temperature}
    steps = length["train"]["train_iters"]
    typer.echo(
        f"{len(examined.prompts)} prompts, {steps} steps of {length['train']['global_batch_size']} completions"
        f"{'' if examined.validated else '; nothing is held out'}",
        err=True,
    )
    return merged(base, {"data": keys}, length, intervals(steps), rates, {"distillation": section})


MOST_TOKENS = 256


def _require_preset(preset: str | None, model: str) -> None:
    if preset is None:
        raise ConfigError(f"MODEL {model} brings no data; name files of records behind it")


def preset_sections(options: TrainingOptions, ranks: int) -> Tree:
    """The keys of a preset that options replace; it has a length, a rate and data of its own."""
    if options.epochs is not None:
        raise ConfigError("--epochs are those of DATA, and the preset's own data are used; give --steps")
    batch, micro = options.batch_size, options.micro_batch_size
    if batch is not None and micro is None:  # that of the preset may be larger
        micro = Amount(0, ranks).micro_batch_size(options, batch)
    keys = {"train_iters": options.steps, "global_batch_size": batch, "micro_batch_size": micro}
    tree: Tree = {"train": {key: value for key, value in keys.items() if value is not None}}
    tree |= {} if options.lr is None else {"optimizer": {"lr": options.lr}}
    tree |= {} if options.seq_length is None else {"data": {"seq_length": options.seq_length}}
    return tree
