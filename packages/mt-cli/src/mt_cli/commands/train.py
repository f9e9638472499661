"""`mt train`, in one process or in those of a launcher."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.commands import REST_OF_LINE, host_of, need
from mt_core.errors import CheckpointError, ConfigError
from mt_core.launch.environment import read_environment
from mt_core.plugins import PluginHost, load_plugins
from mt_core.specs import COMMANDS
from mt_core.wording import counted

if TYPE_CHECKING:
    from mt_core.config.loading import LoadedConfig
    from mt_core.config.schema import Config
    from mt_core.train.trainer import Trainer, TrainResult


# -- several processes -------------------------------------------------------------------------------


@contextmanager
def world_of_launcher() -> Iterator[None]:
    """The world that torchrun, srun or `mt train --nproc` put this process in, by torchrun's variables."""
    from mt_core.launch.environment import read_environment

    environment = read_environment()
    if environment.world_size > 1:
        # srun sets variables of its own names; everything behind reads torchrun's. Not undone: this process is that
        # rank.
        os.environ.update(environment.variables())
    yield


def rank_arguments(config: Path | None, preset: str | None, settings: Sequence[str], run_dir: Path) -> list[str]:
    """The arguments of `mt` for each rank: the same training, without what concerns launching."""
    arguments = ["train", *([str(config)] if config is not None else [])]
    arguments += ["--preset", preset] if preset is not None else []
    arguments += [part for setting in settings for part in ("--set", setting)]
    # Always given, so that the launcher and all ranks use one folder.
    return [*arguments, "--run-dir", str(run_dir)]


def describe_launch(
    config: Config, nnodes: int, nproc: int, arguments: Sequence[str], master: tuple[str | None, int | None]
) -> str:
    """The ranks by axes, and each machine's command. master: address and port of the first machine, None by default."""
    from mt_core.launch.layout import describe
    from mt_core.train.build import axis_sizes, resolve_device

    device = resolve_device(config.train.device)
    return describe(axis_sizes(config), nnodes, nproc, arguments=arguments, master=master, device_type=device.type)


def draw_launch(config: Config, world_size: int, path: Path) -> None:
    """The ranks by axes as a picture."""
    from mt_core.parallel.plot import draw_layout
    from mt_core.train.build import axis_sizes

    path.write_text(draw_layout(axis_sizes(config), world_size), encoding="utf-8")


DEFAULT_PRESET = "gpt-tiny"


STARTED_BY_UV = "UV"
"""Set by `uv run`, which also puts the environment's commands on the PATH of what it starts."""
TRANSLATED = "from-megatron.json"
"""File of the run directory with the configuration that --megatron-args stands for."""
MACHINES = "Several processes"
CONVERSION = "Converting instead of training"


