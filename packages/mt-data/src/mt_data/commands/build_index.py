"""`mt data build-index`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from mt_data.commands.run_data import ConfigArgument, PresetOption, SetOption, checked_split, load_run_data
from mt_data.datasets.splits import SPLITS


def build_index(
    config: ConfigArgument = None,
    preset: PresetOption = None,
    set_: SetOption = None,
    split: Annotated[list[str] | None, typer.Option(help="Only this split; repeatable. Default: all three.")] = None,
) -> None:
    """Build the sample indices of a run ahead of it, into the cache folder, on a machine without GPUs.

    The run must use the same number of samples: set train.global_batch_size, which else depends on the
    number of processes.
    """
    data = load_run_data(config, preset, set_)
    for wanted in map(checked_split, split or SPLITS):
        start = time.perf_counter()
        built = data.build(wanted)
        seconds = time.perf_counter() - start
        for name, dataset in built.items():
            title = wanted if name == wanted else f"{wanted} {name}"
            typer.echo(f"{title}: {len(dataset):,} samples, {seconds:.2f} s")
        if not built:
            typer.echo(f"{wanted}: no data")
