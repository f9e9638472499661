"""`mt tune grpo`: reinforcement learning on prompts, with rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.commands import host_of, need
from mt_core.errors import ConfigError, DataError, did_you_mean
from mt_tune.commands.options import DATA, LENGTH, AdapterOptions, OutputOptions, RecordOptions, TrainingOptions
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
    prompt_template_keys,
    rate_sections,
    training_sections,
    with_set_values,
)

if TYPE_CHECKING:
    from mt_core.config.schema import Config
    from mt_core.plugins import PluginHost
    from mt_tune.rl.prompts import Prompt

LR = 1e-6
GROUPS = 8
"""Prompts of a step by default."""
LARGEST_MICRO_BATCH = 8
EVALUATIONS = 10
"""Times that a run evaluates and saves by default."""
LOSS = "Loss"


@dataclass(frozen=True)
class RolloutOptions:
    """What is drawn, and how it is judged."""

    reward: Annotated[
        list[str] | None,
        typer.Option(
            help="A reward, repeatable: a registered name (mt plugins), FILE.py:FUNCTION of code that you trust, or "
            "the folder of a reward model."
        ),
    ] = None
    weight: Annotated[
        list[float] | None, typer.Option(help="Its factor in the sum, one for each --reward. Default: 1.")
    ] = None
    environment: Annotated[
        list[str] | None,
        typer.Option(
            help="The other side of conversations, repeatable: a registered name, or FILE.py:CLASS of code that you "
            "trust, as TRL's environment_factory."
        ),
    ] = None
    tool: Annotated[
        list[str] | None,
        typer.Option(help="FILE.py:FUNCTION that the model may call, of code that you trust; repeatable."),
    ] = None
    prompt_format: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            help="Prompts that are texts: complete them as they are (text), or make them a user's message "
            "(user_message).",
            rich_help_panel=DATA,
        ),
    ] = None
    group_size: Annotated[int | None, typer.Option(help="Completions of a prompt. Default: 8.", min=1)] = None
    max_completion_length: Annotated[int | None, typer.Option(help="Tokens of a completion. Default: 256.", min=1)] = (
        None
    )
    temperature: Annotated[float | None, typer.Option(help="Of sampling and of the loss. Default: 1.")] = None


@dataclass(frozen=True)
class PolicyOptions:
    """What is minimized."""

    algorithm: Annotated[
        str,
        typer.Option(
            help="grpo, dapo, dr_grpo, rloo, reinforce++, reinforce++-baseline, gspo, cispo, sapo, or ppo with a value "
            "model: keys of [rl] and the mean of the loss; --show has them.",
            rich_help_panel=LOSS,
        ),
    ] = "grpo"
    beta: Annotated[
        float | None, typer.Option(help="Weight of the divergence from MODEL. Default: 0.", rich_help_panel=LOSS)
    ] = None
    value_model: Annotated[
        str | None,
        typer.Option(
            help="Of ppo: a model that the value model starts from, such as a reward model. Default: MODEL.",
            rich_help_panel=LOSS,
        ),
    ] = None


@dataclass(frozen=True)
class LengthOptions(TrainingOptions):
    """How long and how fast is trained, with the defaults of completions."""

    epochs: Annotated[
        int | None, typer.Option(help="Times to go through the prompts. Default: 1.", min=1, rich_help_panel=LENGTH)
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(help="Completions of a step. Default: 8 prompts of them.", min=1, rich_help_panel=LENGTH),
    ] = None
    micro_batch_size: Annotated[
        int | None,
        typer.Option(help="Completions computed at once. Default: 1 to 8.", min=1, rich_help_panel=LENGTH),
    ] = None
    seq_length: Annotated[
        int | None,
        typer.Option(
            help="Positions of a prompt with its completion. Default: those of the longest.",
            min=8,
            rich_help_panel=LENGTH,
        ),
    ] = None


def grpo(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a checkpoint, a run or a preset.")],
    data: Annotated[list[str], typer.Argument(help="Prompts: JSON lines, JSON arrays or Parquet; files or patterns.")],
    records: RecordOptions,
    rollouts: RolloutOptions,
    policy: PolicyOptions,
    training: LengthOptions,
    adapter: AdapterOptions,
    output: OutputOptions,
) -> None:
    """Train a model by rewards of what it writes itself; --show prints the configuration."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", "mt-infer", command="mt tune grpo")
    training = with_set_values(training, training.set_, OPTION_OF)
    rollouts = with_set_values(rollouts, training.set_, ROLLOUT_OPTION_OF)
    host = host_of(context)
    preset, of_model = model_sections(model, host)
    base = merged(of_model, adapter_section(adapter), reward_sections(rollouts, host))
    data_keys = _data_keys(data, records, rollouts, prompt_template_keys(preset, of_model, host))
    examined = examine_prompts(host, preset, merged(base, {"data": data_keys}), training)
    prompts, validated = examined.prompts, examined.validated
    if not validated:
        data_keys["split"] = "100,0,0"
    rl = rl_section(with_completion_length(rollouts, examined), policy)
    size = rl.get("group_size", GROUP_SIZE)
    amounts = with_amounts(training, len(prompts), size)
    length = training_sections(amounts, Amount(len(prompts), output.nproc or 1))
    data_keys["seq_length"] = training.seq_length or _positions(examined, rl, rollouts)
    _require_room(examined, rl, data_keys["seq_length"])
    rates = rate_sections(amounts, base, length["train"]["train_iters"], lr=LR, own=preset is not None)
    sections = merged(base, {"data": data_keys}, length, intervals(length["train"]["train_iters"]), rates, {"rl": rl})
    sections = merged(sections, _mean_of_loss(policy.algorithm, sections["train"]["global_batch_size"], rl))
    train = sections["train"]
    typer.echo(
        f"{len(prompts)} prompts, {train['train_iters']} steps of {train['global_batch_size']} completions, {size} of "
        f"each prompt{'' if validated else '; nothing is held out'}",
        err=True,
    )
    carry_out(context, preset, sections, training, output, Path("runs") / f"{Path(model).resolve().name}-grpo")


