"""`mt data preview`."""

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


def preview(
    config: ConfigArgument = None,
    preset: PresetOption = None,
    set_: SetOption = None,
    split: SplitOption = "train",
    name: Annotated[str | None, typer.Option(help="One of several validation sets.")] = None,
    first: Annotated[int, typer.Option(min=0, help="First sample, from 0, in the order of training.")] = 0,
    samples: Annotated[
        int | None, typer.Option(min=1, help="How many samples. Default: one global batch, at most 4.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens shown of each sample.")] = 512,
) -> None:
    """Show samples as the model will see them: text, what counts in the loss, and where documents end."""
    from rich.console import Console

    from mt_core.config.checks import global_batch_size
    from mt_data.datasets.display import render_sample

    data = load_run_data(config, preset, set_)
    dataset = data.build_one(split, name)
    checked_sample(dataset, first, split)
    fields = data.host.datasets.get(data.config.data.dataset_type, key="data.dataset_type").sample
    count = samples or min(4, global_batch_size(data.config))
    console = Console(highlight=False)
    for index in range(first, min(first + count, len(dataset))):
        console.print(f"sample {index}: {dataset.describe(index)}", style="bold", markup=False)
        console.print(render_sample(dataset[index], fields, data.tokenizer, max_tokens))
        console.print()
