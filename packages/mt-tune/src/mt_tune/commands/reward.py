"""`mt tune reward`: a reward model from pairs of answers, or from steps of answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mt_core.commands import host_of, need
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_tune.commands.options import DATA, AdapterOptions, OutputOptions, RecordOptions, TrainingOptions
from mt_tune.commands.recipe import (
    OPTION_OF,
    TEMPLATE_KEYS,
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

LR = 1e-5
LOSS = "Loss"
LM_HEAD = "output_layer.*"


@dataclass(frozen=True)
class RewardOptions:
    """What is scored."""

    process: Annotated[
        bool,
        typer.Option("--process", help="Judge steps of answers (prompt, completions, labels).", rich_help_panel=DATA),
    ] = False
    step_separator: Annotated[
        str | None, typer.Option(help="Text behind each step. Default: a newline.", rich_help_panel=DATA)
    ] = None
    center: Annotated[
        float | None,
        typer.Option(help="Weight of (r_chosen + r_rejected)^2, which holds rewards around 0.", rich_help_panel=LOSS),
    ] = None


def reward(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a checkpoint, a run or a preset.")],
    data: Annotated[list[str], typer.Argument(help="Pairs, or answers in steps with --process; files or patterns.")],
    records: RecordOptions,
    options: RewardOptions,
    training: TrainingOptions,
    adapter: AdapterOptions,
    output: OutputOptions,
) -> None:
    """Train a reward model: a score of an answer (Bradley-Terry over pairs), or of each of its steps."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt tune reward")
    training = with_set_values(training, training.set_, OPTION_OF)
    host = host_of(context)
    preset, of_model = model_sections(model, host)
    base = merged(of_model, _without_lm_head(of_model, host), adapter_section(adapter), reward_sections(options))
    ranks = output.nproc or 1
    dataset = "process_reward" if options.process else "reward"
    data_keys = data_section(dataset, data, records, template_keys(preset, of_model, host))
    if options.process:
        data_keys = {key: value for key, value in data_keys.items() if key not in TEMPLATE_KEYS}
    examined = examine(host, preset, merged(base, {"data": {**data_keys, **base.get("data", {})}}), training, ranks)
    length = training_sections(training, Amount(examined.samples, ranks))
    rates = rate_sections(training, base, length["train"]["train_iters"], lr=LR, own=preset is not None)
    sections = merged(base, {"data": examined.data}, length, rates)
    train = sections["train"]
    typer.echo(
        f"{examined.samples} samples of {examined.data['seq_length']} positions, {train['train_iters']} steps of "
        f"{train['global_batch_size']}{'' if examined.validated else '; nothing is held out'}",
        err=True,
    )
    carry_out(context, preset, sections, training, output, Path("runs") / f"{Path(model).resolve().name}-reward")


def reward_sections(options: RewardOptions) -> Tree:
    if options.process and options.center is not None:
        raise ConfigError("--center is of rewards of whole answers; leave it out with --process")
    if options.step_separator is not None and not options.process:
        raise ConfigError("--step-separator stands between steps of answers; add --process")
    head: dict[str, Any] = {"type": "token" if options.process else "sequence"}
    if options.center is not None:
        head["center_rewards_coefficient"] = options.center
    sections: Tree = {"train": {"loss": "process_reward" if options.process else "reward"}, "score_head": head}
    return (
        sections if options.step_separator is None else {**sections, "data": {"step_separator": options.step_separator}}
    )


def _without_lm_head(of_model: Tree, host: PluginHost) -> Tree:
    """Leaves out an LM head that the checkpoint has and the reward model has not."""
    load = of_model.get("checkpoint", {}).get("load")
    if load is None:
        return {}
    from mt_core.checkpoint_lookup import MODEL, open_start

    has_head = any(name.startswith(f"{MODEL}output_layer.") for name in open_start(load, host).shapes())
    return {"checkpoint": {"load_ignored": [LM_HEAD]}} if has_head else {}