GROUP_SIZE, MOST_TOKENS = 8, 256
ROLLOUT_OPTION_OF = {"rl.group_size": "group_size", "rl.max_completion_length": "max_completion_length"}
"""Keys from which others follow, and the options that set them."""
ALGORITHMS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "grpo": ({"advantage": "grpo"}, "sequences"),
    "dapo": ({"advantage": "grpo", "epsilon_high": 0.28, "dynamic_sampling": True}, "tokens"),
    "dr_grpo": ({"advantage": "dr_grpo"}, "constant"),
    "rloo": ({"advantage": "rloo", "kl_in": "reward"}, "constant"),
    "reinforce++": ({"advantage": "reinforce_plus_plus", "kl_in": "reward"}, "tokens"),
    "reinforce++-baseline": ({"advantage": "reinforce_plus_plus_baseline"}, "tokens"),
    "gspo": ({"advantage": "grpo", "loss": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4}, "sequences"),
    "cispo": ({"advantage": "grpo", "loss": "cispo"}, "tokens"),
    "ppo": ({"advantage": "gae", "group_size": 1, "kl_in": "reward"}, "tokens"),
    "sapo": ({"advantage": "grpo", "loss": "sapo"}, "sequences"),
}
"""Name -> keys of [rl], and train.loss_normalization."""


def rl_section(rollouts: RolloutOptions, policy: PolicyOptions) -> dict[str, Any]:
    if policy.algorithm not in ALGORITHMS:
        raise ConfigError(
            f"--algorithm {policy.algorithm}: it can be {', '.join(ALGORITHMS)}"
            f"{did_you_mean(policy.algorithm, ALGORITHMS)}"
        )
    options = {
        "group_size": rollouts.group_size,
        "max_completion_length": rollouts.max_completion_length,
        "temperature": rollouts.temperature,
        "beta": policy.beta,
        "value_model": policy.value_model,
    }
    keys = {**ALGORITHMS[policy.algorithm][0], **{key: value for key, value in options.items() if value is not None}}
    if policy.algorithm == "dapo":
        keys["overlong_buffer"] = keys.get("max_completion_length", MOST_TOKENS) // 5
    return keys


