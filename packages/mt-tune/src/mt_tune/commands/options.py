"""Options that the commands of `mt tune` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

DATA, LENGTH, OUTPUT, ADAPTER = "Data", "Training", "What is done", "Adapter"


@dataclass(frozen=True)
class RecordOptions:
    """Which records are evaluated on, and how they become text."""

    valid: Annotated[list[str] | None, typer.Option(help="Files to evaluate on; repeatable.", rich_help_panel=DATA)] = (
        None
    )
    hold_out: Annotated[
        int,
        typer.Option(
            help="Percent of the data to evaluate on, without --valid; none of few records.",
            min=0,
            max=99,
            rich_help_panel=DATA,
        ),
    ] = 5
    template: Annotated[
        str | None,
        typer.Option(
            help="Chat template: chatml, llama3, plain or a Jinja file. Default: the model's own.", rich_help_panel=DATA
        ),
    ] = None


@dataclass(frozen=True)
class TrainingOptions:
    """How long and how fast is trained."""

    epochs: Annotated[
        int | None, typer.Option(help="Times to go through the data. Default: 3.", min=1, rich_help_panel=LENGTH)
    ] = None
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps, in place of --epochs.", min=1, rich_help_panel=LENGTH)
    ] = None
    lr: Annotated[
        float | None,
        typer.Option(help="Highest learning rate. Default: by the kind.", rich_help_panel=LENGTH),
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(help="Samples of a step. Default: 16, fewer for few data.", min=1, rich_help_panel=LENGTH),
    ] = None
    micro_batch_size: Annotated[
        int | None,
        typer.Option(help="Samples that a process computes at once. Default: 1 to 4.", min=1, rich_help_panel=LENGTH),
    ] = None
    seq_length: Annotated[
        int | None,
        typer.Option(help="Positions of a sample. Default: at most 1024.", min=8, rich_help_panel=LENGTH),
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Change one value; repeatable.", rich_help_panel=LENGTH
        ),
    ] = None


@dataclass(frozen=True)
class AdapterOptions:
    """What is trained."""

    adapter: Annotated[
        str | None,
        typer.Option(help="Train lora, dora, vera or ia3. Default: all weights.", rich_help_panel=ADAPTER),
    ] = None
    rank: Annotated[int | None, typer.Option(help="Its rank. Default: 16.", min=1, rich_help_panel=ADAPTER)] = None
    alpha: Annotated[
        float | None, typer.Option(help="Its alpha. Default: twice the rank.", rich_help_panel=ADAPTER)
    ] = None


@dataclass(frozen=True)
class OutputOptions:
    """What becomes of the configuration."""

    run_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of the run. Default: in runs/.", rich_help_panel=OUTPUT),
    ] = None
    nproc: Annotated[
        int | None, typer.Option(help="Processes to start on this machine.", min=1, rich_help_panel=OUTPUT)
    ] = None
    show: Annotated[
        bool, typer.Option("--show", help="Print the configuration and train nothing.", rich_help_panel=OUTPUT)
    ] = False
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the configuration here and train nothing.", rich_help_panel=OUTPUT),
    ] = None
