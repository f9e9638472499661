"""`mt data where`."""

from __future__ import annotations

from typing import Annotated

import typer

from mt_data.commands.run_data import (
    ConfigArgument,
    PresetOption,
    SetOption,
    SplitOption,
    checked_sample,
    load_run_data,
)


def where(
    sample: Annotated[int, typer.Option(min=0, help="Number of the sample, from 0, in the order of training.")],
    config: ConfigArgument = None,
    preset: PresetOption = None,
    set_: SetOption = None,
    split: SplitOption = "train",
    name: Annotated[str | None, typer.Option(help="One of several validation sets.")] = None,
) -> None:
    """Say which file, document and tokens a sample was made of; of a blend, also which data set."""
    dataset = load_run_data(config, preset, set_).build_one(split, name)
    checked_sample(dataset, sample, split)
    typer.echo(f"sample {sample} of {len(dataset):,} ({split})")
    for step in dataset.describe(sample).split(" -> "):
        typer.echo(f"  {step}")