def _mean_of_loss(algorithm: str, batch: int, rl: Mapping[str, Any]) -> Tree:
    normalization = ALGORITHMS[algorithm][1]
    train: dict[str, Any] = {"loss": "policy", "batch_source": "rollouts", "loss_normalization": normalization}
    if normalization == "constant":
        # Dr. GRPO divides by the longest possible completions, RLOO by the number of completions.
        each = rl.get("max_completion_length", MOST_TOKENS) if algorithm == "dr_grpo" else 1
        train["loss_divisor"] = float(batch * each)
    return {"train": train}


def reward_sections(options: RolloutOptions, host: PluginHost) -> Tree:
    """Rewards, environments and tools. Raises ConfigError without any reward, and for one that is not there."""
    if not options.reward and not options.environment:
        raise ConfigError(
            "mt tune grpo needs --reward, which judges completions: a registered name (mt plugins lists them), or "
            "FILE.py:FUNCTION; or --environment, which may give rewards itself"
        )
    modules: list[str] = []
    folders = [text for text in options.reward or () if _is_folder(text, host)]
    models = {_model_label(text): text for text in folders}
    functions = [
        f"{_model_label(text)}=reward_model" if text in folders else _of_file("--reward", text, modules)
        for text in options.reward or ()
    ]
    rl = {
        "environments": [_of_file("--environment", text, modules) for text in options.environment or ()],
        "tools": [_of_file("--tool", text, modules) for text in options.tool or ()],
    }
    section: dict[str, Any] = {"functions": functions} if functions else {}
    section |= {"modules": modules} if modules else {}
    section |= {"options": {label: {"path": path} for label, path in models.items()}} if models else {}
    section |= {"weights": options.weight} if options.weight else {}
    _require_rewards(section, host)
    sections = {"rewards": section, "rl": {name: value for name, value in rl.items() if value}}
    return {name: keys for name, keys in sections.items() if keys}


_ALLOWED = {
    "--reward": "a reward is a registered name (mt plugins lists them), FILE.py:FUNCTION, or the folder of a reward "
    "model",
    "--environment": "an environment is a registered name (mt plugins lists them), or FILE.py:CLASS",
    "--tool": "a tool is FILE.py:FUNCTION",
}


def _model_label(folder: str) -> str:
    """Name of a reward model's metrics."""
    return Path(folder).resolve().name


def _is_folder(text: str, host: PluginHost) -> bool:
    """Whether a reward is the folder of a model; a folder of the name of a registered reward is written ./NAME."""
    from mt_tune.rewards.reward_specs import REWARDS

    return text not in host[REWARDS].names() and Path(text).is_dir()


def _require_rewards(section: Mapping[str, Any], host: PluginHost) -> None:
    """Raises ConfigError and PluginError as the run would; no code of the user's is executed."""
    from mt_tune.rewards.build import chosen_function
    from mt_tune.rewards.config import RewardsConfig

    keys = RewardsConfig(**section)
    for text in keys.functions:
        chosen_function(text, keys, host)


def _of_file(option: str, text: str, modules: list[str]) -> str:
    """FILE.py:NAME as module:NAME, with the file among the modules; other names as they are.

    Raises ConfigError for a path of nothing that is there. option: which names it.
    """
    labelled, _, name = text.rpartition(":")
    label, equals, file = labelled.rpartition("=")
    if text.endswith(".py"):
        raise ConfigError(f"{option} {text} names a file alone; write {text}:NAME, of what it has")
    if not file.endswith(".py"):
        if "/" in text:
            raise ConfigError(f"{option} {text}: there is no such folder; {_ALLOWED[option]}")
        return text
    if not Path(file).is_file():
        raise ConfigError(f"{option} {text}: there is no file {file}")
    if file not in modules:
        modules.append(file)
    return f"{label}{equals}{Path(file).stem}:{name}"


def _data_keys(
    data: list[str], records: RecordOptions, rollouts: RolloutOptions, template: Mapping[str, Any]
) -> dict[str, Any]:
    keys = data_section("prompts", data, records, template)
    return keys if rollouts.prompt_format is None else {**keys, "prompt_format": rollouts.prompt_format}


