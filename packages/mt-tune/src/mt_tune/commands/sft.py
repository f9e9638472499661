"""`mt tune sft`: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.commands import host_of, need
from mt_core.errors import DataError
from mt_tune.commands.options import DATA, AdapterOptions, OutputOptions, RecordOptions, TrainingOptions
from mt_tune.commands.recipe import (
    LONGEST,
    OPTION_OF,
    Amount,
    Tree,
    adapter_section,
    carry_out,
    data_section,
    merged,
    model_sections,
    positions_of,
    rate_sections,
    template_keys,
    training_sections,
    with_set_values,
)

if TYPE_CHECKING:
    from mt_core.config.schema import Config
    from mt_core.interfaces import Dataset, Split
    from mt_core.plugins import PluginHost

LR = 2e-5
LOSS = "Loss"
UNKNOWN_STEPS = 1_000_000


@dataclass(frozen=True)
class DataOptions(RecordOptions):
    """What the records are."""

    record_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="auto, messages, prompt-completion, sharegpt, alpaca or text.",
            rich_help_panel=DATA,
        ),
    ] = "auto"
    train_on: Annotated[
        str, typer.Option(help="answers, last_answer or all: which tokens count.", rich_help_panel=DATA)
    ] = "answers"
    split_answers: Annotated[
        bool, typer.Option("--split-answers", help="Each answer is a sample of its own.", rich_help_panel=DATA)
    ] = False
    packing: Annotated[bool, typer.Option(help="Several records in a sample.", rich_help_panel=DATA)] = True


@dataclass(frozen=True)
class LossOptions:
    """What is minimized."""

    loss: Annotated[
        str | None, typer.Option(help="dft: dynamic fine-tuning. Default: cross entropy.", rich_help_panel=LOSS)
    ] = None
    mean_over: Annotated[
        str,
        typer.Option(help="tokens of the global batch, or sequences, each by its mean.", rich_help_panel=LOSS),
    ] = "tokens"
    neftune_alpha: Annotated[
        float | None, typer.Option(help="Noise on embeddings (NEFTune), usually 5 to 15.", rich_help_panel=LOSS)
    ] = None


def sft(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a checkpoint, a run or a preset.")],
    data: Annotated[list[str], typer.Argument(help="JSON lines, JSON arrays or Parquet; files or patterns.")],
    records: DataOptions,
    losses: LossOptions,
    training: TrainingOptions,
    adapter: AdapterOptions,
    output: OutputOptions,
) -> None:
    """Train a model on instructions, with defaults that learn; --show prints the configuration."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt tune sft")
    training = with_set_values(training, training.set_, OPTION_OF)
    host = host_of(context)
    preset, of_model = model_sections(model, host)
    base = merged(of_model, adapter_section(adapter), _loss_sections(losses))
    of_data = data_sections(data, records, template_keys(preset, of_model, host))
    examined = examine(host, preset, merged(base, of_data), training, output.nproc or 1)
    length = training_sections(training, Amount(examined.samples, output.nproc or 1))
    rates = rate_sections(training, base, length["train"]["train_iters"], lr=LR, own=preset is not None)
    sections = merged(base, {"data": examined.data}, length, rates)
    typer.echo(summary(examined, sections), err=True)
    carry_out(context, preset, sections, training, output, Path("runs") / f"{Path(model).resolve().name}-sft")


def data_sections(data: list[str], options: DataOptions, template: Mapping[str, Any]) -> Tree:
    section = data_section("sft", data, options, template)
    changed = {
        "record_format": (options.record_format, "auto"),
        "train_on": (options.train_on, "answers"),
        "split_answers": (options.split_answers, False),
        "packing": (options.packing, True),
    }
    return {"data": section | {key: value for key, (value, default) in changed.items() if value != default}}


def _loss_sections(options: LossOptions) -> Tree:
    train = {} if options.loss is None else {"loss": options.loss}
    train |= {} if options.mean_over == "tokens" else {"loss_normalization": options.mean_over}
    tune = {} if options.neftune_alpha is None else {"neftune_noise_alpha": options.neftune_alpha}
    return {name: keys for name, keys in (("train", train), ("tune", tune)) if keys}


# -- what the data are -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Examined:
    """data: the section, with its split and length. samples: of one epoch. validated: whether some are held out."""

    data: dict[str, Any]
    samples: int
    validated: bool


def examine(host: PluginHost, preset: str | None, sections: Tree, options: TrainingOptions, ranks: int) -> Examined:
    """Encode the data, which the run then finds in the cache. Without enough records nothing is held out.

    Raises DataError for records that cannot be used and ConfigError for sections that cannot be.
    """
    config = loaded_config(host, preset, merged(sections, {"data": {"seq_length": 8}}), options, ranks)
    longest = positions_of(config.model) or LONGEST
    length = {"seq_length": options.seq_length or min(LONGEST, longest)}
    data = {**sections["data"], **length}
    config = loaded_config(host, preset, merged(sections, {"data": data}), options, ranks)
    reason = None
    if "split" in data and data["split"] != "100,0,0" and (reason := _nothing_held_out(config, host)) is not None:
        data["split"] = "100,0,0"
        config = loaded_config(host, preset, merged(sections, {"data": data}), options, ranks)
    dataset = built_dataset(config, "train", host)
    if dataset is None:
        raise DataError("the data have no records to train on")
    # An empty split alone: whatever is wrong with records was raised by the training set.
    if reason:
        typer.echo(f"nothing is held out to evaluate on: {reason}", err=True)
    return Examined(data, len(dataset), data.get("split") != "100,0,0")


def loaded_config(host: PluginHost, preset: str | None, sections: Tree, options: TrainingOptions, ranks: int) -> Config:
    from mt_core.config.checks import as_world
    from mt_core.config.loading import load_config

    # Many steps, where their number is not known yet, so that a warm-up of --set is none of the whole run.
    whole = merged(sections, {"train": {"train_iters": options.steps or UNKNOWN_STEPS}})
    with as_world(ranks):
        return load_config(preset=preset, sections=whole, overrides=options.set_ or (), host=host).config


def built_dataset(config: Config, split: Split, host: PluginHost) -> Dataset | None:
    from mt_core.data.building import build_tokenizer
    from mt_core.interfaces import SplitRequest
    from mt_core.specs import DATASETS

    spec = host[DATASETS].get(config.data.dataset_type, key="data.dataset_type")
    request = SplitRequest(split, None, config.data.seq_length, config.train.seed)
    built = spec.build.load()(config.data, build_tokenizer(config, host), request)
    return next(iter(built.values()), None) if isinstance(built, Mapping) else built


def _nothing_held_out(config: Config, host: PluginHost) -> str | None:
    """None where there are samples to evaluate on; else why not, or "" without a reason."""
    try:
        return None if built_dataset(config, "valid", host) else ""
    except DataError as error:
        return str(error)


def summary(examined: Examined, sections: Tree) -> str:
    train, length = sections["train"], examined.data["seq_length"]
    held = "" if examined.validated else "; nothing is held out"
    return (
        f"{examined.samples} samples of {length} positions, {train['train_iters']} steps of "
        f"{train['global_batch_size']} samples ({train['micro_batch_size']} at once){held}"
    )
