"""`mt plan`: memory, communication and compute of a layout, and a search for layouts, without a device."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.commands import host_of
from mt_core.wording import counted
from mt_tools.commands.tables import GIB, gib, number_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mt_core.config.schema import Config
    from mt_core.plugins import PluginHost
    from mt_tools.plan.layouts import LayoutPlan
    from mt_tools.plan.machines import Machine

Cells = tuple[str, ...]
DENSE = ("tp", "cp", "dp", "pp", "ep")
WEIGHTS = ("weights", "gradients", "main_weights", "optimizer_state")
MEMORY_COLUMNS = ("weights", "gradients", "main", "state", "activations", "buffers")
SEARCHED_AXES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "dp": "data_parallel_size",
}
EXPERT_AXES = {"ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size"}
OF_ONE_LAYOUT = (
    "expert_tensor_parallel_size",
    "pipeline_model_parallel_layout",
    "hierarchical_context_parallel_sizes",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_backward_communicator",
)
"""Keys of [parallel] that are valid in the configured layout only: a search ignores them."""
COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
STEP_PARTS = ("products", "messages", "waiting", "end")


def plan(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="TOML, YAML or JSON file, or a preset.", show_default=False)
    ] = None,
    world_size: Annotated[int, typer.Option(help="Ranks.", min=1, show_default=False)] = 1,
    preset: Annotated[str | None, typer.Option(help="Values to start from.", show_default=False)] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; repeatable.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Rank other layouts of as many ranks.")] = False,
    longest_sequence: Annotated[
        bool, typer.Option("--longest-sequence", help="Plan the longest data.seq_length that fits.")
    ] = False,
    memory_gib: Annotated[
        float | None, typer.Option(help="Memory of a rank. Default: the machine's.", show_default=False)
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="h100, h200 or a100, in nodes of 8, or this computer: this. Default: h100.", show_default=False
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="Layouts to show of a search.", min=1)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what each rank holds, sends and computes under the configured layout, or search for layouts that fit."""
    from mt_tools.plan.machines import get_machine

    chosen, host = get_machine(machine, world_size), host_of(context)
    limit = chosen.usable_gib if memory_gib is None else memory_gib
    _require_memory(limit)
    _require_one(search, longest_sequence)
    load = partial(_load, config, preset, world=world_size, host=host)
    if chosen.is_cpu:
        # Kernels and master weights are those of a CPU.
        set_ = ["train.device=cpu", *(set_ or [])]
    if search:
        _require_speed(chosen)
        _search(load(set_ or [], search=True), world_size, host, chosen, limit, top, as_json=as_json)
    elif longest_sequence:
        _longest(load, set_ or [], world_size, host, chosen, limit, as_json=as_json)
    else:
        _plan(load(set_ or []), world_size, host, chosen, limit, as_json=as_json)


def _require_memory(gib: float) -> None:
    from mt_core.errors import ConfigError

    if not (gib > 0 and math.isfinite(gib)):
        raise ConfigError(f"--memory-gib {gib} is no memory of a rank; give a positive number")


def _require_speed(machine: Machine) -> None:
    from mt_core.errors import ConfigError

    if not machine.has_speed:
        raise ConfigError(f"--search ranks layouts by time, which is not known of {machine.name}; give --machine h100")


def _require_one(search: bool, longest_sequence: bool) -> None:
    from mt_core.errors import ConfigError

    if search and longest_sequence:
        raise ConfigError(
            "--search looks for layouts of one sequence length, and --longest-sequence for the length that one layout "
            "holds; give one of them"
        )


def _load(
    config: Path | None,
    preset: str | None,
    settings: list[str],
    *,
    world: int,
    host: PluginHost,
    search: bool = False,
) -> Config:
    """Validated for the world size. For a search validated as one copy of the model, since it validates each layout."""
    from mt_core.config.checks import as_world
    from mt_core.config.loading import load_config

    settings = [*settings, *_length(config, preset, settings, host)]
    axes = (
        "tensor_model_parallel_size",
        "context_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
    )
    single = [f"parallel.{axis}=1" for axis in axes] if search else []
    single += [f"parallel.{key}=false" for key in ("sequence_parallel", *COUNTED_AS_LAYERS)] if search else []
    single += [f"parallel.{key}=null" for key in OF_ONE_LAYOUT] if search else []
    with as_world(1 if search else world):
        return load_config(config, preset=preset, overrides=[*settings, *single], host=host).config


def _length(config: Path | None, preset: str | None, settings: list[str], host: PluginHost) -> list[str]:
    """A length of the run, which changes nothing of a plan, where only a preset is given and has none."""
    from mt_core.config.loading import load_sections

    if config is not None and config.exists():
        return []
    train = load_sections(["train"], config, preset=preset, overrides=settings, host=host).train
    lengths = (train.train_iters, train.train_samples, train.train_epochs)
    return ["train.train_iters=1"] if all(length is None for length in lengths) else []


