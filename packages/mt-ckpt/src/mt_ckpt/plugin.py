"""What mt-ckpt registers."""

from __future__ import annotations

from mt_core.hookspecs import hookimpl
from mt_core.specs import CheckpointLoaderSpec, CheckpointSaverSpec, CommandSpec, Lazy


@hookimpl
def mt_register_checkpoint_loaders() -> list[CheckpointLoaderSpec]:
    return [
        CheckpointLoaderSpec(
            name="mt",
            doc="mt's own format: safetensors shards, JSON and checksums in one directory",
            detect=Lazy("mt_ckpt.native.manifest:detect"),
            open=Lazy("mt_ckpt.native.read:open_checkpoint"),
        )
    ]


@hookimpl
def mt_register_checkpoint_savers() -> list[CheckpointSaverSpec]:
    return [
        CheckpointSaverSpec(
            name="mt",
            doc="mt's own format, staged, synced and renamed into place",
            save=Lazy("mt_ckpt.native.save:save_checkpoint"),
        )
    ]


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [CommandSpec(name="ckpt", doc="Inspect and verify checkpoints", app=Lazy("mt_ckpt.commands:app"))]
