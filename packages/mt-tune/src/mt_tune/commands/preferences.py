"""`mt tune dpo` and `mt tune orpo`: training by preferences, with and without a reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mt_core.commands import host_of, need
from mt_core.errors import ConfigError
from mt_tune.commands.options import AdapterOptions, OutputOptions, RecordOptions, TrainingOptions
from mt_tune.commands.recipe import (
    Amount,
    Tree,
    adapter_section,
    carry_out,
    data_section,
    merged,
    model_sections,
    rate_sections,
    training_sections,
)
from mt_tune.commands.sft import examine

DPO_LR, ORPO_LR = 1e-6, 8e-6
LOSS = "Loss"


@dataclass(frozen=True)
class PreferenceOptions:
    """What is minimized."""

    loss: Annotated[
        list[str] | None,
        typer.Option(help="Loss of a pair, repeatable: they are added. mt config keys preference lists them."),
    ] = None
    beta: Annotated[float | None, typer.Option(help="Inverse temperature. Default: 0.1.", rich_help_panel=LOSS)] = None
    label_smoothing: Annotated[
        float | None, typer.Option(help="Probability that a preference is the wrong way round.", rich_help_panel=LOSS)
    ] = None
    reference: Annotated[
        str | None,
        typer.Option(help="start: its values are computed first. model: a second copy.", rich_help_panel=LOSS),
    ] = None


def dpo(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a checkpoint, a run or a preset.")],
    data: Annotated[list[str], typer.Argument(help="Pairs: JSON lines, JSON arrays or Parquet; files or patterns.")],
    records: RecordOptions,
    preference: PreferenceOptions,
    training: TrainingOptions,
    adapter: AdapterOptions,
    output: OutputOptions,
) -> None:
    """Train a model to prefer chosen answers to rejected ones, held to the model that it starts from."""
    _tune(context, "dpo", model, data, records, preference, training, adapter, output, DPO_LR)


def orpo(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a checkpoint, a run or a preset.")],
    data: Annotated[list[str], typer.Argument(help="Pairs: JSON lines, JSON arrays or Parquet; files or patterns.")],
    records: RecordOptions,
    preference: PreferenceOptions,
    training: TrainingOptions,
    adapter: AdapterOptions,
    output: OutputOptions,
) -> None:
    """Train on chosen answers and against rejected ones at once, without a reference (ORPO, SimPO, CPO)."""
    _tune(context, "orpo", model, data, records, preference, training, adapter, output, ORPO_LR)


def _tune(
    context: typer.Context,
    name: str,
    model: str,
    data: list[str],
    records: RecordOptions,
    preference: PreferenceOptions,
    training: TrainingOptions,
    adapter: AdapterOptions,
    output: OutputOptions,
    lr: float,
) -> None:
    need("torch", "mt-models", "mt-data", "mt-ckpt", command=f"mt tune {name}")
    host = host_of(context)
    preset, of_model = model_sections(model, host)
    base = merged(of_model, adapter_section(adapter), preference_sections(preference, name))
    ranks = output.nproc or 1
    examined = examine(
        host, preset, merged(base, {"data": data_section("preference", data, records, preset)}), training, ranks
    )
    length = training_sections(training, Amount(examined.samples, ranks))
    rates = rate_sections(training, adapter, length["train"]["train_iters"], lr=lr, own=preset is not None)
    sections = merged(base, {"data": examined.data}, length, rates)
    train = sections["train"]
    typer.echo(
        f"{examined.samples} samples of {examined.data['seq_length']} positions, {train['train_iters']} steps of "
        f"{train['global_batch_size']}{'' if examined.validated else '; nothing is held out'}",
        err=True,
    )
    carry_out(context, preset, sections, training, output, Path("runs") / f"{Path(model).resolve().name}-{name}")


def preference_sections(options: PreferenceOptions, name: str) -> Tree:
    from mt_tune.preferences.config import needs_reference

    losses = options.loss or ["sigmoid" if name == "dpo" else "orpo"]
    with_reference = needs_reference(losses)
    if with_reference != (name == "dpo"):
        other = "orpo" if name == "dpo" else "dpo"
        what = "has a reference" if with_reference else "has no reference"
        raise ConfigError(f"mt tune {name} --loss {' --loss '.join(losses)} {what}; use mt tune {other}")
    if options.reference is not None and not with_reference:
        raise ConfigError(f"--reference {options.reference} has no effect: {', '.join(losses)} has no reference")
    keys = {"beta": options.beta, "label_smoothing": options.label_smoothing, "reference": options.reference}
    section: dict[str, Any] = {"loss": losses, **{key: value for key, value in keys.items() if value is not None}}
    train: dict[str, Any] = {"loss": "preference", "batch_source": "reference" if with_reference else "dataset"}
    return {"train": train, "preference": section}
