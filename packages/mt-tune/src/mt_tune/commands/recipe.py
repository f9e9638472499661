"""From a model, data and options to a configuration of `mt train`, which is printed, written or trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from mt_core.commands import host_of
from mt_core.config.files import to_toml
from mt_core.config.sources import find_preset, installed_presets, parse_override
from mt_core.errors import ConfigError, MtError, did_you_mean
from mt_core.plugins import PluginHost
from mt_core.specs import COMMANDS, TRAINED_TEMPLATE
from mt_tune.commands.options import AdapterOptions, OutputOptions, RecordOptions, TrainingOptions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Tree = dict[str, dict[str, Any]]
WRITTEN = "tune.toml"
"""File of the run directory with the configuration that the command line stands for."""
LONGEST = 1024
"""Positions of a sample by default, as in TRL."""
EPOCHS = 3
ADAPTER_FACTOR = 10
"""An adapter takes ten times the learning rate of the whole model, whatever its rank."""


def model_sections(model: str, host: PluginHost) -> tuple[str | None, Tree]:
    """(preset, sections) for a preset, a Hugging Face folder, a checkpoint or a run, whose adapter is trained on.

    Raises ConfigError for no such.
    """
    if Path(model).exists():
        start: Tree = {"checkpoint": {"load": model}}
        return None, merged(start, adapter_of_checkpoint(model, host))
    presets, _ = installed_presets(host)
    if model in presets:
        find_preset(model, host)  # refuses a name that two plugins bring
        return model, {}
    raise ConfigError(
        f"MODEL {model} is neither a folder (of Hugging Face's format, a checkpoint or a run) nor a preset"
        f"{did_you_mean(model, presets)}; mt models lists the presets"
    )


def adapter_of_checkpoint(model: str, host: PluginHost) -> Tree:
    """The section [adapter] of a checkpoint that has one, with the keys that are not defaults; its values are those of
    the checkpoint."""
    from mt_core.checkpoint_lookup import open_start
    from mt_tune.adapters.config import AdapterConfig

    stored = open_start(model, host).metadata["config"].get("adapter") or {}
    if stored.get("type", "none") == "none":
        return {}
    keys = AdapterConfig.model_validate({**stored, "load": None}).model_dump(exclude_defaults=True)
    return {"adapter": keys}


OPTION_OF = {
    "train.train_iters": "steps",
    "train.global_batch_size": "batch_size",
    "train.micro_batch_size": "micro_batch_size",
    "data.seq_length": "seq_length",
}
"""Keys from which others follow, and the options that set them."""
OptionsT = TypeVar("OptionsT", bound="DataclassInstance")


def with_set_values(options: OptionsT, texts: Sequence[str] | None, option_of: Mapping[str, str]) -> OptionsT:
    """The options with the values that --set gives their keys, so that what is derived from them (warm-up, intervals,
    batches, the summary) is that of the run."""
    values = {".".join(path): value for path, value in map(parse_override, texts or ())}
    changed = {option_of[key]: value for key, value in values.items() if key in option_of and value is not None}
    return replace(options, **changed)


def positions_of(model: object) -> int | None:
    """The positions of a model, by its section of the configuration."""
    keys = ("max_sequence_length", "max_position_embeddings")
    return next((number for key in keys if (number := getattr(model, key, None))), None)


@dataclass(frozen=True)
class Amount:
    """What a training set has. samples: of one epoch."""

    samples: int
    ranks: int = 1

    def batch_size(self, options: TrainingOptions, epochs: int) -> int:
        """16 samples, or as many as make 60 steps of all epochs; at least one for each process."""
        if options.batch_size is not None:
            return options.batch_size
        return max(self.ranks * _power_of_two(min(16, self.samples * epochs // 60) // self.ranks), self.ranks)

    def micro_batch_size(self, options: TrainingOptions, batch: int) -> int:
        if options.micro_batch_size is not None:
            return options.micro_batch_size
        each = max(batch // self.ranks, 1)
        return max(size for size in (1, 2, 4) if each % size == 0)


def _power_of_two(number: int) -> int:
    """The largest one that is not above `number`, at least 1."""
    return 1 << max(number, 1).bit_length() - 1


def template_keys(preset: str | None, of_model: Tree, host: PluginHost) -> dict[str, Any]:
    """Keys of [data] for the chat template that the model was trained with; none where it is that of its tokenizer.
    A preset's tokenizer brings no chat template: its conversations are plain."""
    if preset is not None:
        return {"chat_template": "plain"}
    from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint

    path = find_checkpoint(of_model["checkpoint"]["load"])
    reader = open_checkpoint(path, host)
    if TRAINED_TEMPLATE not in reader.files():
        return {}
    stored = reader.metadata["config"].get("data", {})
    keys = {name: stored[name] for name in TEMPLATE_KEYS if stored.get(name) is not None}
    # The run's file may have been moved or changed since; the checkpoint has what was trained.
    copy = Path(path) / "files" / TRAINED_TEMPLATE
    if "chat_template_file" in keys and copy.is_file():
        keys["chat_template_file"] = str(copy)
    return {name: value for name, value in keys.items() if (name, value) != ("chat_template", "tokenizer")}


