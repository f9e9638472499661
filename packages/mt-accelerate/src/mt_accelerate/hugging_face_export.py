"""`Accelerator.save_model`: the weights of a prepared model in Hugging Face's format."""

from __future__ import annotations

from pathlib import Path

from mt_accelerate.data_parallel import on_first_rank
from mt_ckpt.convert.engine import convert
from mt_ckpt.sizes import parse_bytes
from mt_core.paths import remove_tree
from mt_core.plugins import PluginHost
from mt_core.specs import ConvertOptions
from mt_core.train import Engine


def export(engine: Engine, folder: Path, max_shard_size: str, host: PluginHost) -> None:
    """Write what `from_pretrained` loads: whole weights, in the precision of training. Every rank writes its shards
    beside the folder; the first one converts and removes them. Collective. Raises ConfigError and CheckpointError."""
    options = ConvertOptions(
        dtype=engine.config.precision.dtype,
        max_shard_size=parse_bytes(max_shard_size, "save_model(max_shard_size=...)"),
    )
    folder = folder.absolute()  # "." has no name
    # No rank holds the whole weights, so that they pass through a sharded
    # checkpoint beside the folder, on the same disk.
    shards, written = (folder.with_name(f".{folder.name}.{part}") for part in ("shards", "export"))
    checkpoint = engine.save_state(shards, with_optimizer=False)

    def write() -> None:
        try:
            convert(checkpoint, written, saver="hf", options=options, host=host)
            _replace_files(written, folder)
        finally:
            remove_tree(shards)
            if written.exists():
                remove_tree(written)

    on_first_rank(write)


def _replace_files(written: Path, folder: Path) -> None:
    """Into a folder that may have files, as Accelerate does: those of the same names, and the weights of an export
    before, are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"):
        for before in folder.glob(pattern):
            before.unlink()
    for file in written.iterdir():
        file.replace(folder / file.name)
