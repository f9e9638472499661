"""`mt ckpt merge`: several models of one architecture become one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, ConvertOptions
from mt_core.errors import ConfigError
from mt_core.paths import as_path
from mt_core.plugins import load_plugins

RECIPES = (".yaml", ".yml", ".json")


def merge(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Checkpoints of any format; or one file in mergekit's form (.yaml)."),
    ],
    save_dir: Annotated[
        str, typer.Option(metavar="PATH", help="The directory to write; it must not exist, or be empty.")
    ],
    method: Annotated[
        str, typer.Option(help="linear, slerp, task_arithmetic, ties, dare_linear, dare_ties or passthrough.")
    ] = "linear",
    base: Annotated[
        str | None, typer.Option(help="The model that differences are from; of slerp the one of --t 0.")
    ] = None,
    weight: Annotated[
        list[float] | None, typer.Option(help="Weight of each MODEL, in their order; repeatable. Default: 1.")
    ] = None,
    density: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of TIES and DARE: share of the elements that stays.")
    ] = None,
    t: Annotated[float | None, typer.Option(help="Of slerp: from 0, --base, to 1, MODEL.")] = None,
    scale: Annotated[
        float | None, typer.Option("--lambda", help="Factor of the merged differences. Default: 1.")
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="Divide by the weights. Default: with linear and TIES.")
    ] = None,
    rescale: Annotated[
        str | None, typer.Option(help="Of DARE: l1 (as mergekit), density (as the paper) or none. Default: l1.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the elements that DARE draws.")] = 0,
    saver: Annotated[str, typer.Option(help="The format to write.")] = "hf",
    loader: Annotated[str, typer.Option(help="The format to read; auto recognizes it by the files.")] = "auto",
) -> None:
    """Merge models of one architecture, each tensor as mergekit does it in fp32, rounded once."""
    from mt_ckpt.contents import open_any
    from mt_ckpt.merging.merged import Merged
    from mt_ckpt.merging.recipe import MergeRecipe, Slice, Source, read_recipe
    from mt_ckpt.writing.output_folders import require_free, target_path

    host = load_plugins()
    spec = host[CHECKPOINT_SAVERS].get(saver, key="--saver")
    target, write = target_path(save_dir, spec), spec.convert
    require_free(target)
    if write is None:
        raise ConfigError(f"--saver {saver}: this format is written by training only")
    options = {"density": density, "t": t, "lambda": scale, "normalize": normalize, "rescale": rescale}
    chosen = {key: value for key, value in options.items() if value is not None}
    if len(models) == 1 and Path(models[0]).suffix in RECIPES:
        if chosen or weight or base:
            raise ConfigError(f"{models[0]} says how to merge; leave out the options --base, --weight and parameters")
        recipe = read_recipe(Path(models[0]))
    else:
        weights = _weights(models, weight, method)
        sources = [Source(model, None, keys) for model, keys in zip(models, weights, strict=True)]
        recipe = MergeRecipe(method, (Slice(tuple(sources)),), base, chosen)
    readers = {model: open_any(as_path(model), host, loader).reader for model in recipe.models()}
    merged = Merged(recipe, readers, host, seed)
    write.load()(target, merged, ConvertOptions(), host)
    typer.echo(f"{save_dir}: {recipe.method} of {', '.join(recipe.models())} ({len(merged.shapes())} tensors)")


def _weights(models: list[str], weights: list[float] | None, method: str) -> list[dict[str, Any]]:
    """Parameters of each model."""
    if method in ("slerp", "passthrough"):
        if weights:
            raise ConfigError(f"--weight is no parameter of {method}; remove it")
        return [{} for _ in models]
    if weights is not None and len(weights) not in (1, len(models)):
        raise ConfigError(f"--weight is given {len(weights)} times for {len(models)} models; give it once for each")
    each = weights or [1.0]
    return [{"weight": value} for value in (each * len(models) if len(each) == 1 else each)]
