"""`mt verify`: does this configuration compute the same under its layout as in one process?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mt_core.plugins import PluginHost, load_plugins

if TYPE_CHECKING:
    from mt_core.config.schema import Config
    from mt_tools.verify.comparison import Difference

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
    steps: Annotated[int, typer.Option(help="Optimizer steps to train.", min=1)] = 5,
    dropout: Annotated[
        float | None,
        typer.Option(help="Rate of all dropout. Default: as configured.", min=0.0, max=0.9, show_default=False),
    ] = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Compute in this, with its bounds.")] = "fp32",
) -> None:
    """Train a few steps of the configuration, made small, under its layout and in one process, on CPU.

    The batch grows after the first step, the learning rate warms up and decays, every second step is followed by an
    evaluation. Says what was made of the configuration, and what such a run cannot show. Compares the loss, the
    auxiliary losses, the gradient norm and the learning rate of each step, every gradient of the first one, the weights
    after the last, and the evaluations. A layout that divides nothing is run on two data-parallel processes. Exit code
    1 when something differs.
    """
    from mt_core.config.metrics import configured_loss
    from mt_tools.verify.comparison import SIXTEEN_BITS, Tolerances, compare
    from mt_tools.verify.run_record import in_the_same_rounds, record

    host = load_plugins()
    options = {"steps": steps, "dropout": dropout, "dtype": dtype, "same_rounds": not against}
    small = _small(config, preset, set_ or [], host, **options)
    world = None if against else 1
    other = in_the_same_rounds(_with_layout(small, against or [], host), world, small, host)
    typer.echo(f"{_layout(small)}\nagainst {_layout(other, world)}")
    # The embeddings of an untrained model are nearly equal. Rounding costs two digits of their differences.
    compares = configured_loss(small, host).compares_samples
    full = Tolerances(gradient=5e-4, weights=1e-4) if compares else Tolerances()
    tolerances = replace(full if dtype == "fp32" else SIXTEEN_BITS, least_loss=_least_loss(small, host))
    raise typer.Exit(_report(compare(record(small, steps=steps), record(other, world=world, steps=steps), tolerances)))


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
    from mt_tools.verify.comparison import Tolerances, compare
    from mt_tools.verify.run_record import record, record_resumed

    host = load_plugins()
    small = _small(config, preset, set_ or [], host)
    later = _with_layout(small, layout, host) if layout else small
    typer.echo(f"{_layout(small)}, resumed under {_layout(later)}")
    whole, resumed = record(small, steps=6), record_resumed(small, later, steps=3)
    exact = later == small
    tolerances = Tolerances(0.0, 0.0, 0.0, 0.0, 0.0) if exact else Tolerances(least_loss=_least_loss(small, host))
    raise typer.Exit(_report(compare(resumed, whole.after(3, gradients=resumed.gradients), tolerances)))


def _small(config: Path | None, preset: str | None, settings: list[str], host: PluginHost, **options: Any) -> Config:
    """The configuration, validated for as many processes as its layout needs, and shrunk; prints what was changed."""
    from mt_core.config.loading import load_config_anywhere
    from mt_tools.verify.changes import describe_changes, unseen
    from mt_tools.verify.small_config import shrink

    asked = load_config_anywhere(config, preset=preset, overrides=settings, host=host).config
    small = shrink(asked, host, **options)
    typer.echo(f"made small, and computed in {small.precision.dtype} on CPUs:\n{describe_changes(asked, small)}")
    if hidden := unseen(asked, small):
        typer.echo("\n".join(["which cannot show errors of:", *(f"  {each}" for each in hidden)]))
    return small


def _least_loss(small: Config, host: PluginHost) -> float:
    """The losses of a policy are products with advantages, about 1 large, whose mean is 0 but for rounding."""
    from mt_tools.verify.small_config import draws_completions

    return 1.0 if draws_completions(small, host) else 0.0


def _with_layout(small: Config, settings: list[str], host: PluginHost) -> Config:
    """The same run with only these keys of [parallel] set, and with logits where they exclude a loss without."""
    from mt_core.config.loading import config_from_dict, load_sections
    from mt_core.errors import ConfigError
    from mt_core.train.auto_choices import FUSED, excludes_fused_loss, with_loss

    for setting in settings:
        if not setting.startswith("parallel."):
            raise ConfigError(f"{setting}: a layout is made of keys such as parallel.context_parallel_size=2")
    parallel = load_sections(["parallel"], overrides=settings, host=host).parallel
    other = config_from_dict({**small.to_dict(), "parallel": parallel.model_dump(mode="json")}, host)
    has_logits = small.train.loss == FUSED and excludes_fused_loss(other, host)
    return with_loss(other, "cross_entropy") if has_logits else other


def _layout(config: Config, world: int | None = None) -> str:
    """ "8 processes, tensor_model_parallel_size 2, sequence_parallel"."""
    from mt_core.config.parallel import ParallelConfig
    from mt_tools.verify.small_layout import processes

    plain = ParallelConfig().model_dump()
    chosen = {key: value for key, value in config.parallel.model_dump().items() if value != plain[key]}
    count = world or processes(config.parallel)
    keys = [key if value is True else f"{key} {value}" for key, value in chosen.items()]
    return ", ".join([f"{count} process" + ("es" if count > 1 else ""), *keys])


def _report(differences: list[Difference]) -> int:
    """Prints the largest difference of each kind, and the first above its tolerance; returns the exit code."""
    kinds = list(dict.fromkeys(difference.kind for difference in differences))
    for kind in kinds:
        of_kind = [difference for difference in differences if difference.kind == kind]
        worst = max(of_kind, key=lambda difference: difference.size)
        typer.echo(f"{len(of_kind):4d} x {kind:14s} worst {worst}")
    wrong = [difference for difference in differences if difference.too_large]
    if not wrong:
        typer.echo("the same")
        return 0
    typer.echo(f"{len(wrong)} differ; the first: {wrong[0]}")
    return 1
