"""`mt estimate`: memory of a model by dtype, as `accelerate estimate-memory` lays it out, and of a rank of a layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.commands import host_of, need
from mt_tools.commands.tables import gib, number_table

if TYPE_CHECKING:
    from rich.table import Table

    from mt_core.parallel.context import AxisName
    from mt_tools.plan.estimate import DtypeEstimate, Estimate
    from mt_tools.plan.machines import Machine

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
DTYPES = ("float32", "bfloat16", "int8", "int4")
COLUMNS = ("weights", "gradients", "main", "state", "activations", "all", "s a step")
AXES: tuple[AxisName, ...] = ("tp", "cp", "dp", "pp", "ep")


def estimate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Preset, Hugging Face folder, or its config.json.")],
    dtypes: Annotated[
        list[str] | None,
        typer.Option(
            help="float32, bfloat16, float16, int8 or int4; repeatable, or with commas. Default: all but float16."
        ),
    ] = None,
    world_size: Annotated[int, typer.Option(help="Ranks of the layout.", min=1)] = 1,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Layout, batch, recomputation ...; repeatable."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="h100, h200, a100 or this: for estimates of time. Default: h100.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate the memory of a model: weights by dtype, training with Adam, and a rank of a layout."""
    need("torch", "mt-models", "mt-data", command="mt estimate")
    from mt_tools.plan.estimate import estimate as estimated
    from mt_tools.plan.machines import get_machine

    chosen = [dtype for names in dtypes or DTYPES for dtype in names.split(",")]
    on = get_machine(machine, world_size)
    result = estimated(model, chosen, host_of(context), on, world=world_size, overrides=set_ or [])
    if as_json:
        typer.echo(json.dumps(_values(result, on), indent=2))
    else:
        _print(result, on, world_size)


def _values(result: Estimate, machine: Machine) -> dict[str, Any]:
    from mt_tools.plan.report import plan_values

    name, parameters = result.size.largest_layer
    return {
        "model": result.model,
        "family": result.family,
        "parameters": result.size.parameters,
        "largest_layer": {"name": name, "parameters": parameters},
        "seq_length": result.seq_length,
        "machine": machine.name,
        "machine_is_assumed": machine.is_assumed,
        "not_planned": result.not_planned,
        "dtypes": [
            {
                "dtype": row.dtype,
                "largest_layer_bytes": row.largest_layer,
                "total_bytes": row.total,
                "training_bytes": row.training,
                "plan": None if row.rank is None else plan_values(row.rank, machine),
            }
            for row in result.dtypes
        ],
    }


def _print(result: Estimate, machine: Machine, world: int) -> None:
    from rich.console import Console

    from mt_tools.plan.machines import assumption

    console = Console(highlight=False, soft_wrap=True)
    name, _ = result.size.largest_layer
    parameters = f"{result.size.parameters:,} parameters"
    console.print(f"{result.model}: {result.family}, {parameters}; the largest layer is {name}\n")
    console.print(_dtype_table(result.dtypes))
    planned = [row for row in result.dtypes if row.rank is not None]
    if planned:
        console.print(_heading(planned[0], machine, world))
        console.print(_rank_table(planned, machine))
        if line := assumption(machine):
            console.print(line)
    elif result.not_planned is not None:
        console.print(
            f"\nactivations are not planned: {result.not_planned} (--set data.dataset_type=...)", markup=False
        )


def _dtype_table(rows: Sequence[DtypeEstimate]) -> Table:
    table = number_table("dtype", "Largest Layer", "Total Size", "Training using Adam")
    for row in rows:
        training = _size(row.training) if row.training is not None else "-"
        table.add_row(row.dtype, _size(row.largest_layer), _size(row.total), training)
    return table


def _heading(row: DtypeEstimate, machine: Machine, world: int) -> str:
    assert row.rank is not None
    config, sizes = row.rank.config, row.rank.sizes
    layout = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes[axis] > 1)
    ranks = f"the fullest of {world} ranks ({layout})" if world > 1 else "one process"
    return (
        f"\n{ranks}, micro-batches of {config.train.micro_batch_size} x {config.data.seq_length} tokens; "
        f"time on {machine.name}"
    )


def _rank_table(rows: Sequence[DtypeEstimate], machine: Machine) -> Table:
    table = number_table("GiB", *COLUMNS)
    for row in rows:
        assert row.rank is not None
        rank, weights = row.rank.largest, row.rank.largest.weights
        parts = (weights.weights, weights.gradients, weights.main_weights, weights.optimizer_state)
        kept = (rank.activation_bytes + rank.temporary + rank.buffers, rank.total)
        table.add_row(
            row.dtype, *(gib(part) for part in (*parts, *kept)), f"{row.rank.seconds:.3g}" if machine.has_speed else "-"
        )
    return table


def _size(size: float) -> str:
    """Four digits and a unit of 1024."""
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {UNITS[unit]}" if unit else f"{size:.0f} B"