def _plan(config: Config, world: int, host: PluginHost, machine: Machine, limit: float, *, as_json: bool) -> None:
    from mt_tools.plan.layouts import Planner

    planner = Planner(config, host, machine)
    planner.require_suitable_data()
    _show_plan(planner.plan(config, world), machine, limit, as_json=as_json)


def _show_plan(layout_plan: LayoutPlan, machine: Machine, limit: float, *, as_json: bool, **more: int) -> None:
    """more: further entries of the JSON."""
    from mt_tools.plan.report import plan_values

    values = plan_values(layout_plan, machine)
    if as_json:
        typer.echo(
            json.dumps({**values, "memory_gib": limit, "fits": layout_plan.memory_gib <= limit, **more}, indent=2)
        )
        return
    _print_plan(layout_plan, values, machine, limit)


UNIT = 1024
"""Tokens of each context- and tensor-parallel rank by which --longest-sequence is rounded down."""


def _longest(
    load: Callable[[list[str]], Config],
    settings: list[str],
    world: int,
    host: PluginHost,
    machine: Machine,
    limit: float,
    *,
    as_json: bool,
) -> None:
    from mt_core.errors import ConfigError
    from mt_tools.plan.layout_search import longest_sequence

    parallel, (key, positions) = (config := load(settings)).parallel, _positions(config.model)

    def load_at(length: int) -> Config:
        # Longer than the model's positions: planned as if it had more of them.
        more = [f"{key}={length}"] if positions is not None and length > positions else []
        return load([*settings, f"data.seq_length={length}", *more])

    unit = UNIT * parallel.context_parallel_size * parallel.tensor_model_parallel_size
    longest = longest_sequence(load_at, world, host, machine, limit, unit)
    if longest is None:
        raise ConfigError(
            f"not even data.seq_length={unit} fits into {limit:.1f} GiB a rank; recompute more "
            "(recompute.recompute_granularity), or divide the model over more ranks ([parallel])"
        )
    length, plan = longest
    _show_plan(plan, machine, limit, as_json=as_json, longest_sequence=length)
    if not as_json:
        typer.echo(f"the longest sequence that fits is data.seq_length={length}, in steps of {unit}")


def _positions(model: Any) -> tuple[str, int | None]:
    """The key of the longest sequence, that of the decoder in a model of images and text, and its value."""
    decoder = getattr(model, "language_model", None)
    section = "model" if decoder is None else "model.language_model"
    return f"{section}.max_position_embeddings", getattr(decoder or model, "max_position_embeddings", None)


def _print_plan(layout_plan: LayoutPlan, values: dict[str, Any], machine: Machine, limit: float) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    layout = " x ".join(f"{name} {size}" for name, size in values["layout"].items() if size > 1 and name in DENSE)
    console.print(
        f"{counted(layout_plan.world, 'rank')}: {layout or 'one process'}; "
        f"{layout_plan.micro_batches} micro-batches a step"
    )
    parameters = values["parameters"]
    active = f", of which a token uses {parameters['active']:,}" if parameters["active"] != parameters["total"] else ""
    console.print(f"{parameters['total']:,} parameters{active}; a rank's are those with the padding of its vocabulary")
    stages, memory = _rank_tables(values["ranks"])
    console.print(stages, "", memory, sep="\n")
    imbalanced = [
        rank["imbalanced_activations"] for rank in values["ranks"] if rank["imbalanced_activations"] is not None
    ]
    if imbalanced:
        most = max(imbalanced) / GIB
        console.print(f"if all tokens chose the same experts, their rank would keep {most:.2f} GiB of activations")
    console.print()
    console.print(_message_table(values["ranks"]))
    if layout_plan.ramp_up:
        (first, _), (last, _) = layout_plan.ramp_up[0], layout_plan.ramp_up[-1]
        growing = sum(steps for size, steps in layout_plan.ramp_up if size < last)
        console.print(f"\nglobal batch from {first} to {last} samples over {counted(growing, 'step')}")
    console.print(
        f"\n{layout_plan.flops_per_token:.4g} FLOPs a token, {layout_plan.flops_per_step:.4g} a step; "
        f"bubble {layout_plan.bubble:.1%}"
    )
    if machine.has_speed:
        console.print(
            f"estimated on {machine.name}: {layout_plan.seconds:.3g} s a step, "
            f"{layout_plan.utilization(machine):.1%} of its FLOP/s"
        )
    verdict = "fits into" if layout_plan.memory_gib <= limit else "does not fit into"
    console.print(
        f"the fullest rank holds {layout_plan.memory_gib:.2f} GiB, which {verdict} {_memory_of(machine, limit)}",
        style="bold",
    )
    _print_assumption(console, machine)


def _print_assumption(console: Console, machine: Machine) -> None:
    from mt_tools.plan.machines import assumption

    if line := assumption(machine):
        console.print(line)


def _memory_of(machine: Machine, limit: float) -> str:
    return f"{limit:.1f} GiB" + ("" if machine.has_speed else f" of {machine.name}")