def train(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="TOML, YAML or JSON file, or a preset.", show_default=False)
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Values to start from; mt models lists presets.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; repeatable.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: runs/ and the name of the file or preset.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes to start on this machine.", min=1, rich_help_panel=MACHINES)
    ] = None,
    nnodes: Annotated[int, typer.Option(help="Machines of the job.", min=1, rich_help_panel=MACHINES)] = 1,
    node_rank: Annotated[
        int, typer.Option(help="Number of this machine, from 0.", min=0, rich_help_panel=MACHINES)
    ] = 0,
    master_addr: Annotated[
        str | None,
        typer.Option(
            help="Name or address of the first machine. Default: this machine, if it is the only one.",
            show_default=False,
            rich_help_panel=MACHINES,
        ),
    ] = None,
    master_port: Annotated[
        int | None, typer.Option(help="A free port on it. Default: any, for one machine.", rich_help_panel=MACHINES)
    ] = None,
    trace_schedule: Annotated[
        Path | None,
        typer.Option(help="Write what ran when on each pipeline stage: .svg or .json.", rich_help_panel=MACHINES),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="With --dry-run: draw the layout into this .svg.", rich_help_panel=MACHINES)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the ranks and each machine's command.", rich_help_panel=MACHINES)
    ] = False,
    megatron_args: Annotated[
        list[str] | None,
        typer.Option(
            "--megatron-args",
            metavar=REST_OF_LINE,
            help="Train what these arguments of Megatron-LM say, as mt import translates them: the rest of the line.",
        ),
    ] = None,
    ckpt_convert_format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Write the checkpoint that this run would load in this format, and exit.",
            rich_help_panel=CONVERSION,
        ),
    ] = None,
    ckpt_convert_save: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The directory that it is written to.", rich_help_panel=CONVERSION),
    ] = None,
) -> None:
    """Train a model. Without arguments: a small GPT on the text that Python carries, in about a minute."""
    # Before any import of torch: a missing package is a sentence, not a traceback.
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt train")
    host = load_plugins()
    if megatron_args is not None:
        run_dir = run_dir or Path("runs/megatron")
        config = translate_arguments(context, megatron_args, config, preset, run_dir)
    if not dry_run:
        _announce(config, preset)
    # After the announcement, since these imports lead to torch.
    from mt_core.config.checks import as_world
    from mt_core.config.loading import load_config
    from mt_core.train.reporting.warning_log import LoggedWarnings

    set_ = list(set_ or [])
    if trace_schedule is not None:
        set_.append(f"logging.trace_schedule={json.dumps(str(trace_schedule))}")
    # Two roles of this command: the launcher, which starts `mt train` once for each rank and trains nothing itself, and
    # a rank, alone or started by a launcher. A launcher checks the configuration for the world that it is about to
    # start.
    launched, warnings = nproc is not None or dry_run, list[str]()
    with as_world((nproc or 1) * nnodes) if launched else world_of_launcher():
        with LoggedWarnings(warnings.append):
            loaded = load_config(config, preset=preset, overrides=set_, host=host, default_preset=DEFAULT_PRESET)
        directory = run_dir or Path("runs") / _name_of_run(loaded, config)
        if ckpt_convert_format is not None or ckpt_convert_save is not None:
            if launched or read_environment().rank == 0:  # one of the processes that a launcher started
                convert_checkpoint(loaded, directory, ckpt_convert_format, ckpt_convert_save, host)
            return None
        if not launched:
            return train_as_rank(loaded, directory, host, warnings)
    arguments = rank_arguments(config, preset, set_, directory)
    if dry_run:
        if picture is not None:
            draw_launch(loaded.config, nnodes * (nproc or 1), picture)
        master = master_addr, master_port
        return typer.echo(describe_launch(loaded.config, nnodes, nproc or 1, arguments, master))
    from mt_core.launch.local import launch

    raise typer.Exit(
        launch(
            nproc or 1,
            arguments,
            nnodes=nnodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            run_dir=directory,
        )
    )


def translate_arguments(
    context: typer.Context, words: list[str], config: Path | None, preset: str | None, directory: Path
) -> Path:
    """What `mt import` makes of Megatron's arguments: a file in the run directory. Raises ConfigError."""
    if config is not None or preset is not None:
        option = "--preset" if config is None else str(config)
        raise ConfigError(f"{option} and --megatron-args both say what to train; keep one of them")
    path = directory / TRANSLATED
    translate = host_of(context)[COMMANDS].get("import", key="--megatron-args").app.load()
    translate(context, output=path, megatron_args=words)
    return path


def _announce(config: Path | None, preset: str | None) -> None:
    """A sign of life before torch is imported, which may take many seconds; of one process of a job: rank 0, or the
    process that starts the ranks here."""
    environment = read_environment()
    if environment.rank == 0 and environment.launcher != "mt":
        typer.echo(f"mt train: {config or preset or DEFAULT_PRESET}; loading torch and plugins ...")


def _name_of_run(loaded: LoadedConfig, config: Path | None) -> str:
    """The name of the file, of the preset, or of the checkpoint that the model comes from."""
    origin = loaded.origin("model.family")
    if config is None and origin.startswith("checkpoint "):
        return f"from-{Path(origin.removeprefix('checkpoint ')).name}"
    return config.stem if config is not None else str(loaded.preset)


def convert_checkpoint(
    loaded: LoadedConfig, directory: Path, saver: str | None, save_dir: str | None, host: PluginHost
) -> None:
    """What `mt convert` does, for the checkpoint that the run would go on from, or else for checkpoint.load."""
    from mt_core.checkpoint_lookup import find_checkpoint
    from mt_core.train.checkpoint.run_directory import RunDirectory

    if saver is None or save_dir is None:
        missing = "--ckpt-convert-format" if saver is None else "--ckpt-convert-save"
        raise ConfigError(f"{missing} is missing: --ckpt-convert-format and --ckpt-convert-save go together")
    keys = loaded.config.checkpoint
    load = keys.resume_from or keys.load
    # The order of training itself: a run's own checkpoint first, then resume_from, then load.
    own_checkpoint = RunDirectory(directory, keys.save).find(keys.ckpt_step)
    source = own_checkpoint or (find_checkpoint(load, keys.ckpt_step) if load is not None else None)
    if source is None:
        raise CheckpointError(
            f"{directory} has no checkpoint and checkpoint.load is not set: there is nothing to convert; give the "
            "--run-dir of a run, or --set checkpoint.load=PATH"
        )
    convert = host[COMMANDS].get("convert", key="--ckpt-convert-format").app.load()
    convert(load_dir=source, save_dir=save_dir, saver=saver)


