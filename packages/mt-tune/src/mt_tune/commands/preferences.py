"""`mt tune dpo`, `orpo` and `kto`: training by pairs, with and without a reference, and by single answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mt_core.commands import host_of, need
from mt_core.errors import ConfigError
from mt_tune.commands.options import AdapterOptions, OutputOptions, RecordOptions, TrainingOptions
from mt_tune.commands.recipe import (
    OPTION_OF,
    Amount,
    Tree,
    adapter_section,
    carry_out,
    data_section,
    merged,
    model_sections,
    rate_sections,
    template_keys,
    training_sections,
    with_set_values,
)
from mt_tune.commands.sft import examine

DPO_LR, ORPO_LR, KTO_LR = 1e-6, 8e-6, 1e-6
EXAMPLE_LR = 1e-3
"""For the small model that the synthetic records are meant for."""
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
        typer.Option(
            help="start: its values are computed first. model: a second copy. adapter_off: without the adapter.",
            rich_help_panel=LOSS,
        ),
    ] = None


@dataclass(frozen=True)
class UnpairedOptions:
    """What is minimized."""

    loss: Annotated[
        str | None, typer.Option(help="kto, apo_zero_unpaired or bco. Default: kto.", rich_help_panel=LOSS)
    ] = None
    beta: Annotated[float | None, typer.Option(help="Inverse temperature. Default: 0.1.", rich_help_panel=LOSS)] = None
    desirable_weight: Annotated[
        float | None, typer.Option(help="Weight of desirable answers. Default: 1.", rich_help_panel=LOSS)
    ] = None
    undesirable_weight: Annotated[
        float | None, typer.Option(help="Weight of undesirable answers. Default: 1.", rich_help_panel=LOSS)
    ] = None
    reference: Annotated[
        str | None, typer.Option(help="start, model or adapter_off, as of mt tune dpo.", rich_help_panel=LOSS)
    ] = None


def dpo(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a checkpoint, a run or a preset.")],
    data: Annotated[
        list[str] | None,
        typer.Argument(help="Pairs: JSON lines, JSON arrays or Parquet; files or patterns. Default: synthetic ones."),
    ] = None,
    *,
    records: RecordOptions,
    preference: PreferenceOptions,
    training: TrainingOptions,
    adapter: AdapterOptions,
    output: OutputOptions,
) -> None:
    """Train a model to prefer chosen answers to rejected ones, held to the model that it starts from."""
    kind = Kind("dpo", "preference", DPO_LR, pair_sections(preference, "dpo"))
    _tune(context, kind, model, data, records, training, adapter, output)


def orpo(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a checkpoint, a run or a preset.")],
    data: Annotated[
        list[str] | None,
        typer.Argument(help="Pairs: JSON lines, JSON arrays or Parquet; files or patterns. Default: synthetic ones."),
    ] = None,
    *,
    records: RecordOptions,
    preference: PreferenceOptions,
    training: TrainingOptions,
    adapter: AdapterOptions,
    output: OutputOptions,
) -> None:
    """Train on chosen answers and against rejected ones at once, without a reference (ORPO, SimPO, CPO)."""
    kind = Kind("orpo", "preference", ORPO_LR, pair_sections(preference, "orpo"))
    _tune(context, kind, model, data, records, training, adapter, output)


def kto(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a checkpoint, a run or a preset.")],
    data: Annotated[
        list[str] | None,
        typer.Argument(help="Records of prompt, completion and label; files or patterns. Default: synthetic ones."),
    ] = None,
    *,
    records: RecordOptions,
    preference: UnpairedOptions,
    training: TrainingOptions,
    adapter: AdapterOptions,
    output: OutputOptions,
) -> None:
    """Train on single answers that are desirable or not (KTO, BCO), held to the model that it starts from."""
    kind = Kind("kto", "unpaired_preference", KTO_LR, unpaired_sections(preference))
    _tune(context, kind, model, data, records, training, adapter, output)


@dataclass(frozen=True)
class Kind:
    """A command: its name, its data set, its learning rate of the whole model, and what it sets."""

    name: str
    dataset: str
    lr: float
    sections: Tree


def _tune(
    context: typer.Context,
    kind: Kind,
    model: str,
    data: list[str] | None,
    records: RecordOptions,
    training: TrainingOptions,
    adapter: AdapterOptions,
    output: OutputOptions,
) -> None:
    need("torch", "mt-models", "mt-data", "mt-ckpt", command=f"mt tune {kind.name}")
    training = with_set_values(training, training.set_, OPTION_OF)
    if not data:
        data, records, training = example_data(kind.dataset, records, training)
    host = host_of(context)
    preset, of_model = model_sections(model, host)
    template = template_keys(preset, of_model, host)
    base = merged(of_model, adapter_section(adapter), kind.sections)
    ranks = output.nproc or 1
    examined = examine(
        host, preset, merged(base, {"data": data_section(kind.dataset, data, records, template)}), training, ranks
    )
    length = training_sections(training, Amount(examined.samples, ranks))
    rates = rate_sections(training, base, length["train"]["train_iters"], lr=kind.lr, own=preset is not None)
    sections = merged(base, {"data": examined.data}, length, rates)
    train = sections["train"]
    typer.echo(
        f"{examined.samples} samples of {examined.data['seq_length']} positions, {train['train_iters']} steps of "
        f"{train['global_batch_size']}{'' if examined.validated else '; nothing is held out'}",
        err=True,
    )
    carry_out(context, preset, sections, training, output, Path("runs") / f"{Path(model).resolve().name}-{kind.name}")


def example_data(
    dataset: str, records: RecordOptions, training: TrainingOptions
) -> tuple[list[str], RecordOptions, TrainingOptions]:
    """Synthetic records as files, and what a model of the preset instructions-tiny learns by them, where options do not
    say it."""
    from mt_tune.preferences.example_records import write_example_records

    train, valid = write_example_records(dataset)
    typer.echo(f"no DATA: synthetic records, {train} and {valid}", err=True)
    once = 1 if training.steps is None and training.epochs is None else training.epochs
    lr = EXAMPLE_LR if training.lr is None else training.lr
    held_out = replace(records, valid=records.valid or [str(valid)], template=records.template or "plain")
    return [str(train)], held_out, replace(training, epochs=once, lr=lr)


def pair_sections(options: PreferenceOptions, name: str) -> Tree:
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


def unpaired_sections(options: UnpairedOptions) -> Tree:
    keys = {
        "unpaired_loss": options.loss,
        "beta": options.beta,
        "desirable_weight": options.desirable_weight,
        "undesirable_weight": options.undesirable_weight,
        "reference": options.reference,
    }
    section = {key: value for key, value in keys.items() if value is not None}
    train: dict[str, Any] = {"loss": "unpaired_preference", "batch_source": "unpaired_reference"}
    return {"train": train, **({"preference": section} if section else {})}
