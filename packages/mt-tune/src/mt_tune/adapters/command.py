"""`mt ckpt merge-adapter`: a model without its adapter, which computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mt_core.paths import as_path
from mt_core.plugins import load_plugins


def merge_adapter(
    checkpoint: Annotated[
        Path, typer.Argument(parser=as_path, metavar="PATH", help="A run with an adapter, or the base of --adapter.")
    ],
    save_dir: Annotated[Path, typer.Argument(parser=as_path, metavar="DIR", help="The directory to write.")],
    adapter: Annotated[
        Path | None, typer.Option(parser=as_path, metavar="DIR", help="A PEFT folder to merge into PATH.")
    ] = None,
    saver: Annotated[str, typer.Option(help="The format to write; mt plugins lists them.")] = "hf",
    compare: Annotated[
        bool, typer.Option(help="Compute logits of both models, which takes the memory of two in fp32.")
    ] = True,
) -> None:
    """Merge an adapter into its base, in fp32, rounded once to the dtype of the base."""
    from mt_ckpt.convert.source import Source
    from mt_ckpt.locate import resolve_run
    from mt_ckpt.writing.output_folders import require_free
    from mt_ckpt.writing.resumable import work_key
    from mt_core.checkpoint_lookup import open_checkpoint
    from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, ConvertOptions
    from mt_core.errors import ConfigError
    from mt_tune.adapters.merge import MergedCheckpoint, largest_logit_change
    from mt_tune.adapters.on_base import AdaptedCheckpoint

    host = load_plugins()
    spec = host[CHECKPOINT_SAVERS].get(saver, key="--saver")
    if spec.convert is None:
        raise ConfigError(f"--saver {saver}: this format is written by training only")
    require_free(save_dir)
    source = open_checkpoint(resolve_run(checkpoint), host)
    if adapter is not None:
        source = AdaptedCheckpoint(source, adapter, host)
    merged = MergedCheckpoint(source, host)
    save_dir.parent.mkdir(parents=True, exist_ok=True)
    key = work_key("merged", str(checkpoint), str(adapter))
    spec.convert.load()(save_dir, Source(merged, key), ConvertOptions(), host)
    typer.echo(f"{save_dir}: written as {spec.name}, without an adapter")
    change = largest_logit_change(source, merged, host) if compare else None
    if change is not None:
        typer.echo(f"largest change of a logit by merging: {change:.3g}")