def prompt_template_keys(preset: str | None, of_model: Tree, host: PluginHost) -> dict[str, Any]:
    """The same as `template_keys`, for prompts: those of a preset, whose weights are random, may be plain texts, and so
    may those of a model that was tuned from one, whose template was no choice."""
    keys = {} if preset is not None else template_keys(preset, of_model, host)
    return {**keys, "prompt_format": "text"} if keys.get("chat_template") == "plain" else keys


TEMPLATE_KEYS = ("chat_template", "chat_template_file", "eod_after_answer")


def data_section(
    dataset_type: str, data: list[str], options: RecordOptions, template: Mapping[str, Any]
) -> dict[str, Any]:
    """Keys of [data]. template: those of the chat template without --template."""
    section: dict[str, Any] = {"dataset_type": dataset_type}
    if options.valid:
        section |= {"train_data_path": data, "valid_data_path": options.valid}
    else:
        section |= {"data_path": data, "split": f"{100 - options.hold_out},{options.hold_out},0"}
    if options.template is None:
        return {**section, **template}
    key = "chat_template_file" if Path(options.template).is_file() else "chat_template"
    return {**section, key: options.template}


def training_sections(options: TrainingOptions, amount: Amount) -> Tree:
    """Length and batches; the run evaluates and saves once an epoch."""
    if options.epochs is not None and options.steps is not None:
        raise ConfigError("--epochs and --steps both say how long to train; keep one of them")
    epochs = options.epochs or EPOCHS
    batch = amount.batch_size(options, epochs)
    steps = options.steps or max(amount.samples * epochs // batch, 1)
    each_epoch = min(max(amount.samples // batch, 1), steps)
    train = {
        "micro_batch_size": amount.micro_batch_size(options, batch),
        "global_batch_size": batch,
        "train_iters": steps,
        "eval_interval": each_epoch,
        "full_validation": True,
        "sample_prompt": "",
    }
    return {
        "train": train,
        "checkpoint": {"save_interval": each_epoch, "keep_last": 2},
        "precision": {"dtype": _dtype()},
    }


def rate_sections(options: TrainingOptions, base: Tree, steps: int, *, lr: float, own: bool) -> Tree:
    """The optimizer and its schedule. base: what is trained. lr: of the whole model by default. own: the model is a
    preset, whose weights are random and which has rates of its own."""
    if own:
        return {} if options.lr is None else {"optimizer": {"lr": options.lr}}
    rate = options.lr if options.lr is not None else lr * (ADAPTER_FACTOR if base.get("adapter") else 1)
    return {
        "optimizer": {"lr": rate, "min_lr": 0.0, "weight_decay": 0.0},
        # A warm-up leaves at least one step, also of a run of one.
        "lr_schedule": {"lr_decay_style": "cosine", "lr_warmup_iters": min(-(-steps * 3 // 100), steps - 1)},
    }


def _dtype() -> str:
    import torch

    return "bf16" if torch.cuda.is_available() else "fp32"


def adapter_section(options: AdapterOptions) -> Tree:
    if options.adapter is None:
        if options.rank is not None or options.alpha is not None:
            raise ConfigError("--rank and --alpha are those of an adapter; add --adapter lora")
        return {}
    section: dict[str, Any] = {"type": options.adapter}
    if options.rank is not None:
        section["rank"] = options.rank
    if options.alpha is not None or (options.rank is not None and options.adapter in ("lora", "dora")):
        section["alpha"] = options.alpha if options.alpha is not None else 2.0 * (options.rank or 0)
    return {"adapter": section}


def merged(*trees: Mapping[str, Mapping[str, Any]]) -> Tree:
    """Sections key by key; later trees win."""
    result: Tree = {}
    for tree in trees:
        for name, keys in tree.items():
            result[name] = {**result.get(name, {}), **keys}
    return result


def with_overrides(sections: Tree, texts: Sequence[str]) -> Tree:
    """The sections with the values of --set. Raises ConfigError for a path below a key, which a file writes itself."""
    for text in texts:
        (section, key, *inner), value = parse_override(text)
        if inner:
            raise ConfigError(f"--set {text} changes one entry of a table, which cannot be printed; add it to the file")
        sections = merged(sections, {section: {key: value}})
    return sections


def as_toml(preset: str | None, sections: Mapping[str, Mapping[str, Any]]) -> str:
    """A configuration file. Raises ConfigError for a key without a value, which TOML does not have."""
    lines = [f"preset = {to_toml(preset)}"] if preset is not None else []
    for name, keys in sections.items():
        if missing := [key for key, value in keys.items() if value is None]:
            raise ConfigError(f"{name}.{missing[0]}=null cannot be written in TOML; give it on the command line alone")
        lines += ["", f"[{name}]", *(f"{key} = {to_toml(value)}" for key, value in keys.items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def carry_out(
    context: typer.Context,
    preset: str | None,
    sections: Tree,
    options: TrainingOptions,
    output: OutputOptions,
    run_dir: Path,
) -> None:
    """Print the configuration, write it, or train as `mt train` does. run_dir: unless an option names another."""
    overrides = list(options.set_ or [])
    if output.show or output.output is not None:
        require_valid(host_of(context), preset, sections, overrides, output.nproc or 1)
        text = as_toml(preset, with_overrides(sections, overrides))
        if output.output is not None:
            output.output.write_text(text, encoding="utf-8")
        else:
            typer.echo(text, nl=False)
        return
    directory = output.run_dir or run_dir
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / WRITTEN
    before = path.read_text(encoding="utf-8") if path.exists() else None
    path.write_text(as_toml(preset, sections), encoding="utf-8")
    train = host_of(context)[COMMANDS].get("train", key="mt tune").app.load()
    try:
        train(context, config=path, run_dir=directory, set_=overrides, nproc=output.nproc)
    except MtError:
        _take_back(path, before)
        raise


def require_valid(host: PluginHost, preset: str | None, sections: Tree, overrides: Sequence[str], ranks: int) -> None:
    """Raises ConfigError for what `mt train` would refuse before it builds anything."""
    from mt_core.config.checks import as_world
    from mt_core.config.loading import load_config

    with as_world(ranks):
        load_config(preset=preset, sections=sections, overrides=overrides, host=host)


def _take_back(path: Path, before: str | None) -> None:
    """After a refusal: the file of a run that is there already is what it was, and no folder without a run remains."""
    if before is not None:
        path.write_text(before, encoding="utf-8")
    elif [entry.name for entry in path.parent.iterdir()] == [path.name]:
        path.unlink()
        path.parent.rmdir()
