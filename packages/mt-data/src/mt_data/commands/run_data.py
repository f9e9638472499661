"""`mt data build-index`, `preview` and `where`: the data sets of a run, as training builds them. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.data.building import build_datasets, build_tokenizer
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Dataset, Split, Tokenizer
from mt_core.specs import DATASETS
from mt_core.wording import counted
from mt_data.datasets.splits import SPLITS

if TYPE_CHECKING:
    from mt_core.config.schema import Config
    from mt_core.plugins import PluginHost


ConfigArgument = Annotated[Path | None, typer.Argument(help="TOML or JSON file, as for mt train.", show_default=False)]
PresetOption = Annotated[str | None, typer.Option(help="Values to start from; mt models lists presets.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; repeatable.")
]
SplitOption = Annotated[str, typer.Option(help="train, valid or test.")]


SECTIONS = ("tokenizer", "data", "parallel", "train")
"""Sections of the configuration that decide which samples a run sees."""


@dataclass(frozen=True)
class RunData:
    """A configuration (of SECTIONS alone) with its tokenizer."""

    config: Config
    tokenizer: Tokenizer
    host: PluginHost

    def build(self, split: Split) -> Mapping[str, Dataset]:
        """The data sets of a split by name, with as many samples as the run takes; empty without data."""
        return build_datasets(self.config, self.tokenizer, split, self.host)

    def build_one(self, split: str, name: str | None = None) -> Dataset:
        """One data set; name chooses among several validation sets. Raises when there is none."""
        datasets = self.build(checked_split(split))
        if not datasets:
            raise DataError(f"this configuration has no data for the {split} split; see data.split and its like")
        if name is None and len(datasets) == 1:
            return next(iter(datasets.values()))
        if name is None or name not in datasets:
            hint = f"--name {name} is not one of" if name else "choose with --name one of"
            raise ConfigError(f"the {split} split has several sets; {hint} {', '.join(datasets)}")
        return datasets[name]


def load_run_data(config: Path | None, preset: str | None, overrides: list[str] | None) -> RunData:
    """Read what decides the data of a run, and build its tokenizer. Raises ConfigError.

    The other sections are not looked at: no model family need be installed.
    """
    from mt_core.config.loading import load_sections
    from mt_core.plugins import load_plugins

    if config is None and preset is None:
        raise ConfigError("give a configuration file, or --preset NAME")
    host = load_plugins()
    loaded = load_sections(SECTIONS, config, preset=preset, overrides=overrides or (), host=host)
    _check_number_of_samples(loaded)
    return RunData(loaded, build_tokenizer(loaded, host), host)


def _check_number_of_samples(config: Config) -> None:
    """Raises ConfigError when the configuration does not say how many samples the run takes."""
    from mt_core.config.checks import check_duration, global_batch_size, world_size

    check_duration(config)
    if global_batch_size(config) == 0:
        raise ConfigError(
            f"the run divides its model over more processes than there are here ({world_size()}), so that its batch "
            "size, and with it the number of samples, is not known: set train.global_batch_size"
        )


def checked_split(split: str) -> Split:
    """One of the three splits; ConfigError otherwise."""
    if split not in SPLITS:
        raise ConfigError(f"--split {split} must be train, valid or test")
    # The element of SPLITS, which has the literal type that `build_datasets` requires.
    return SPLITS[SPLITS.index(split)]


def checked_sample(dataset: Dataset, number: int, split: str) -> int:
    """A number of a sample that exists; DataError otherwise."""
    if not 0 <= number < len(dataset):
        raise DataError(f"there is no sample {number}; the {split} split has samples 0 to {len(dataset) - 1}")
    return number


# -- build-index -------------------------------------------------------------------------------------


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
            typer.echo(f"{title}: {counted(len(dataset), 'sample')}, {seconds:.2f} s")
        if not built:
            typer.echo(f"{wanted}: no data")


# -- preview -----------------------------------------------------------------------------------------


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
    from mt_data.commands.display import render_sample

    data = load_run_data(config, preset, set_)
    dataset = data.build_one(split, name)
    checked_sample(dataset, first, split)
    fields = data.host[DATASETS].get(data.config.data.dataset_type, key="data.dataset_type").sample
    count = samples or min(4, global_batch_size(data.config))
    console = Console(highlight=False)
    for index in range(first, min(first + count, len(dataset))):
        console.print(f"sample {index}: {dataset.describe(index)}", style="bold", markup=False)
        console.print(render_sample(dataset[index], fields, data.tokenizer, max_tokens))
        console.print()


# -- where -------------------------------------------------------------------------------------------


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