def train_as_rank(loaded: LoadedConfig, directory: Path, host: PluginHost, warnings: Sequence[str] = ()) -> None:
    """Train in this process, alone or as one of the ranks that a launcher started. warnings: of the configuration."""
    from mt_cli.sample import prompt_of_sample
    from mt_core.launch.phases import PhaseTimeouts
    from mt_core.launch.session import rank_session
    from mt_core.launch.signals import INTERRUPTED_STATUS
    from mt_core.parallel.context import is_writer
    from mt_core.train import build
    from mt_core.train.trainer import Trainer

    # Before the process group is formed, which needs the type of the device for its backend.
    device = build.resolve_device(loaded.config.train.device)
    timeouts = PhaseTimeouts(**loaded.config.timeouts.model_dump())
    with rank_session(device.type, run_dir=directory, timeouts=timeouts) as session:
        trainer = Trainer(loaded, run_dir=directory, host=host, phases=session.phases)
        for text in warnings:
            trainer.warning(text)
        prompt = prompt_of_sample(trainer)
        # After the checkpoint was loaded: a run that is complete has nothing left to do, and says so.
        already = trainer.state.iteration
        result = trainer.train()
        if is_writer():
            _report(trainer, result, directory, already, prompt)
    # Behind the session, for which an exit with a status is a failure of the rank.
    if result.interrupted:
        raise typer.Exit(INTERRUPTED_STATUS)


def _report(trainer: Trainer, result: TrainResult, directory: Path, already: int, prompt: str | None) -> None:
    from rich.console import Console

    from mt_cli.sample import print_sample
    from mt_core.config.metrics import configured_loss
    from mt_core.train.reporting.log_lines import worded

    console = Console(highlight=False)
    if result.stopped:
        console.print(f"Stopped at step {result.state.iteration}; the same command goes on from there.")
        return
    if already == result.state.iteration:
        console.print(f"This run is complete ({counted(already, 'step')}). For a new one give another --run-dir.")
    in_nats = configured_loss(trainer.config, trainer.host).in_nats_per_token
    for name, loss in result.losses.items():
        bits = f" ({loss / _LN2:.3f} bits per token)" if in_nats else ""
        console.print(f"{worded(name)} {loss:.4f}{bits}", style="bold")
    for name, value in result.metrics.items():
        console.print(f"{worded(name)} {value:.4f}", style="bold")
    if trainer.best is not None and trainer.best.record is not None:
        best = trainer.best.record
        console.print(f"best {worded(best.metric)} {best.value:.4f} at step {best.iteration}: {directory}/best")
    for name, loss in result.reference_losses.items():
        console.print(f"a {name} model of the same text has {loss:.4f}")
    if prompt is not None:
        print_sample(trainer, prompt)
    elsewhere = trainer.config.checkpoint.save
    checkpoints = "checkpoints/" if elsewhere is None else f"and in {elsewhere}"
    console.print(f"\nThe run is in {directory}: config.json, metrics.jsonl, log.txt, {checkpoints}.", soft_wrap=True)
    console.print("Next:")
    for command, does in _next_commands(trainer, directory, prompt or "Once"):
        console.print(f"  {command}\n      {does}", markup=False, soft_wrap=True)


def _next_commands(trainer: Trainer, directory: Path, prompt: str) -> list[tuple[str, str]]:
    """Commands and what they do. prompt: a text to continue."""
    from mt_cli.sample import continues

    run = trainer.config.checkpoint.save or directory
    generate = (f"generate {run} --prompt {_quoted(prompt)}", "text from this model")
    chat = (f"chat {run}", "a conversation with this model")
    serve = (f"serve {run}", "the same in a browser")
    talks = [chat, serve] if trainer.config.data.dataset_type == "sft" else [generate, serve]
    preset = trainer.loaded.preset
    shown = f"config show --preset {preset} --origin" if preset else f"config show {directory}/config.json"
    commands = [
        *(talks if continues(trainer, prompt) else []),
        (f"ckpt inspect {run}", "what its checkpoint holds"),
        *([("models", "other models to train: mt models NAME says how")] if preset else []),
        (shown, "every setting, and where it came from" if preset else "every setting"),
    ]
    return [(f"{_own_command()} {arguments}", does) for arguments, does in commands]


def _quoted(text: str) -> str:
    """For a shell; in double quotes where these are enough, as users type it."""
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'


def _own_command() -> str:
    """What starts `mt` from the shell that this one was started from: `uv run` finds it where the shell does not."""
    if STARTED_BY_UV in os.environ:
        return "uv run mt"
    return "mt" if shutil.which("mt") else f"{sys.executable} -m mt_cli"


_LN2 = 0.6931471805599453
