"""`mt verify`: does this configuration compute under its layout what one process computes?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.plugins import PluginHost, load_plugins

if TYPE_CHECKING:
    from mt_core.config.schema import Config
    from mt_core.verify.compare import Difference

app = typer.Typer(no_args_is_help=True, help="Check that a layout, or a resumed run, computes the same.")

ConfigFile = Annotated[Path | None, typer.Argument(help="TOML or JSON file.", show_default=False)]
Preset = Annotated[str | None, typer.Option(help="Values to start from.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value.")]


@app.command()
def layout(
    config: ConfigFile = None,
    preset: Preset = None,
    set_: Settings = None,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="PARALLEL.KEY=VALUE", help="Compare with this layout. Default: one process."),
    ] = None,
) -> None:
    """Train three steps of the configuration, made small, under its layout and in one process, on CPU.

    Says what was made of the configuration, and compares the loss, every gradient, the gradient norm and the weights.
    Exit code 1 when something differs.
    """
    from mt_core.verify.compare import compare
    from mt_core.verify.small_runs import record

    host = load_plugins()
    small = _small(config, preset, set_ or [], host)
    other = _with_layout(small, against or [], host)
    typer.echo(f"{_layout(small)}\nagainst {_layout(other)}")
    raise typer.Exit(_report(compare(record(small), record(other))))


@app.command()
def resume(
    config: ConfigFile = None,
    preset: Preset = None,
    set_: Settings = None,
    layout: Annotated[
        list[str] | None,
        typer.Option("--then", metavar="PARALLEL.KEY=VALUE", help="Go on under this layout. Default: the same one."),
    ] = None,
) -> None:
    """Train six steps at once, and three, a checkpoint, new processes and three more: the weights have to agree.

    Bit for bit under the same layout; within rounding when --then changes it. Exit code 1 when something differs.
    """
    from mt_core.verify.compare import Tolerances, compare
    from mt_core.verify.small_runs import record, record_resumed

    host = load_plugins()
    small = _small(config, preset, set_ or [], host)
    later = _with_layout(small, layout, host) if layout else small
    typer.echo(f"{_layout(small)}, resumed under {_layout(later)}")
    whole, resumed = record(small, steps=6), record_resumed(small, later, steps=3)
    exact = later == small
    tolerances = Tolerances(0.0, 0.0, 0.0, 0.0) if exact else Tolerances()
    whole.losses, whole.norms, whole.gradients = whole.losses[3:], whole.norms[3:], resumed.gradients
    raise typer.Exit(_report(compare(resumed, whole, tolerances)))


def _small(config: Path | None, preset: str | None, settings: list[str], host: PluginHost) -> Config:
    """The configuration, checked for as many processes as its layout needs, and made small, which is told."""
    from mt_core.config.loading import load_config_anywhere
    from mt_core.verify.changes import describe_changes
    from mt_core.verify.shrink import shrink

    asked = load_config_anywhere(config, preset=preset, overrides=settings, host=host).config
    small = shrink(asked, host)
    typer.echo(f"made small, and computed in fp32 on CPUs:\n{describe_changes(asked, small)}")
    return small


def _with_layout(small: Config, settings: list[str], host: PluginHost) -> Config:
    """The same run with only these keys of [parallel] set."""
    from mt_core.config.loading import config_from_dict, load_sections
    from mt_core.errors import ConfigError

    for setting in settings:
        if not setting.startswith("parallel."):
            raise ConfigError(f"{setting}: a layout is made of keys such as parallel.context_parallel_size=2")
    parallel = load_sections(["parallel"], overrides=settings, host=host).parallel
    return config_from_dict({**small.to_dict(), "parallel": parallel.model_dump(mode="json")}, host)


def _layout(config: Config) -> str:
    """ "8 processes, tensor_model_parallel_size 2, sequence_parallel"."""
    from mt_core.config.schema import ParallelConfig
    from mt_core.verify.axes import processes

    plain = ParallelConfig().model_dump()
    chosen = {key: value for key, value in config.parallel.model_dump().items() if value != plain[key]}
    count = processes(config.parallel)
    keys = [key if value is True else f"{key} {value}" for key, value in chosen.items()]
    return ", ".join([f"{count} process" + ("es" if count > 1 else ""), *keys])


def _report(differences: list[Difference]) -> int:
    """Prints the worst of each kind, and the first that is too large; returns the exit code."""
    kinds = list(dict.fromkeys(difference.kind for difference in differences))
    for kind in kinds:
        own = [difference for difference in differences if difference.kind == kind]
        worst = max(own, key=lambda difference: float("inf") if difference.off is None else difference.off)
        typer.echo(f"{len(own):4d} x {kind:14s} worst {worst}")
    wrong = [difference for difference in differences if difference.too_large]
    if not wrong:
        typer.echo("the same")
        return 0
    typer.echo(f"{len(wrong)} differ; the first: {wrong[0]}")
    return 1