def with_amounts(options: TrainingOptions, prompts: int, group_size: int) -> TrainingOptions:
    """The options with a batch of whole groups, and the steps of all epochs over the prompts."""
    # Single completions are compared over the batch, which has as many of them.
    batch = options.batch_size or GROUPS * (group_size if group_size > 1 else GROUP_SIZE)
    divided = group_size if group_size > 1 else batch
    micro = options.micro_batch_size or max(size for size in range(1, LARGEST_MICRO_BATCH + 1) if divided % size == 0)
    if options.steps is not None:
        return replace(options, batch_size=batch, micro_batch_size=micro)
    steps = max((options.epochs or 1) * prompts * group_size // batch, 1)
    return replace(options, batch_size=batch, micro_batch_size=micro, steps=steps, epochs=None)


def _positions(examined: ExaminedPrompts, rl: Mapping[str, Any], rollouts: RolloutOptions) -> int:
    """Positions of the longest prompt with its completion. What environments and tools add to prompts is known when
    they are asked; rows are as long as they have to be, so that room for it costs nothing."""
    longest = max(len(prompt.tokens) for prompt in examined.prompts) + rl.get("max_completion_length", MOST_TOKENS) - 1
    if not (rollouts.environment or rollouts.tool):
        return -(-longest // 8) * 8
    room = longest + LONGEST
    return -(-room // 8) * 8 if examined.positions is None else min(-(-room // 8) * 8, examined.positions)


def _require_room(examined: ExaminedPrompts, rl: Mapping[str, Any], length: int) -> None:
    from mt_tune.rl.collecting import require_room
    from mt_tune.rl.config import RLConfig

    require_room(examined.prompts, RLConfig.model_validate(rl), length)


def intervals(steps: int) -> Tree:
    each = max(steps // EVALUATIONS, 1)
    return {"train": {"eval_interval": each}, "checkpoint": {"save_interval": each}}


@dataclass(frozen=True)
class ExaminedPrompts:
    """prompts: to train on. validated: whether others are held out. positions: the model's, or as many as --seq-length
    gives."""

    prompts: Sequence[Prompt]
    validated: bool
    positions: int | None


def with_completion_length(options: RolloutOptions, examined: ExaminedPrompts) -> RolloutOptions:
    """A model of few positions takes shorter completions by default: what the longest prompt leaves, the last token
    being no input."""
    if options.max_completion_length is not None or examined.positions is None:
        return options
    room = examined.positions + 1 - max(len(prompt.tokens) for prompt in examined.prompts)
    return replace(options, max_completion_length=room) if 0 < room < MOST_TOKENS else options


def examine_prompts(host: PluginHost, preset: str | None, sections: Tree, options: TrainingOptions) -> ExaminedPrompts:
    """Prompts to train on and to hold out; of few nothing is held out.

    Raises DataError for prompts that cannot be used and ConfigError for sections that cannot be.
    """
    from mt_core.config.loading import load_config
    from mt_core.data.building import build_tokenizer
    from mt_core.interfaces import SplitRequest
    from mt_tune.rl.config import prompt_data
    from mt_tune.rl.prompts import build_prompts, prompts_of

    def loaded(keys: Tree) -> Config:
        # The length of rows follows from the prompts; a default may be longer than the model.
        whole = merged({"data": {"seq_length": 8}}, keys, {"train": {"train_iters": 1}})
        return load_config(preset=preset, sections=whole, overrides=data_overrides, host=host).config

    def read(split: Any, config: Config) -> list[Prompt]:
        longest = options.seq_length or positions_of(config.model) or LONGEST
        request = SplitRequest(split, None, longest, config.train.seed)
        built = build_prompts(prompt_data(config), build_tokenizer(config, host), request)
        sets = built.values() if isinstance(built, Mapping) else [built]
        return [prompt for dataset in sets if dataset is not None for prompt in prompts_of(dataset)]

    data_overrides = [text for text in options.set_ or () if text.startswith(("data.", "tokenizer.", "model."))]
    config, reason = loaded(sections), ""
    try:
        held_out = bool(read("valid", config))
    except DataError as error:
        held_out, reason = False, str(error)
    if not held_out and "split" in sections["data"]:
        config = loaded(merged(sections, {"data": {"split": "100,0,0"}}))
    prompts = read("train", config)
    # Whatever is wrong with a record was raised here again.
    if reason:
        typer.echo(f"nothing is held out to evaluate on: {reason}", err=True)
    return ExaminedPrompts(prompts, held_out, options.seq_length or positions_of(config.model))