def _rank_tables(ranks: list[dict[str, Any]]) -> tuple[Table, Table]:
    """GiB per rank by kind: two tables, since one would not fit into 80 columns."""
    stages = number_table("pipeline rank", "ranks", "parameters of each", "micro-batches in flight")
    for first, last, count, cells in _joined(ranks, _stage_cells):
        stages.add_row(_span(first, last), str(count), *cells)
    memory = number_table("GiB of a rank", *MEMORY_COLUMNS, "all")
    for first, last, _, cells in _joined(ranks, _memory_cells):
        memory.add_row(_span(first, last), *cells)
    return stages, memory


def _stage_cells(rank: dict[str, Any]) -> Cells:
    return f"{rank['parameters']:,}", str(rank["micro_batches_in_flight"])


def _memory_cells(rank: dict[str, Any]) -> Cells:
    sizes = rank["bytes"]
    kept = sum(sizes["activations"].values()) + sizes["temporary"]
    parts = (*(sizes[key] for key in WEIGHTS), kept, sizes["communication_buffers"], sizes["total"])
    return tuple(gib(part) for part in parts)


def _message_table(ranks: list[dict[str, Any]]) -> Table:
    """Messages of one rank in a step, by axis."""
    axes = list(dict.fromkeys(axis for rank in ranks for axis in rank["messages"]))

    def sent(rank: dict[str, Any]) -> Cells:
        return tuple(gib(rank["messages"].get(axis, {}).get("sent", 0)) for axis in axes)

    table = number_table("GiB sent", *axes)
    for first, last, _, cells in _joined(ranks, sent):
        table.add_row(_span(first, last), *cells)
    return table


def _joined(
    ranks: list[dict[str, Any]], cells_of: Callable[[dict[str, Any]], Cells]
) -> Iterator[tuple[int, int, int, Cells]]:
    """(first pipeline rank, last one, ranks, cells): neighbours with equal cells are merged into one row."""
    in_order = sorted(((number, rank) for rank in ranks for number in rank["pp_ranks"]), key=itemgetter(0))
    # groupby joins neighbours only: ranks in between with other numbers keep rows apart.
    for cells, alike in groupby(in_order, lambda pair: cells_of(pair[1])):
        row = list(alike)
        yield row[0][0], row[-1][0], sum(rank["count"] // len(rank["pp_ranks"]) for _, rank in row), cells


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _search(
    config: Config, world: int, host: PluginHost, machine: Machine, limit: float, top: int, *, as_json: bool
) -> None:
    from rich.console import Console

    from mt_tools.plan.layout_search import QuickPlanner, search
    from mt_tools.plan.report import search_values

    planner = QuickPlanner(config, host, machine)
    planner.require_suitable_data()
    values = search_values(search(planner, world, limit), machine, top)
    if as_json:
        typer.echo(json.dumps({"world_size": world, "memory_gib": limit, **values}, indent=2))
        return
    console = Console(highlight=False)
    console.print(
        f"{counted(world, 'rank')} of {limit:.1f} GiB, global batch {config.train.global_batch_size}: "
        f"{values['legal']} legal layouts looked at, {values['fitting']} fit"
    )
    if values["layouts"]:
        layout_table, time_table = _search_tables(values["layouts"])
        console.print(layout_table, "", time_table, "", sep="\n")
        for reason in values["experts_because"]:
            console.print(reason, style="dim", markup=False)
    elif values["smallest_that_does_not_fit_gib"]:
        console.print(f"the smallest of them needs {values['smallest_that_does_not_fit_gib']:.1f} GiB")
    for refusal in values["refused"]:
        console.print(f"{refusal['layouts']} refused: {refusal['reason']}", style="dim", markup=False)
    _print_assumption(console, machine)


def _search_tables(layouts: list[dict[str, Any]]) -> tuple[Table, Table]:
    """The layouts, with the estimated seconds of each by part. Expert columns are shown if a layout shards experts."""
    axes = SEARCHED_AXES | (EXPERT_AXES if any(_divides_experts(layout) for layout in layouts) else {})
    layout_table = number_table("#", *axes, "micro batch", "recompute", "GiB", "tokens/s", "of peak")
    time_table = number_table("seconds of #", "a step", *STEP_PARTS)
    for number, layout in enumerate(layouts, 1):
        layout_table.add_row(
            str(number),
            *(str(layout.get(key) or 1) for key in axes.values()),
            str(layout["micro_batch_size"]),
            layout["recompute_granularity"],
            f"{layout['gib']:.1f}",
            f"{layout['estimated_tokens_per_second']:,.0f}",
            f"{layout['estimated_utilization']:.1%}",
        )
        seconds = f"{layout['estimated_seconds']:.3g}"
        time_table.add_row(
            str(number), seconds, *(f"{layout['estimated_seconds_of'][part]:.3g}" for part in STEP_PARTS)
        )
    return layout_table, time_table


def _divides_experts(layout: dict[str, Any]) -> bool:
    return any((layout.get(key) or 1) > 1 for key in EXPERT_AXES.values())
