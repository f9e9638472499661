"""`mt tune prune`: a smaller model of the most active parts of a larger one, to be distilled afterwards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.commands import host_of, need
from mt_core.errors import ConfigError
from mt_core.paths import as_path
from mt_tune.commands.options import RecordOptions, TrainingOptions
from mt_tune.commands.recipe import Tree, data_section, merged, template_keys
from mt_tune.commands.sft import built_dataset, loaded_config

if TYPE_CHECKING:
    from mt_core.checkpoint_specs import CheckpointReader
    from mt_core.interfaces import Dataset
    from mt_core.plugins import PluginHost
    from mt_tune.pruning.prune import Pruned
    from mt_tune.pruning.sizes import Sizes

SIZES, DATA, OUTPUT = "Sizes", "Calibration data", "What is written"
LENGTH = 512


def prune(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a checkpoint or a run.")],
    data: Annotated[
        list[str] | None,
        typer.Argument(help="Records of mt tune sft to measure activations on. Default: the built-in corpus."),
    ] = None,
    *,
    save_dir: Annotated[
        Path, typer.Option(parser=as_path, metavar="DIR", help="The folder to write.", rich_help_panel=OUTPUT)
    ],
    depth: Annotated[int | None, typer.Option(help="Layers to keep.", min=1, rich_help_panel=SIZES)] = None,
    width: Annotated[
        int | None, typer.Option(help="Channels of the residual stream to keep.", min=1, rich_help_panel=SIZES)
    ] = None,
    ffn: Annotated[
        int | None, typer.Option(help="Inner channels of feed-forwards to keep.", min=1, rich_help_panel=SIZES)
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads to keep.", min=1, rich_help_panel=SIZES)] = None,
    experts: Annotated[
        int | None, typer.Option(help="Experts of each layer to keep.", min=1, rich_help_panel=SIZES)
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples to measure on.", min=1, rich_help_panel=DATA)] = 128,
    seq_length: Annotated[
        int | None, typer.Option(help="Positions of a sample. Default: at most 512.", min=8, rich_help_panel=DATA)
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Chat template of the records, as in mt tune sft.", rich_help_panel=DATA)
    ] = None,
    saver: Annotated[
        str, typer.Option(help="The format to write, such as hf; mt plugins lists them.", rich_help_panel=OUTPUT)
    ] = "mt",
) -> None:
    """Keep the layers, channels, heads and experts that are most active on data; mt tune distill repairs the rest."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt tune prune")
    from mt_ckpt.convert.source import Source
    from mt_ckpt.writing.output_folders import require_free
    from mt_ckpt.writing.resumable import work_key
    from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
    from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, ConvertOptions
    from mt_tune.pruning.prune import prune as prune_model
    from mt_tune.pruning.prune import token_batches
    from mt_tune.pruning.sizes import Sizes

    host = host_of(context)
    spec = host[CHECKPOINT_SAVERS].get(saver, key="--saver")
    if spec.convert is None:
        raise ConfigError(f"--saver {saver}: this format is written by training only")
    require_free(save_dir)
    sizes = Sizes(depth=depth, width=width, ffn=ffn, heads=heads, experts=experts)
    source = open_checkpoint(find_checkpoint(model), host)
    _require(source, sizes, host)
    dataset = _calibration(host, model, data, RecordOptions(hold_out=0, template=template), seq_length)
    pruned = prune_model(source, token_batches(dataset, samples), sizes, host)
    save_dir.parent.mkdir(parents=True, exist_ok=True)
    key = work_key("pruned", model, repr(sizes), str(samples))
    spec.convert.load()(save_dir, Source(pruned.checkpoint, key), ConvertOptions(), host)
    typer.echo(_summary(pruned, source, save_dir, model))


def _require(source: CheckpointReader, sizes: Sizes, host: PluginHost) -> None:
    """Before data are read: ConfigError for what cannot be pruned."""
    from mt_ckpt.model import model_config
    from mt_tune.pruning.sizes import require_prunable

    require_prunable(model_config(source, host).model, sizes)


def _calibration(
    host: PluginHost, model: str, data: list[str] | None, records: RecordOptions, seq_length: int | None
) -> Dataset:
    start: Tree = {"checkpoint": {"load": model}}
    section: dict[str, Any] = {"dataset_type": "builtin"}
    if data:
        section = data_section("sft", data, records, template_keys(None, start, host))
    options = TrainingOptions()
    config = loaded_config(host, None, merged(start, {"data": {**section, "seq_length": 8}}), options, 1)
    longest = getattr(config.model, "max_sequence_length", None) or LENGTH
    section["seq_length"] = seq_length or min(LENGTH, longest)
    dataset = built_dataset(loaded_config(host, None, merged(start, {"data": section}), options, 1), "train", host)
    if dataset is None or not len(dataset):
        raise ConfigError("the data have no sample to measure activations on")
    return dataset


def _summary(pruned: Pruned, source: CheckpointReader, save_dir: Path, model: str) -> str:
    before = sum(math.prod(shape) for shape in source.shapes().values())
    after = sum(math.prod(shape) for shape in pruned.checkpoint.shapes().values())
    layers = ", ".join(str(number + 1) for number in pruned.kept.layers)
    return (
        f"{save_dir}: {after:,} of {before:,} parameters, layers {layers}, by activations at {pruned.positions:,} "
        f"positions\nnext: mt tune distill {save_dir} DATA --teacher {model}"
    )
